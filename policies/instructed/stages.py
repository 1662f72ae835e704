"""The two stages of an instructed policy: who reads the instruction, and who acts on what was read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from omni_loop.action_queue import INPAINTED, JOINED, ActionQueue, Joining
from omni_loop.errors import StageFailed, TensorError
from omni_loop.messages import PayloadKind
from omni_loop.stage import KVSpec, Outputs, Payload, StageItem, StateSpec, in_one, one_by_one
from omni_loop.training.checkpoint import load_config, load_weights, revision
from omni_loop.types import StageKind

from ..join import Guide, guide_of
from .model import Instructed, InstructedConfig
from .words import BEGIN, TOKENS, Vocabulary

SHIPPED = Path(__file__).parent.parent / "checkpoints"
_BLOCK = 16  # tokens


def load_policy(folder: Path, device: str = "cpu") -> Instructed:
    """The model of a checkpoint. Raises CheckpointError."""
    model = Instructed(load_config(folder, InstructedConfig))
    load_weights(folder, model)
    return model.to(device).requires_grad_(False)  # gradients are of samples only


class InstructStage:
    """Reads the session's instruction once, at its first tick, into the paged cache, where it stays: it forks, rewinds
    and is saved with the session, and sessions of the same instruction share its blocks. Output ``kv [layers, 2, 32,
    heads, head_dim]``, at every tick. No inputs: what is to be done stands in the text alone.

    ``checkpoint`` is the policy's folder in ``checkpoints`` (none: the shipped ones)."""

    kind = StageKind.CONTEXT

    def __init__(self, checkpoints: str = "", device: str = "cpu", checkpoint: str = "metaworld") -> None:
        folder = (Path(checkpoints) if checkpoints else SHIPPED) / checkpoint
        model = load_policy(folder, device)
        self.model, self.revision, self.device = model.text, revision(folder), device
        self._words = Vocabulary(model.config.text.words)
        self._key = f"{self.revision}/".encode()  # what begins alike under the same weights shares its blocks

    def state_specs(self) -> Mapping[str, StateSpec]:
        c = self.model.config
        blocks = TOKENS // _BLOCK
        return {
            "kv": KVSpec(
                c.layers, c.heads, c.head_dim, _BLOCK, window_blocks=0, sink_blocks=blocks, scratch_blocks=blocks
            )
        }

    def run(self, items: Sequence[StageItem]) -> Sequence[Outputs | Exception]:
        # Hardly a batch: an instruction is read once in a session's life, or less.
        return one_by_one(self._read, items)

    def _read(self, item: StageItem) -> Outputs:
        kv = item.state.kv("kv")
        if kv.total == 0:
            tokens = self._words.tokens(item.prompt)
            kv.prefix(self._key + tokens.numpy().tobytes(), lambda: self._compute(tokens))
        return {"kv": Payload(PayloadKind.KV, {"kv": kv.gather()}, {"revision": self.revision})}

    @torch.no_grad()
    def _compute(self, tokens: Tensor) -> Tensor:
        return self.model(tokens[None].to(self.device))[0]

    def warm_up(self) -> None:
        self._compute(torch.full((TOKENS,), BEGIN))


@dataclass(frozen=True, slots=True)
class Given:
    """One item's part of a batch, without its leading axis."""

    noise: Tensor
    state: Tensor
    image: Tensor | None
    kv: Tensor
    item: StageItem
    joining: Joining | None


