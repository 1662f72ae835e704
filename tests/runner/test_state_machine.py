"""The state manager against a model of plain values: any order of ticks, failures, resets and closes."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from omni_loop.errors import Exhausted, StateError, UnknownSession
from omni_loop.runner.state import Budget, StageState, StateManager
from omni_loop.stage import CounterSpec, KVSpec, RingSpec, StateSpec, TensorSpec

KV = KVSpec(layers=1, kv_heads=1, head_dim=1, block_size=1, window_blocks=2, sink_blocks=1, scratch_blocks=2)
STAGES: dict[str, dict[str, StateSpec]] = {
    name: {"kv": KV, "mean": TensorSpec((1,)), "recent": RingSpec((1,), 2), "ticks": CounterSpec(3)}
    for name in ("p/a", "p/b")
}
SESSIONS = st.sampled_from(["s", "t"])  # few, so that much happens to each
STAGE = st.sampled_from(sorted(STAGES))


@dataclass
class Values:
    sink: list[int] = field(default_factory=list)
    window: list[int] = field(default_factory=list)
    total: int = 0
    mean: int = 0
    recent: list[int] = field(default_factory=list)
    ticks: int = 3

    def append(self, values: list[int]) -> None:
        for value in values:
            (self.sink if self.total < 1 else self.window).append(value)
            self.total += 1
        self.window = self.window[-2:]

    def truncate(self, total: int) -> None:
        self.window = self.window[: max(0, len(self.window) - (self.total - total))]
        self.sink = self.sink[:total]
        self.total = total


@dataclass
class Model:
    committed: Values = field(default_factory=Values)
    staged: Values | None = None
    tick: int | None = None
    fresh: int = 0

    def settle(self, commit: bool) -> None:
        if commit and self.staged is not None:
            self.committed = self.staged
        self.staged, self.tick, self.fresh = None, None, 0


def facts(state: StageState) -> dict[str, Any]:
    kv = state.kv("kv")
    return {
        "kv": [int(x) for x in kv.gather()[0, 0].flatten()],
        "lengths": (kv.length, kv.total, kv.sink_length),
        "mean": int(state.tensor("mean").get()),
        "recent": [int(x) for x in state.ring("recent").items()],
        "ticks": state.counter("ticks").get(),
    }


def wanted(values: Values) -> dict[str, Any]:
    kv = values.sink + values.window
    lengths = (len(kv), values.total, len(values.sink))
    return {"kv": kv, "lengths": lengths, "mean": values.mean, "recent": values.recent, "ticks": values.ticks}


class StateMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.manager = StateManager(STAGES, Budget(max_sessions=2, blocks=7))
        self.models: dict[str, dict[str, Model]] = {}
        self.value = 10

    @initialize()
    def begin(self) -> None:
        self.open("s")

    @rule(session=SESSIONS)
    def open(self, session: str) -> None:
        if session in self.models:
            with pytest.raises(StateError):
                self.manager.open(session)
        else:
            self.manager.open(session)
            self.models[session] = {stage: Model() for stage in STAGES}

    @rule(
        session=SESSIONS,
        stage=STAGE,
        tick=st.integers(1, 2),
        n=st.integers(1, 3),
        rewind=st.none() | st.integers(0, 3),
        fail=st.booleans(),
    )
    def run(self, session: str, stage: str, tick: int, n: int, rewind: int | None, fail: bool) -> None:
        if session not in self.models:
            with pytest.raises(UnknownSession):
                self.manager.begin(session, stage, tick)
            return
        model = self.models[session][stage]
        if model.tick not in (None, tick):
            with pytest.raises(StateError):
                self.manager.begin(session, stage, tick)
            return
        state = self.manager.begin(session, stage, tick)
        model.tick = tick
        values = model.staged = model.staged or copy.deepcopy(model.committed)
        if rewind is not None and rewind <= values.total:
            state.kv("kv").truncate(rewind)
            values.truncate(rewind)
        self.value += 10
        new = [self.value + i for i in range(n)]
        try:
            state.kv("kv").append(np.array(new, np.float32)[None, None, :, None, None].repeat(2, 1))
            assert model.fresh + n <= KV.scratch_blocks
            values.append(new)
            model.fresh += n
        except Exhausted:
            free = self.manager.stats().pools[f"{stage}.kv"].free
            assert n > free or model.fresh + n > KV.scratch_blocks
        state.tensor("mean").set(np.array([self.value], np.float32))
        state.ring("recent").push(np.array([self.value], np.float32))
        state.counter("ticks").set(self.value)
        values.mean = values.ticks = self.value
        values.recent = [*values.recent, self.value][-2:]
        self.manager.seal(session, stage)
        if fail:
            self.manager.discard(session, tick, (stage,))
            model.settle(commit=False)

    @rule(session=SESSIONS, stage=STAGE, n=st.integers(1, 2))
    def whole_tick(self, session: str, stage: str, n: int) -> None:
        if session in self.models and self.models[session][stage].tick is None:
            self.run(session, stage, 1, n, None, False)
            self.commit(session, 1, {stage})

    @rule(session=SESSIONS, tick=st.integers(1, 2), stages=st.sets(STAGE, min_size=1))
    def commit(self, session: str, tick: int, stages: set[str]) -> None:
        models = self.models.get(session)
        if models is None:
            with pytest.raises(UnknownSession):
                self.manager.commit(session, tick, stages)
        elif any(models[stage].tick != tick for stage in stages):
            with pytest.raises(StateError):
                self.manager.commit(session, tick, stages)
        else:
            self.manager.commit(session, tick, stages)
            for stage in stages:
                models[stage].settle(commit=True)

    @rule(session=SESSIONS, tick=st.integers(1, 2), stages=st.sets(STAGE, min_size=1))
    def discard(self, session: str, tick: int, stages: set[str]) -> None:
        if session in self.models:
            self.manager.discard(session, tick, stages)
            for stage in stages:
                if (model := self.models[session][stage]).tick == tick:
                    model.settle(commit=False)

    @rule(session=SESSIONS)
    def reset(self, session: str) -> None:
        if session in self.models:
            self.manager.reset(session)
            self.models[session] = {stage: Model() for stage in STAGES}

    @rule(session=SESSIONS)
    def abandon(self, session: str) -> None:
        if session in self.models:
            self.manager.abandon(session)
            for model in self.models[session].values():
                model.settle(commit=False)

    @rule(session=SESSIONS)
    def close(self, session: str) -> None:
        if session in self.models:
            self.manager.close(session)
            del self.models[session]

    @invariant()
    def balances(self) -> None:
        self.manager.check()
        assert self.manager.stats().sessions == len(self.models)

    @invariant()
    def holds_what_the_model_holds(self) -> None:
        for session, models in self.models.items():
            for stage, model in models.items():
                state = self.manager._find(session, stage)
                assert state.tick == model.tick
                assert facts(state) == wanted(model.staged or model.committed)


StateMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
TestStateMachine = StateMachine.TestCase
