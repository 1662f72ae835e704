"""The act stage of a LeRobot checkpoint: one shared policy, and everything of a session in its typed state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from omni_loop.action_queue import INPAINTED, JOINED, ActionQueue
from omni_loop.connect.base import as_numpy
from omni_loop.errors import InvalidInput, TensorError, nearest
from omni_loop.messages import PayloadKind, Scalar
from omni_loop.stage import Outputs, Payload, RingSpec, StageItem, StateSpec, TensorSpec, in_one
from omni_loop.types import StageKind

from .checkpoint import Feature, describe
from .chunks import Ensemble
from .families import History, can_join
from .load import Options, load
from .numbers import check_options
from .predict import Predicted, Predictor, Row

_PLAN = "plan"


@dataclass(frozen=True, slots=True)
class Given:
    """One item's part of a batch."""

    item: StageItem
    row: Row
    guided: bool = False  # because the tick asks for it


class LeRobotStage:
    """Input ``observation`` (the arrays of the spec); output ``chunk``: ``actions float32[horizon, action_dim]`` in the
    units the policy was trained on.

    State, as the type wants it: ``seen.<key>``, the last observations sent; ``chunks`` of a temporal ensemble; ``raw``,
    the last chunk that real-time chunking continues; ``plan`` of tdmpc. A flow-matching policy that shares its passes
    (smolvla, pi0, pi05) continues it in the ticks that ask for it; with ``rtc`` any that can does so in every tick, by
    the session's option ``inference_delay`` where the tick does not say. Options as in :func:`.template.lerobot`.
    """

    kind = StageKind.ACT
    needs = ("lerobot",)  # imported when one is built

    def __init__(
        self,
        checkpoint: str,
        device: str = "cpu",
        ensemble: bool = False,
        ensemble_decay: float = 0.01,
        rtc: bool = False,
        inference_steps: int = 0,
        tokenizer: str = "",
        vlm: str = "",
    ) -> None:
        said = describe(checkpoint)
        guided = rtc or (can_join(said.type, said.settings) and not ensemble)
        self.loaded = load(checkpoint, device, Options(guided, inference_steps, tokenizer, vlm, ensemble_decay))
        described, horizon = self.loaded.described, self.loaded.horizon
        self.revision = self.loaded.revision
        self._predictor, self._always = Predictor(self.loaded, guided), rtc
        self._ensemble = Ensemble(horizon, described.action_dim, ensemble_decay) if ensemble else None
        # Evo1 alone gives its actions as wide as the model has them.
        width = int(described.settings["max_action_dim"]) if described.type == "evo1" else described.action_dim
        self._queue = ActionQueue(horizon, width) if guided else None
        self._plan_shape = (int(described.settings.get("horizon", 1)), described.action_dim)
        self._seen = described.n_obs_steps if self.loaded.family.history is not History.NONE else 1

    @staticmethod
    def check_options(
        checkpoint: str, ensemble_decay: float = 0.01, inference_steps: int = 0, vlm: str = "", **_: Scalar
    ) -> None:
        """What is wrong with options without loading anything: ConfigError; raises as :func:`.checkpoint.describe`."""
        said = describe(checkpoint)
        check_options(said.type, said.settings, ensemble_decay=ensemble_decay, inference_steps=inference_steps, vlm=vlm)

    def state_specs(self) -> Mapping[str, StateSpec]:
        specs: dict[str, StateSpec] = {}
        if self._seen > 1:
            for feature in self.loaded.described.inputs:
                spec = feature.spec()
                specs[f"seen.{spec.name}"] = RingSpec(spec.shape, self._seen, spec.dtype)
        for part in (self._ensemble, self._queue):
            if part is not None:
                specs |= part.state_specs()
        if self._plans:
            specs[_PLAN] = TensorSpec(self._plan_shape)  # zeros: as if there was none
        return specs

    def run(self, items: Sequence[StageItem]) -> Sequence[Outputs | Exception]:
        return in_one(self._given, self._act, items)

    def warm_up(self) -> None:
        features = self.loaded.described.inputs
        blank = {f.name: [_tensor(f, np.zeros(f.spec().shape, f.spec().dtype))] * self._seen for f in features}
        plan = torch.zeros(self._plan_shape) if self._plans else None
        self._predictor.predict([Row(blank, "", 0, plan=plan)])

    @property
    def _plans(self) -> bool:
        return self.loaded.described.type == "tdmpc" and bool(self.loaded.described.settings.get("use_mpc", True))

    def _given(self, item: StageItem) -> Given:
        """Checks everything of the item before any of it is staged."""
        if "observation" not in item.inputs:
            raise InvalidInput("the LeRobot stage needs the input 'observation'")
        arrays, delay = item.inputs["observation"].arrays, int(item.params.get("inference_delay", 0))
        if not 0 <= delay < self.loaded.horizon:
            raise InvalidInput(f"inference_delay is {delay}; a chunk has {self.loaded.horizon} steps")
        seen: dict[str, Sequence[Tensor]] = {}
        for feature in self.loaded.described.inputs:
            if feature.key not in arrays:
                raise InvalidInput(f"the observation {feature.key!r} is missing.{nearest(feature.key, arrays)}")
            seen[feature.name] = [_tensor(feature, as_numpy(arrays[feature.key]))]
        if self._seen > 1:
            seen = {f.name: self._history(item, f, seen[f.name][0]) for f in self.loaded.described.inputs}
        plan = item.state.tensor(_PLAN).get() if self._plans else None
        joining = self._queue.joining(item) if self._queue else None
        if joining is not None:
            left, delay, frozen = joining.left_over, joining.frozen, joining.frozen
        else:
            left = self._queue.left_over(item.state, item.step) if self._queue and self._always else None
            frozen = 0
        row = Row(seen, item.prompt, item.noise_seed("act"), delay, left, plan, frozen)
        return Given(item, row, joining is not None)

    def _history(self, item: StageItem, feature: Feature, now: Tensor) -> list[Tensor]:
        """The last observations that were sent, this one among them; the first is repeated while there are fewer."""
        ring = item.state.ring(f"seen.{feature.key}")
        ring.push(now)
        known = list(ring.items())
        return [known[0]] * (self._seen - len(known)) + known

    def _act(self, given: Sequence[Given]) -> list[Outputs | Exception]:
        results: dict[int, Outputs | Exception] = {}
        for group in self._groups(given):
            try:
                predicted = self._predictor.predict([given[i].row for i in group])
                results.update((i, self._outputs(given[i], p)) for i, p in zip(group, predicted, strict=True))
            except Exception as e:
                if len(group) > 1:
                    raise  # the runner undoes the batch and halves it until the bad item is alone
                results[group[0]] = e
        return [results[i] for i in range(len(given))]

    def _groups(self, given: Sequence[Given]) -> list[list[int]]:
        """Who shares a forward pass: real-time chunking takes one delay and one length of what is left per call."""
        if not self.loaded.family.together:
            return [[i] for i in range(len(given))]
        groups: dict[tuple[int, int], list[int]] = {}
        for i, g in enumerate(given):
            left = 0 if g.row.left_over is None else len(g.row.left_over)
            groups.setdefault((g.row.delay if left else 0, left), []).append(i)
        return list(groups.values())

    def _outputs(self, given: Given, predicted: Predicted) -> Outputs:
        item, actions, meta = given.item, predicted.actions, {"revision": self.revision}
        if predicted.plan is not None:
            item.state.tensor(_PLAN).set(predicted.plan)
        if self._queue is not None:
            self._queue.keep(item, predicted.raw)
        if self._ensemble is not None:
            actions = self._ensemble.apply(item.state, item.step, actions)
        if given.guided:
            meta[JOINED] = INPAINTED
        return {"chunk": Payload(PayloadKind.ACTIONS, {"actions": actions}, meta)}


def _tensor(feature: Feature, array: NDArray[np.generic]) -> Tensor:
    """One observation as the wire has it. Shape and dtype are checked here, so that no batch fails by one item."""
    spec = feature.spec()
    if tuple(array.shape) != spec.shape or array.dtype != np.dtype(spec.dtype):
        given, wanted = f"{array.dtype}{list(array.shape)}", f"{spec.dtype}{list(spec.shape)}"
        raise TensorError(f"{spec.name!r} is {given}; the policy takes {wanted}")
    return torch.from_numpy(np.array(array))  # a copy: the wire's arrays are read-only, which torch warns of


#: Factory registered as ``lerobot``.
lerobot = LeRobotStage
