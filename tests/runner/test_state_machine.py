"""The state manager against a model of plain values: any order of ticks, failures, forks, rewinds and evictions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from omni_loop.errors import Exhausted, Reason, StateError, UnknownSession
from omni_loop.runner.stage_state import StageState
from omni_loop.runner.state import Budget, StateManager

from .state_model import (
    BLOCKS,
    KEEP,
    KV,
    NAMES,
    PREFIX,
    STAGES,
    Life,
    Model,
    Values,
    block_of,
    facts,
    fresh,
    wanted,
)

SESSIONS = st.sampled_from(NAMES)
WHICH = st.integers(0, len(NAMES) - 1)
STAGE = st.sampled_from(sorted(STAGES))


class StateMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.lives: dict[str, Life] = {}
        self.value = 10

    @initialize(evict=st.sampled_from(["recomputable", "any", "none"]))
    def begin(self, evict: Any) -> None:
        self.manager = StateManager(STAGES, Budget(max_sessions=3, blocks=BLOCKS, rewind_ticks=KEEP, evict=evict))
        self.evict_policy = evict
        self.open("s")

    def open(self, session: str) -> None:
        self.manager.open(session)
        self.lives[session] = fresh()

    @rule(
        i=WHICH,
        stage=STAGE,
        ahead=st.integers(0, 1),
        n=st.integers(1, 3),
        rewind=st.none() | st.integers(0, 3),
        branches=st.integers(0, 2),
        fail=st.booleans(),
    )
    def run(self, i: int, stage: str, ahead: int, n: int, rewind: int | None, branches: int, fail: bool) -> None:
        self._run(self._some(i)[0], stage, ahead, n, rewind, branches, fail)

    def _run(self, session: str, stage: str, ahead: int, n: int, rewind: int | None, branches: int, fail: bool) -> None:
        life = self.lives[session]
        model, tick = life.stages[stage], life.clock + ahead
        if model.tick not in (None, tick):
            with pytest.raises(StateError):
                self.manager.begin(session, stage, tick)
            tick = model.tick or 0
        state = self.manager.begin(session, stage, tick)
        model.tick = tick
        values = model.staged or model.committed
        kv = state.kv("kv")
        if rewind is not None and rewind <= values.total:
            kv.truncate(rewind)
            values = values.truncate(rewind)
        if values.total == 0 and model.fresh < 2 and self._room(stage, lambda: kv.prefix(b"hello", _prefix)):
            values = values.append([PREFIX])
            model.fresh = len(kv.table.fresh)
        self.value += 10
        new = [self.value + i for i in range(n)]
        if model.fresh + n > KV.scratch_blocks:
            with pytest.raises(Exhausted):
                kv.append(block_of(new))
        elif self._room(stage, lambda: kv.append(block_of(new))):
            values = values.append(new)
            model.fresh += n
        self._imagine(stage, state, values, branches)
        state.tensor("mean").set(np.array([self.value], np.float32))
        state.ring("recent").push(np.array([self.value], np.float32))
        state.counter("ticks").set(self.value)
        model.staged = replace(values, mean=self.value, ticks=self.value, recent=(*values.recent, self.value)[-2:])
        self.manager.seal(session, stage)
        if fail:
            self.manager.discard(session, tick, (stage,))
            model.discard()

    def _imagine(self, stage: str, state: StageState, values: Values, n: int) -> None:
        """Branches diverge from what the tick sees, and from each other."""
        if n == 0:
            return
        kv = state.kv("kv")
        made = kv.branches(n)
        for i, branch in enumerate(made):
            want = values
            if self._room(stage, lambda branch=branch, i=i: branch.append(block_of([-1 - i]), imagined=True)):  # type: ignore[misc]
                want = values.append([-1 - i])
            assert branch.gather()[0, 0].flatten().tolist() == [*want.sink, *want.window]
        assert kv.gather()[0, 0].flatten().tolist() == [*values.sink, *values.window]
        made[0].release()  # the others go with the tick, or when the stage's room is needed

    @rule(
        i=WHICH,
        ahead=st.integers(0, 1),
        n=st.integers(1, 2),
        times=st.integers(1, 3),
        both=st.booleans(),
        lost=st.booleans(),
    )
    def ticks(self, i: int, ahead: int, n: int, times: int, both: bool, lost: bool) -> None:
        """Whole ticks, of one stage or both; ``ahead`` 0: the last one goes on and is committed again."""
        for _ in range(times):
            session, life = self._some(i)
            self._settle(session, life)
            stages = sorted(STAGES) if both else ["p/a"]
            for stage in stages:
                self._run(session, stage, ahead, n, None, 0, False)
            self._commit(session, life.clock + ahead, stages, not lost)

    @rule(i=WHICH, ahead=st.integers(0, 1), stages=st.sets(STAGE, min_size=1), recomputable=st.booleans())
    def commit(self, i: int, ahead: int, stages: set[str], recomputable: bool) -> None:
        session, life = self._some(i)
        tick = life.clock + ahead
        if any(life.stages[stage].tick != tick for stage in stages):
            with pytest.raises(StateError):
                self.manager.commit(session, tick, sorted(stages))
        else:
            self._commit(session, tick, sorted(stages), recomputable)

    def _commit(self, session: str, tick: int, stages: list[str], recomputable: bool) -> None:
        life = self.lives[session]
        self.manager.commit(session, tick, stages, life.epoch, recomputable, cost_ms=1.0)
        life.clock, life.recomputable = tick, recomputable
        for stage in stages:
            life.stages[stage].commit((life.epoch, tick))

    def _settle(self, session: str, life: Life) -> None:
        self.manager.abandon(session)
        for model in life.stages.values():
            model.discard()

    @rule(
        i=WHICH,
        what=st.sampled_from(["discard", "abandon", "reset", "close", "pin", "unpin", "expire", "touch", "make_room"]),
        ahead=st.integers(0, 1),
        stages=st.sets(STAGE, min_size=1),
    )
    def rarely(self, i: int, what: str, ahead: int, stages: set[str]) -> None:
        session, life = self._some(i)
        if what == "discard":
            self.manager.discard(session, life.clock + ahead, stages)
            for stage in stages:
                if (model := life.stages[stage]).tick == life.clock + ahead:
                    model.discard()
        elif what == "abandon":
            self._settle(session, life)
        elif what == "reset":
            life.epoch += 1
            self.manager.reset(session, life.epoch)
            life.reset()
        elif what == "close":
            self.manager.close(session)
            del self.lives[session]
        elif what == "pin":
            self.manager.pin(session)
            life.pins += 1
        elif what == "unpin" and life.pins:
            self.manager.unpin(session)
            life.pins -= 1
        elif what == "expire":
            self.manager.expire(session)
            life.expired = True
        elif what == "touch":
            self.manager.touch(session)
            life.expired = False
        elif what == "make_room":  # more than there is: all versions go, and all that may
            missing = self.manager.make_room(1 << 40, (session,))
            assert missing > 0
            assert self.manager.stats().versions == 0
            assert not self.manager.evicted(session)
            self._sync()

    @rule(i=WHICH, child=SESSIONS)
    def fork(self, i: int, child: str) -> None:
        session, life = self._some(i)
        if child in self.lives or life.undecided:
            with pytest.raises(StateError):
                self.manager.fork(session, child)
            return
        owned = [pool.owned for pool in self.manager.stats().pools.values()]
        self.manager.fork(session, child)
        assert [pool.owned for pool in self.manager.stats().pools.values()] == owned
        stages = {stage: Model(model.versions[-1:]) for stage, model in life.stages.items()}
        self.lives[child] = Life(stages, life.epoch, life.clock, recomputable=life.recomputable)

    @rule(i=WHICH, back=st.integers(0, 4), older=st.booleans())
    def rewind(self, i: int, back: int, older: bool) -> None:
        session, life = self._some(i)
        key = (life.epoch - (older and back == 0), life.clock - back)
        if any(model.versions[0][0] > key for model in life.stages.values()):
            with pytest.raises(StateError, match="gone"):
                self.manager.rewind(session, *key)
            return
        self.manager.rewind(session, *key)
        for model in life.stages.values():
            model.discard()
            model.versions = [version for version in model.versions if version[0] <= key]
        life.epoch += 1

    @rule(i=WHICH, into=SESSIONS)
    def transfer(self, i: int, into: str) -> None:
        session, life = self._some(i)
        if life.undecided:
            with pytest.raises(StateError):
                self.manager.export(session)
            return
        image, target = self.manager.export(session), self.lives.get(into)
        if target and not target.evicted:
            with pytest.raises(StateError):
                self.manager.import_(into, image)
            return
        made = {stage: Model([((7, -1), model.committed)]) for stage, model in life.stages.items()}
        try:
            self.manager.import_(into, image, epoch=7)
        except Exhausted:
            assert (into in self.manager.sessions()) == (target is not None)
        else:
            self.lives[into] = Life(made, 7, pins=target.pins if target else 0)
        self._sync()

    @rule(i=WHICH)
    def evict(self, i: int) -> None:
        session, life = self._some(i)
        if life.pins or life.undecided:
            with pytest.raises(StateError):
                self.manager.evict(session)
            return
        before = sum(pool.owned_bytes for pool in self.manager.stats().pools.values())
        freed = self.manager.evict(session)
        assert freed >= before - sum(pool.owned_bytes for pool in self.manager.stats().pools.values()) >= 0
        life.evicted = True

    @rule()
    def gone(self) -> None:
        """What is asked of sessions that were evicted, or are none."""
        for session in NAMES:
            life = self.lives.get(session)
            if life and not life.evicted:
                continue
            tries: tuple[Callable[[], object], ...] = (
                lambda session=session: self.manager.begin(session, "p/a", 1),  # type: ignore[misc]
                lambda session=session: self.manager.commit(session, 1, ["p/a"]),  # type: ignore[misc]
                lambda session=session: self.manager.fork(session, "child"),  # type: ignore[misc]
                lambda session=session: self.manager.rewind(session, 0, 1),  # type: ignore[misc]
                lambda session=session: self.manager.export(session),  # type: ignore[misc]
                lambda session=session: self.manager.evict(session),  # type: ignore[misc]
            )
            for do in tries:
                with pytest.raises(StateError if life else UnknownSession) as caught:
                    do()
                assert life is None or caught.value.reason is Reason.EVICTED

    def _able(self) -> list[str]:
        return [name for name, life in self.lives.items() if not life.evicted]

    def _some(self, i: int) -> tuple[str, Life]:
        """A session that can do something; one is opened or revived when there is none."""
        self._sync()
        if not (able := sorted(self._able())):
            if life := self.lives.get("s"):
                self.manager.reset("s", life.epoch)
                life.reset()
            else:
                self.open("s")
            able = ["s"]
        name = able[i % len(able)]
        return name, self.lives[name]

    def _room(self, stage: str, take: Callable[[], None]) -> bool:
        """Whether ``take`` found blocks; if not, nothing could be given up any more and nothing was taken."""
        error = None
        try:
            take()
        except Exhausted as e:
            error = e
        self._sync()
        if error is None:
            return True
        assert error.retryable
        assert error.missing_bytes > 0 < error.retry_after_ms
        assert self.manager.stats().pools[f"{stage}.kv"].cached == 0
        for name, life in self.lives.items():
            if life.evicted:
                continue
            state = self.manager._sessions[name].state(stage)
            assert not state.versions
            idle = not (life.pins or life.undecided)
            allowed = self.evict_policy == "any" or (self.evict_policy == "recomputable" and life.may_go)
            assert not (idle and allowed and state.kv("kv").total), f"{name} could have gone"
        return False

    def _sync(self) -> None:
        """What made room is the manager's choice, within its rules: the oldest versions, and sessions that may go."""
        for name, life in self.lives.items():
            if self.manager.evicted(name) != life.evicted:
                assert not life.pins
                assert not life.undecided
                assert self.evict_policy == "any" or (self.evict_policy == "recomputable" and life.may_go)
                life.evicted = True
            if life.evicted:
                continue
            for stage, model in life.stages.items():
                known = self.manager._sessions[name].state(stage).known()
                assert [key for key, _ in model.versions][-len(known) :] == known
                del model.versions[: -len(known)]

    @invariant()
    def balances(self) -> None:
        self.manager.check()
        stats = self.manager.stats()
        assert (stats.sessions, stats.evicted) == (len(self.lives), sum(life.evicted for life in self.lives.values()))
        for pool in stats.pools.values():
            assert pool.free + pool.cached + pool.owned == pool.total == BLOCKS

    @invariant()
    def holds_what_the_model_holds(self) -> None:
        self._sync()
        kept: set[int] = set()
        for session, life in self.lives.items():
            if life.evicted:
                continue
            for stage, model in life.stages.items():
                state = self.manager._sessions[session].state(stage)
                kv = state.kv("kv")
                content = kv.pool.storage[0, 1].flatten().tolist()
                values = model.staged or model.committed
                assert state.tick == model.tick
                assert facts(state) == wanted(values)
                assert [content[b] for b in kv.table.layout.blocks] == [*values.sink, *values.window]
                for version, (key, old) in zip(state.versions, model.versions, strict=False):
                    layout, mean, recent, ticks = version.values
                    assert version.key == key
                    assert [content[b] for b in layout.blocks] == [*old.sink, *old.window]
                    assert (0 if mean is None else int(mean), ticks) == (old.mean, old.ticks)
                    assert tuple(map(int, recent)) == old.recent
                    kept |= {x.data_ptr() for lists in version.dropped.values() for d in lists for x in d if _tensor(x)}
        assert self.manager.stats().history_bytes == 4 * len(kept)


def _prefix() -> Any:
    return block_of([PREFIX])


def _tensor(x: object) -> bool:
    return isinstance(x, torch.Tensor)


StateMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)
TestStateMachine = StateMachine.TestCase