class InstructedActStage:
    """Inputs ``observation`` (``state float32[39]``, or ``image uint8[64, 64, 3]`` and ``gripper float32[4]`` where the
    checkpoint has an eye) and ``kv`` of the instruction; output ``chunk``: ``actions float32[16, 4]`` in -1..1. Its
    noise is a function of session seed, epoch and tick; its state is the last chunk, unclipped and in the model's
    units, which the next one joins where that is asked for (real-time chunking)."""

    kind = StageKind.ACT

    def __init__(self, checkpoints: str = "", device: str = "cpu", checkpoint: str = "metaworld") -> None:
        folder = (Path(checkpoints) if checkpoints else SHIPPED) / checkpoint
        self.model, self.revision, self.device = load_policy(folder, device), revision(folder), device
        head = self.model.config.head
        self._queue = ActionQueue(head.horizon, head.action_dim)

    def state_specs(self) -> Mapping[str, StateSpec]:
        return self._queue.state_specs()

    def run(self, items: Sequence[StageItem]) -> Sequence[Outputs | Exception]:
        return in_one(self._given, self._act, items)

    def _given(self, item: StageItem) -> Given:
        head, seen = self.model.config.head, item.inputs["observation"]
        eye, image = head.eye, None
        if eye is not None:
            image = _shaped(seen, "image", (eye.size, eye.size, 3), torch.uint8)
        generator = torch.Generator().manual_seed(item.noise_seed("act"))
        return Given(
            noise=torch.randn(head.horizon, head.action_dim, generator=generator),
            state=_shaped(seen, "state" if eye is None else "gripper", (head.features,), torch.float32),
            image=image,
            kv=_shaped(item.inputs["kv"], "kv", self.model.config.text.cache, torch.float32),
            item=item,
            joining=self._queue.joining(item),
        )

    @torch.no_grad()
    def _act(self, given: Sequence[Given]) -> list[Outputs | Exception]:
        def stack(parts: Iterable[Tensor]) -> Tensor:
            return torch.stack(list(parts)).to(self.device)

        images = [g.image for g in given if g.image is not None]
        known = self.model.known(stack(g.state for g in given), stack(images) if images else None)
        noise, kv = stack(g.noise for g in given), stack(g.kv for g in given)
        chunks = self.model.sample(noise, known, kv, self._guide(given))
        actions = self.model.actions(chunks).cpu()
        results: list[Outputs | Exception] = []
        for g, raw, action in zip(given, chunks, actions, strict=True):
            try:
                results.append(self._outputs(g, action, raw))
            except StageFailed as e:  # not finite: the item's own result, not the batch's
                results.append(e)
        return results

    def _guide(self, given: Sequence[Given]) -> Guide | None:
        if not any(g.joining for g in given):  # as it mostly is
            return None
        rows = [g.joining for g in given]
        left = [None if j is None else torch.as_tensor(j.left_over).to(self.device) for j in rows]
        return guide_of(left, [0 if j is None else j.frozen for j in rows], self.model.config.head.horizon)

    def _outputs(self, given: Given, actions: Tensor, raw: Tensor) -> Outputs:
        self._queue.keep(given.item, raw)
        meta = {"revision": self.revision}
        if given.joining is not None:
            meta[JOINED] = INPAINTED
        return {"chunk": Payload(PayloadKind.ACTIONS, {"actions": actions}, meta)}

    def warm_up(self) -> None:
        head, text = self.model.config.head, self.model.config.text
        image = None if head.eye is None else torch.zeros(1, head.eye.size, head.eye.size, 3, dtype=torch.uint8)
        with torch.no_grad():
            known = self.model.known(
                torch.zeros(1, head.features, device=self.device), None if image is None else image.to(self.device)
            )
        noise = torch.zeros(1, head.horizon, head.action_dim, device=self.device)
        self.model.sample(noise, known, torch.zeros(1, *text.cache, device=self.device))


def _shaped(payload: Payload, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An array as ``dtype``; its shape is checked here, so that a batch cannot fail by one of its items."""
    array = torch.as_tensor(payload.arrays[name])
    if tuple(array.shape) != shape:
        raise TensorError(f"{name!r} has shape {list(array.shape)}, the instructed policy takes {list(shape)}")
    return array.to(dtype)


#: Factories registered as ``instruct`` and ``instructed_act``.
instruct = InstructStage
instructed_act = InstructedActStage
