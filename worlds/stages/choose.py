"""The choose stage: of several chunks, the one whose imagined outcome the context model likes best.

Inputs: ``chunks`` (the act head's samples, ``actions float32[n, steps, 2]`` in table pixels), ``futures`` (the frames
stage's ``latents [n, ahead, 16, c]`` of each one's first steps), ``window`` (the session's context as the context stage
holds it after this tick, ``kv [layers, 2, s, g, e]``). Each last imagined frame is read as the tick to come. Outputs:
``chunk``, and the ``latents`` of the frames it is thought to lead to. Keeps no state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from omni_loop.errors import TensorError
from omni_loop.messages import PayloadKind
from omni_loop.stage import Outputs, Payload, StageItem, StateSpec, one_by_one
from omni_loop.training.checkpoint import revision
from omni_loop.types import StageKind

from ..context.perceive import INSTRUCTION
from .plan import AHEAD, judge_of
from .shared import checkpoint, to_unit


class ChooseStage:
    """See the module's text. The first chunk is what the policy alone would have done: another one must promise
    ``margin`` more progress. Less than 0.03 is the judge's error: with it choosing gains as much by another chunk in
    every fifth tick as without it in almost all (on seeds that no figure uses)."""

    kind = StageKind.CONTEXT

    def __init__(self, checkpoints: str = "", device: str = "cpu", margin: float = 0.03) -> None:
        self.judge = judge_of(checkpoints, device)
        self.revision = revision(checkpoint("context", checkpoints))
        self.margin, self.device = margin, device

    def state_specs(self) -> Mapping[str, StateSpec]:
        return {}

    def run(self, items: Sequence[StageItem]) -> Sequence[Outputs | Exception]:
        # Each item is a batch of its own already, one row per chunk.
        return one_by_one(self._choose, items)

    @torch.no_grad()
    def _choose(self, item: StageItem) -> Outputs:
        given = item.inputs["chunks"]
        chunks = torch.as_tensor(given.arrays["actions"])
        futures = torch.as_tensor(item.inputs["futures"].arrays["latents"], device=self.device)
        if len(chunks) != len(futures):
            raise TensorError(f"{len(futures)} futures of {len(chunks)} chunks")
        past = torch.as_tensor(item.inputs["window"].arrays["kv"], device=self.device)
        ahead = futures.shape[1]
        progress = self.judge.read(past, futures[:, -1], to_unit(chunks[:, :ahead]).to(self.device)).progress
        best = int(progress.argmax())
        chosen = best if progress[best] > progress[0] + self.margin else 0
        frames = int(item.params.get("frames", 0)) or ahead
        if frames > ahead:
            raise TensorError(f"{frames} frames asked for, {ahead} were imagined")
        meta = {**item.inputs["futures"].meta, "chosen": chosen, "promise": float(progress[chosen])}
        return {
            "chunk": Payload(
                PayloadKind.ACTIONS, {"actions": chunks[chosen].clone()}, {**given.meta, "chosen": chosen}
            ),
            "latents": Payload(PayloadKind.LATENTS, {"latents": futures[chosen, :frames].clone()}, meta),
        }

    def warm_up(self) -> None:
        c, past = self.judge.latents, self.judge.past(INSTRUCTION)
        self.judge.read(past, torch.zeros(2, *c, device=self.device), torch.zeros(2, AHEAD, 2, device=self.device))


#: Factory registered as ``choose``.
choose = ChooseStage
