"""The context stage: sees an observation (real or imagined), remembers it, judges progress.

Inputs: ``observation`` (real) or ``imagined`` (the frames stage's latents of the tick before, in a pipeline
that feeds them back). A real one drops what was imagined since the last real one. Outputs: ``kv`` (the present
tick's cache for the act head), ``scene`` (points and the agent's position before), ``latents`` (of the frame seen,
for the frames stage), ``progress``; where chunks are chosen from several, ``window`` (all of the cache).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from omni_loop.messages import PayloadKind
from omni_loop.runner.attention import append_batch, gather_batch
from omni_loop.stage import KVSpec, Outputs, PagedKV, Payload, StageItem, StateSpec, in_one
from omni_loop.training.checkpoint import revision
from omni_loop.types import StageKind

from ..context import layout
from ..context.decode import Reading, read_instruction, read_tick
from ..context.perceive import INSTRUCTION, load_context
from .senses import Glance, given_tokens, glance_of
from .shared import checkpoint, codec_of, encode

if TYPE_CHECKING:
    from omni_loop.runner.kv_cell import KVCell


@dataclass(slots=True)
class Tick:
    """What one item sees, the cache it goes into, and whether chunks will be chosen from several."""

    glance: Glance
    kv: PagedKV
    several: bool


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
        return in_one(self._tick, self._look, items)

    def _tick(self, item: StageItem) -> Tick:
        kv, glance = item.state.kv("kv"), glance_of(self.codec, item)
        if not glance.imagined:
            kv.drop_imagined()
        if kv.total == 0:
            tokens = layout.instruction_tokens(item.prompt or INSTRUCTION)
            kv.prefix(self._key + tokens.numpy().tobytes(), lambda: self._instruction(tokens))
        return Tick(glance, kv, "samples" in item.params)

    def _instruction(self, tokens: Tensor) -> Tensor:
        """Cache ``[layers, 2, 32, g, e]``."""
        return read_instruction(self.model, tokens[None].to(self.device))[:, :, 0]

    @torch.no_grad()
    def _look(self, ticks: Sequence[Tick]) -> list[Outputs | Exception]:
        given = given_tokens(self.codec, [tick.glance for tick in ticks]).to(self.device)
        results: dict[int, Outputs | Exception] = {}
        groups: dict[tuple[int, bool], list[int]] = {}
        for i, tick in enumerate(ticks):
            groups.setdefault((tick.kv.length, tick.glance.imagined), []).append(i)
        for (_, imagined), rows in groups.items():
            cells = [cast("KVCell", ticks[i].kv) for i in rows]
            reading = read_tick(self.model, gather_batch(cells), given[rows])
            errors = append_batch(cells, reading.kv, imagined)
            for at, (i, error) in enumerate(zip(rows, errors, strict=True)):
                results[i] = error or self._outputs(ticks[i], reading, at)
        return [results[i] for i in range(len(ticks))]

    def _outputs(self, tick: Tick, reading: Reading, at: int) -> Outputs:
        outputs = {
            "kv": Payload(PayloadKind.KV, {"kv": reading.kv[:, :, at]}),
            **tick.glance.outputs(),
            "progress": Payload(PayloadKind.PROGRESS, {"progress": reading.progress[at], "done": reading.done[at]}),
        }
        if tick.several:  # imagined outcomes will be read behind all of it
            outputs["window"] = Payload(PayloadKind.KV, {"kv": tick.kv.gather()})
        return outputs

    def warm_up(self) -> None:
        tokens = layout.instruction_tokens(INSTRUCTION).to(self.device)
        past = read_instruction(self.model, tokens[None])
        image = torch.full((1, self.codec.config.frame_size, self.codec.config.frame_size, 3), 255, dtype=torch.uint8)
        z = self.codec.unpatchify(encode(self.codec, image))
        points = self.codec.scene(z)
        given = layout.given_tokens(self.codec.tokens(z), points, torch.zeros(1, 2, 2), torch.tensor([False]))
        read_tick(self.model, past, given)


#: Factory registered as ``context``.
context = ContextStage
