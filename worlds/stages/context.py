"""The context stage: sees an observation (real or imagined), remembers it, judges progress.

Inputs: ``observation`` (real) or ``imagined`` (the frames stage's latents of the tick before, in a pipeline
that feeds them back). A real one drops what was imagined since the last real one. Outputs: ``kv`` (the present
tick's cache for the act head), ``scene`` (points and the agent's position before), ``latents`` (of the frame seen,
for the frames stage), ``progress``; where chunks are chosen from several, ``window`` (all of the cache).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from omni_loop.errors import InvalidInput, StateError, TensorError
from omni_loop.messages import PayloadKind
from omni_loop.runner.attention import append_batch, gather_batch
from omni_loop.stage import KVSpec, Outputs, PagedKV, Payload, StageItem, StateSpec, in_one
from omni_loop.training.checkpoint import revision
from omni_loop.types import StageKind

from ..context import layout
from ..context.decode import Reading, read_instruction, read_tick
from ..context.perceive import INSTRUCTION, load_context
from ..scene import pose_points
from .shared import checkpoint, codec_of, encode, images_of, tensor_of, to_unit

if TYPE_CHECKING:
    from omni_loop.runner.kv_cell import KVCell


@dataclass(slots=True)
class Glance:
    """One tick's senses in -1..1 and its cache. ``latents [n, 16, c]`` are those of ``image uint8[96, 96, 3]``, or the
    imagined ones to look at; ``points [9, 2]``, partly measured; ``agent_before [2]`` and whether it is known; actions
    ``executed [k, 2]`` since the tick before. What is None here is read from latents, of all glances together."""

    kv: PagedKV
    executed: Tensor
    several: bool  # chunks will be chosen from
    image: Tensor | None = None
    latents: Tensor | None = None
    agent: Tensor | None = None  # [2, 2]: before and now
    keypoints: Tensor | None = None
    scene: Tensor | None = None  # [n, 9, 2] as read from latents

    @property
    def imagined(self) -> bool:
        return self.image is None

    @property
    def last(self) -> Tensor:
        """``[16, c]``."""
        assert self.latents is not None
        return self.latents[-1]

    @property
    def points(self) -> Tensor:
        keypoints = self._read[-1, 1:] if self.keypoints is None else self.keypoints
        agent = self._read[-1, :1] if self.agent is None else self.agent[1:]
        return torch.cat([agent, keypoints])

    @property
    def agent_before(self) -> Tensor:
        return self._read[0, 0] if self.agent is None else self.agent[0]

    @property
    def history(self) -> float:
        return float(self.agent is not None or len(self._read) == 2)

    @property
    def _read(self) -> Tensor:
        assert self.scene is not None
        return self.scene


class ContextStage:
    """See the module's text. Sessions' caches live in the paged pool; the instruction is the sink."""

    kind = StageKind.CONTEXT

    def __init__(self, checkpoints: str = "", device: str = "cpu") -> None:
        self.codec = codec_of(checkpoint("codec", checkpoints), device)
        folder = checkpoint("context", checkpoints)
        self.model = load_context(folder).to(device)
        self.revision = revision(folder)
        self._key = f"{self.revision}/".encode()  # what begins alike under the same weights shares its blocks
        self.device = device

    def state_specs(self) -> Mapping[str, StateSpec]:
        c = self.model.config
        per_tick = layout.TICK // 16
        return {
            "kv": KVSpec(
                layers=c.num_hidden_layers,
                kv_heads=c.num_key_value_heads,
                head_dim=c.head_dim,
                block_size=16,
                window_blocks=c.window_ticks * per_tick,
                sink_blocks=layout.INSTRUCTION // 16,
                scratch_blocks=layout.INSTRUCTION // 16 + per_tick,
            )
        }

    def run(self, items: Sequence[StageItem]) -> Sequence[Outputs | Exception]:
        return in_one(self._glance, self._look, items)

    def _glance(self, item: StageItem) -> Glance:
        kv = item.state.kv("kv")
        if seen := item.inputs.get("observation"):
            glance = self._real(seen, kv, "samples" in item.params)
        elif imagined := item.inputs.get("imagined"):
            glance = self._imagined(imagined, kv, "samples" in item.params)
        else:
            raise StateError("nothing to look at: this session has had no observation yet; call Infer first")
        if not glance.imagined:
            kv.drop_imagined()
        if kv.total == 0:
            tokens = layout.instruction_tokens(item.prompt or INSTRUCTION)
            kv.prefix(self._key + tokens.numpy().tobytes(), lambda: self._instruction(tokens))
        return glance

    def _instruction(self, tokens: Tensor) -> Tensor:
        """Cache ``[layers, 2, 32, g, e]``."""
        return read_instruction(self.model, tokens[None].to(self.device))[:, :, 0]

    def _real(self, payload: Payload, kv: PagedKV, several: bool) -> Glance:
        """The client measures the agent; the T is read from the frame unless its pose is given."""
        arrays = payload.arrays
        return Glance(
            kv,
            _positions("executed", arrays["executed"]) if "executed" in arrays else torch.zeros(0, 2),
            several,
            image=images_of(self.codec, arrays["image"][None])[0],
            agent=_positions("agent_pos", arrays["agent_pos"], 2),
            keypoints=_keypoints(arrays["block_pose"]) if "block_pose" in arrays else None,
        )

    def _imagined(self, payload: Payload, kv: PagedKV, several: bool) -> Glance:
        """All is read from the last two imagined frames."""
        latents = torch.as_tensor(payload.arrays["latents"], device=self.device).float()
        c = self.codec.config
        if tuple(latents.shape[1:]) != (c.tokens_per_frame, c.token_dim):
            want = ["n", c.tokens_per_frame, c.token_dim]
            raise TensorError(f"'latents' has shape {list(latents.shape)}, the context stage takes {want}")
        if len(latents) == 0:
            raise InvalidInput("the tick before imagined no frames: nothing to look at")
        executed = torch.as_tensor(payload.arrays["actions"], dtype=torch.float32).cpu()
        if executed.ndim != 2 or executed.shape[1] != 2:
            raise TensorError(f"'actions' has shape {list(executed.shape)}, expected [k, 2]")
        return Glance(kv, executed, several, latents=latents[-2:])

    @torch.no_grad()
    def _look(self, glances: Sequence[Glance]) -> list[Outputs | Exception]:
        self._read_frames(glances)
        last = torch.stack([glance.last for glance in glances])
        codes = self.codec.tokens(self.codec.unpatchify(last)).cpu()
        points = torch.stack([glance.points for glance in glances])
        executed, known = zip(*(layout.pick_executed(glance.executed) for glance in glances), strict=True)
        given = layout.given_tokens(codes, points, torch.stack(executed), torch.tensor(known)).to(self.device)
        results: dict[int, Outputs | Exception] = {}
        groups: dict[tuple[int, bool], list[int]] = {}
        for i, glance in enumerate(glances):
            groups.setdefault((glance.kv.length, glance.imagined), []).append(i)
        for (_, imagined), rows in groups.items():
            cells = [cast("KVCell", glances[i].kv) for i in rows]
            reading = read_tick(self.model, gather_batch(cells), given[rows])
            errors = append_batch(cells, reading.kv, imagined)
            for at, (i, error) in enumerate(zip(rows, errors, strict=True)):
                results[i] = error or self._outputs(glances[i], points[i], reading, at)
        return [results[i] for i in range(len(glances))]

    def _read_frames(self, glances: Sequence[Glance]) -> None:
        """Latents of all images, then the scene of all frames of which it is not known."""
        images = {i: glance.image for i, glance in enumerate(glances) if glance.image is not None}
        if images:
            for i, latents in zip(images, encode(self.codec, torch.stack(list(images.values()))), strict=True):
                glances[i].latents = latents[None]
        unknown = [glance for glance in glances if glance.keypoints is None]
        frames = [glance.latents for glance in unknown if glance.latents is not None]
        if frames:
            scenes = self.codec.scene(self.codec.unpatchify(torch.cat(frames))).cpu()
            for glance, scene in zip(unknown, scenes.split([len(part) for part in frames]), strict=True):
                glance.scene = scene

    def _outputs(self, glance: Glance, points: Tensor, reading: Reading, at: int) -> Outputs:
        outputs = {
            "kv": Payload(PayloadKind.KV, {"kv": reading.kv[:, :, at]}),
            "scene": Payload(
                PayloadKind.SCENE,
                {"points": points, "agent_before": glance.agent_before},
                {"history": glance.history},
            ),
            "latents": Payload(PayloadKind.LATENTS, {"latents": glance.last[None]}),
            "progress": Payload(PayloadKind.PROGRESS, {"progress": reading.progress[at], "done": reading.done[at]}),
        }
        if glance.several:  # imagined outcomes will be read behind all of it
            outputs["window"] = Payload(PayloadKind.KV, {"kv": glance.kv.gather()})
        return outputs

    def warm_up(self) -> None:
        tokens = layout.instruction_tokens(INSTRUCTION).to(self.device)
        past = read_instruction(self.model, tokens[None])
        image = torch.full((1, self.codec.config.frame_size, self.codec.config.frame_size, 3), 255, dtype=torch.uint8)
        z = self.codec.unpatchify(encode(self.codec, image))
        points = self.codec.scene(z)
        given = layout.given_tokens(self.codec.tokens(z), points, torch.zeros(1, 2, 2), torch.tensor([False]))
        read_tick(self.model, past, given)


def _keypoints(array: Any) -> Tensor:
    """Keypoints ``[8, 2]`` in -1..1 of the T's pose."""
    pose = tensor_of(array).float()
    if tuple(pose.shape) != (3,):
        raise TensorError(f"'block_pose' has shape {list(pose.shape)}, expected [3]")
    return to_unit(pose_points(pose))


def _positions(name: str, px: Any, n: int | None = None) -> Tensor:
    """Positions ``[n, 2]`` in -1..1; any number when ``n`` is None."""
    array = to_unit(px)
    if array.ndim != 2 or array.shape[1] != 2 or len(array) != (n or len(array)):
        raise TensorError(f"{name!r} has shape {list(array.shape)}, expected {[n or 'n', 2]}")
    return array


#: Factory registered as ``context``.
context = ContextStage
