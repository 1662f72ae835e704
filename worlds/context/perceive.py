"""What codec and context model make of demonstrations, row by row, exactly as they are served."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from omni_loop.training.checkpoint import load_config, load_weights, revision
from omni_loop.training.demos import Demos

from ..codec import CodecConfig, FrameCodec, to_float
from . import layout
from .decode import read_instruction, read_tick, slide
from .llama import ContextConfig, ContextModel

STRIDE = 8  # control steps between ticks
INSTRUCTION = "push the T onto the goal"


@dataclass(frozen=True)
class Seen:
    """What the codec sees of every framed row of a demonstration set."""

    latents: Tensor  # float16[n, 16, c] patchified latents
    frame: Tensor  # int16[n, 16] codes
    estimate: Tensor  # float32[n, 9, 2] points as the readout estimates them
    points: Tensor  # float32[n, 9, 2] true points
    action: Tensor  # float32[n, 2] in -1..1
    coverage: Tensor  # float32[n]


def load_codec(folder: Path) -> FrameCodec:
    """The shipped frame codec."""
    codec = FrameCodec(load_config(folder, CodecConfig))
    load_weights(folder, codec)
    return codec


def load_context(folder: Path) -> ContextModel:
    """The shipped context model."""
    model = ContextModel(load_config(folder, ContextConfig))
    load_weights(folder, model)
    return model


@torch.no_grad()
def perceive(codec: FrameCodec, revision: str, demos: Demos, log: Callable[[str], None], exact: bool = False) -> Seen:
    """Latents, tokens and scene estimates of all framed rows: ``exact`` in float32 as they are served, else
    with bfloat16 convolutions (as good for training: the readout's error grows by a hundredth).

    Kept beside the frames under the codec's revision: three trainers need the same minutes of encoding.
    """
    folder = demos.folder / f"seen-{revision}{'-exact' if exact else ''}"
    if not (folder / "estimate.npy").exists():
        _encode_all(codec, demos, folder, log, exact)
    n = len(demos.frames)
    return Seen(
        torch.from_numpy(np.load(folder / "latents.npy")),
        torch.from_numpy(np.load(folder / "frame.npy")),
        torch.from_numpy(np.load(folder / "estimate.npy")),
        torch.from_numpy(demos.points[:n]),
        torch.from_numpy(demos.action[:n] / 256 - 1).float(),
        torch.from_numpy(demos.coverage[:n]),
    )


def _encode_all(codec: FrameCodec, demos: Demos, folder: Path, log: Callable[[str], None], exact: bool) -> None:
    latents, codes, estimates, n = [], [], [], len(demos.frames)
    for lo in range(0, n, 128):
        with torch.autocast("cpu", torch.bfloat16, enabled=not exact):
            z = codec.encode(to_float(torch.from_numpy(demos.frames[lo : lo + 128]))).float()
            codes.append(codec.tokens(z).short())
            estimates.append(codec.scene(z).float())
        latents.append(codec.patchify(z).half())
        if lo % 12800 == 0:
            log(f"encoded {lo}/{n} frames")
    folder.mkdir(exist_ok=True)
    np.save(folder / "latents.npy", torch.cat(latents).numpy())
    np.save(folder / "frame.npy", torch.cat(codes).numpy())
    np.save(folder / "estimate.npy", torch.cat(estimates).numpy())  # last: its presence says all is there


def tokens_of(seen: Seen, rows: Tensor, before: Tensor, points: Tensor) -> Tensor:
    """Given tokens ``int64[..., 30]`` of ticks at ``rows[...]`` whose previous tick was at ``before``
    (-1: none). ``points [..., 9, 2]``."""
    known = (before >= 0) & (before < rows)
    last = (rows - 1).clamp_min(0)
    middle = torch.where(known, before + (rows - before - 1) // 2, 0).clamp_min(0)
    executed = torch.stack([seen.action[middle], seen.action[last]], -2)  # [..., 2, 2]
    given = layout.given_tokens(
        seen.frame[rows.clamp_min(0)].long().flatten(0, -2),
        points.flatten(0, -3),
        executed.flatten(0, -3),
        known.flatten(),
    )
    return given.view(*rows.shape, layout.GIVEN)


class ContextReader:
    """Gives a policy's trainer the context's cache of the present tick for every framed row."""

    def __init__(self, checkpoints: Path) -> None:
        self._codec, self._model = load_codec(checkpoints / "codec"), load_context(checkpoints / "context")
        self._revision = revision(checkpoints / "codec")

    @torch.no_grad()
    def tick_kv(self, demos: Demos, log: Callable[[str], None]) -> tuple[Tensor, Tensor]:
        """``(kv float16[n, layers, 2, 32, g, e], estimate float32[n, 9, 2])`` of the framed rows.

        Each episode is read ``STRIDE`` times, from its first rows on, so that every row is once the present
        tick with its own past behind it.
        """
        seen, c = perceive(self._codec, self._revision, demos, log), self._model.config
        n = len(seen.frame)
        kv = torch.zeros(n, c.num_hidden_layers, 2, layout.TICK, c.num_key_value_heads, c.head_dim, dtype=torch.float16)
        spans = [
            (int(demos.start[e]) + phase, int(demos.start[e] + demos.length[e]))
            for e in demos.episodes("expert", "perturbed", framed=True)
            for phase in range(STRIDE)
        ]
        spans.sort(key=lambda s: s[1] - s[0])
        head = read_instruction(self._model, layout.instruction_tokens(INSTRUCTION)[None])
        for lo in range(0, len(spans), 48):
            self._read(seen, spans[lo : lo + 48], head, kv)
            if lo % 960 == 0:
                log(f"context of {lo}/{len(spans)} passes")
        return kv, seen.estimate

    def _read(self, seen: Seen, spans: list[tuple[int, int]], head: Tensor, kv: Tensor) -> None:
        ticks = max((end - start + STRIDE - 1) // STRIDE for start, end in spans)
        start, end = torch.tensor(spans).unbind(1)
        past = head.expand(-1, -1, len(spans), -1, -1, -1)
        for t in range(ticks):
            rows = torch.minimum(start + t * STRIDE, end - 1)
            before = torch.where(torch.tensor(t) > 0, rows - STRIDE, -1)
            reading = read_tick(self._model, past, tokens_of(seen, rows, before, seen.estimate[rows]))
            past = slide(past, reading.kv, self._model.config.window_ticks)
            live = (start + t * STRIDE < end).numpy()
            kv[rows[live]] = reading.kv.permute(2, 0, 1, 3, 4, 5)[live].half()


__all__ = ["INSTRUCTION", "STRIDE", "ContextReader", "Seen", "load_codec", "load_context", "perceive", "tokens_of"]
