"""The act stage: an action chunk from the scene and the context's cache of the present tick, or the hidden states that
the cache is made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from omni_loop import registry
from omni_loop.action_queue import INPAINTED, JOINED, ActionQueue, Joining
from omni_loop.errors import InvalidInput, StageFailed, TensorError
from omni_loop.messages import PayloadKind
from omni_loop.stage import Outputs, Payload, StageItem, StateSpec, in_one
from omni_loop.training.checkpoint import load_config, load_weights, revision
from omni_loop.types import StageKind

from .flow import ActConfig, ActHead, features_of
from .join import Guide, guide_of

SHIPPED = Path(__file__).parent / "checkpoints"
TABLE_HALF = 256.0  # px of the table per unit of -1..1
MAX_SAMPLES = 64


@dataclass(frozen=True, slots=True)
class Given:
    """One item's part of a batch, without its leading axis; ``noise [samples, horizon, action_dim]``."""

    noise: Tensor
    several: bool
    points: Tensor
    before: Tensor
    history: float
    kv: Tensor
    item: StageItem
    joining: Joining | None  # never with several


class ActStage:
    """Inputs ``scene`` (``points [9, 2]``, ``agent_before [2]``) and ``kv [layers, 2, s, g, e]``, or ``hidden [layers,
    s, d]`` of which the context's checkpoint makes the very same (an engine that keeps its cache to itself); output
    ``chunk``: ``actions float32[horizon, 2]`` in table pixels, clipped to the table. Its noise is a function of session
    seed, epoch and tick; its state is the last chunk, unclipped in -1..1 of the table, which the next one joins where
    that is asked for (real-time chunking). With the option ``samples`` of a pipeline there is an output ``chunks``
    (``actions float32[samples, horizon, 2]``) besides, of which ``chunk`` is the first; somebody else chooses among
    them, so that none is kept.

    ``checkpoint`` is the head's folder in ``checkpoints`` (none: the shipped ones, ``act`` and ``act-small``).
    ``use_context`` and ``use_history`` switch parts off for ablations; ``temperature`` (0: the model's own) scales
    the noise a chunk starts from.
    """

    kind = StageKind.ACT

    def __init__(
        self,
        checkpoints: str = "",
        device: str = "cpu",
        use_context: bool = True,
        use_history: bool = True,
        temperature: float = 0.0,
        checkpoint: str = "act",
    ) -> None:
        folder = (Path(checkpoints) if checkpoints else SHIPPED) / checkpoint
        config = load_config(folder, ActConfig)
        self.model = ActHead(config.model_copy(update={"temperature": temperature}) if temperature else config)
        load_weights(folder, self.model)
        self.model.to(device).requires_grad_(False)  # gradients are of samples only
        self._queue = ActionQueue(config.horizon, config.action_dim)
        self.revision = revision(folder)
        self.device, self.use_context, self.use_history = device, use_context, use_history
        self._checkpoints = checkpoints

    def state_specs(self) -> Mapping[str, StateSpec]:
        return self._queue.state_specs()

    def run(self, items: Sequence[StageItem]) -> Sequence[Outputs | Exception]:
        return in_one(self._given, self._act, items)

    def _given(self, item: StageItem) -> Given:
        c, scene = self.model.config, item.inputs["scene"]
        layer = (2, c.context_tokens, c.context_kv_heads, c.context_head_dim)
        samples = int(item.params.get("samples", 1))
        if not 1 <= samples <= MAX_SAMPLES:
            raise InvalidInput(f"samples is {samples}; the act stage draws 1..{MAX_SAMPLES} chunks")
        several = "samples" in item.params
        return Given(
            noise=torch.stack([self._noise(item, i) for i in range(samples)]),
            several=several,
            points=_shaped(scene, "points", ((c.features - 2) // 2, 2)),
            before=_shaped(scene, "agent_before", (2,)),
            history=float(scene.meta["history"]) * self.use_history,
            kv=_shaped(self._cache(item.inputs), "kv", (c.context_layers, *layer)),
            item=item,
            joining=None if several else self._queue.joining(item),
        )

    def _cache(self, inputs: Mapping[str, Payload]) -> Payload:
        if "kv" in inputs:
            return inputs["kv"]
        kv = self._kv_of(torch.as_tensor(inputs["hidden"].arrays["hidden"]))
        return Payload(PayloadKind.KV, {"kv": kv})

    @cached_property
    def _kv_of(self) -> Callable[[Tensor], Tensor]:
        """Weights of the context model, which the act head was trained behind; loaded when hidden states come."""
        projection: Callable[[Tensor], Tensor] = registry.load(registry.KV_PROJECTIONS, "context")(
            self._checkpoints, self.device
        )
        return projection

    def _noise(self, item: StageItem, sample: int) -> Tensor:
        """Of one chunk, whatever the number of chunks."""
        seed = item.noise_seed(f"act/{sample}" if sample else "act")
        c, generator = self.model.config, torch.Generator().manual_seed(seed)
        return torch.randn(c.horizon, c.action_dim, generator=generator)

    def _act(self, given: Sequence[Given]) -> list[Outputs | Exception]:
        def stack(parts: Iterable[Tensor]) -> Tensor:
            return torch.stack(list(parts)).to(self.device)

        points, before = stack(g.points for g in given), stack(g.before for g in given)
        history = torch.tensor([g.history for g in given], device=self.device)
        present = torch.full_like(history, float(self.use_context))
        features = features_of(before, points[:, 0], points[:, 1:], history)
        noise, kv = torch.cat([g.noise for g in given]).to(self.device), stack(g.kv for g in given)
        if len(noise) > len(given):
            counts = torch.tensor([len(g.noise) for g in given], device=self.device)
            features, history, kv, present = (x.repeat_interleave(counts, 0) for x in (features, history, kv, present))
        chunks = self.model.sample(noise, features, history, kv, present, self._guide(given))
        actions = ((chunks + 1) * TABLE_HALF).clamp(0, 2 * TABLE_HALF).float().cpu()
        sizes = [len(g.noise) for g in given]
        parts = zip(given, actions.split(sizes), chunks.split(sizes), strict=True)
        results: list[Outputs | Exception] = []
        for g, samples, raw in parts:
            try:
                results.append(self._outputs(g, samples, raw))
            except StageFailed as e:  # not finite: the item's own result, not the batch's
                results.append(e)
        return results

    def _guide(self, given: Sequence[Given]) -> Guide | None:
        if not any(g.joining for g in given):  # as it mostly is
            return None
        rows = [g.joining for g in given for _ in g.noise]
        left = [None if j is None else torch.as_tensor(j.left_over).to(self.device) for j in rows]
        return guide_of(left, [0 if j is None else j.frozen for j in rows], self.model.config.horizon)

    def _outputs(self, given: Given, actions: Tensor, raw: Tensor) -> Outputs:
        """``actions [samples, horizon, 2]`` in pixels, ``raw`` the same in -1..1."""
        meta = {"revision": self.revision}
        if given.several:
            return {
                "chunk": Payload(PayloadKind.ACTIONS, {"actions": actions[0]}, meta),
                "chunks": Payload(PayloadKind.ACTIONS, {"actions": actions}, meta),
            }
        self._queue.keep(given.item, raw[0])
        if given.joining is not None:
            meta[JOINED] = INPAINTED
        return {"chunk": Payload(PayloadKind.ACTIONS, {"actions": actions[0]}, meta)}

    def warm_up(self) -> None:
        c = self.model.config
        kv = torch.zeros(1, c.context_layers, 2, c.context_tokens, c.context_kv_heads, c.context_head_dim)
        one = torch.ones(1, device=self.device)
        noise = torch.zeros(1, c.horizon, c.action_dim, device=self.device)
        self.model.sample(noise, torch.zeros(1, c.features, device=self.device), one, kv.to(self.device), one)


def _shaped(payload: Payload, name: str, shape: tuple[int, ...]) -> Tensor:
    """An array as float32; its shape is checked here, so that a batch cannot fail by one of its items."""
    array = torch.as_tensor(payload.arrays[name])
    if tuple(array.shape) != shape:
        raise TensorError(f"{name!r} has shape {list(array.shape)}, the act stage takes {list(shape)}")
    return array.float()


#: Factory registered as ``act``.
act = ActStage
