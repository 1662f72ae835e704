"""Evicted state is made anew, tick by tick with the noise it had, or the session says loudly that it is lost."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from omni_loop.clock import FakeClock
from omni_loop.config import SessionConfig
from omni_loop.errors import Exhausted, OmniLoopError, Reason, StageFailed, StateError
from omni_loop.loop.request import SessionInfo
from omni_loop.messages import Command, Done, ResetSession
from omni_loop.record.snapshot import ZarrSnapshots
from omni_loop.runner.runner import RunnerSettings
from omni_loop.runner.state import Budget, StateManager
from omni_loop.stage import StageItem

from .toy import DIM, Gate, Toy, actions, infer, predict, recondition, toy
from .walker import ONE, TIGHT, TWO, WALKER, plan, walk

ANY = RunnerSettings(budget=Budget(blocks=7, evict="any"), queue_ms=1.0)
SHORT = SessionConfig(log_bytes=8000)
FULL = 8  # ticks that fill a session
PLACED = pytest.mark.parametrize("placement", [ONE, TWO], ids=["one-runner", "two-runners"])


async def crowd_out(t: Toy, seed: int = 9) -> SessionInfo:
    """Another session takes all the room there is."""
    other = await t.core.open("walker", seed=seed)
    await walk(t, other, range(FULL))
    return other


async def uncut(steps: int, seed: int = 5) -> list[list[list[float]]]:
    """What a session that is never disturbed says."""
    async with toy(WALKER, ONE) as t:
        return await walk(t, await t.core.open("walker", seed=seed), range(steps))


@PLACED
async def test_an_evicted_session_goes_on_as_if_nothing_had_happened(placement: Sequence[Sequence[str]]) -> None:
    expected = await uncut(3 * FULL)
    async with toy(WALKER, placement, settings=TIGHT) as t:
        info = await t.core.open("walker", seed=5)
        told = await walk(t, info, range(FULL))
        other = await crowd_out(t)
        ran = t.script.count("walk")
        told += await walk(t, info, range(FULL, FULL + 1))
        assert t.script.count("walk") - ran == FULL + 1  # the log, then the tick
        assert t.core.session(info.id, info.token).epoch == 0
        told += await walk(t, info, range(FULL + 1, 2 * FULL))  # and nobody has to do it again
        assert t.script.count("walk") - ran == 2 * FULL
        await walk(t, other, range(FULL, FULL + 1))
        told += await walk(t, info, range(2 * FULL, 3 * FULL))
        assert told == expected


async def test_every_operation_that_was_logged_is_replayed() -> None:
    async def episode(t: Toy, info: SessionInfo, crowd: bool) -> list[list[list[float]]]:
        await walk(t, info, range(6))
        await t.core.tick(predict(info, 7, steps=3))
        await t.core.tick(recondition(info, 8, first=4, n=2, rows=2))  # a new epoch
        await t.core.tick(infer(info, 9, 6, executed=np.ones((1, DIM), np.float32)))
        assert await t.core.rewind(info.id, info.token, 5) == (2, 5)  # another
        await t.core.tick(infer(info, 10, 6, executed=np.ones((1, DIM), np.float32)))
        if crowd:
            await crowd_out(t)
        return await walk(t, info, range(7, 10), first_seq=11)

    async with toy(WALKER, ONE) as t:
        expected = await episode(t, await t.core.open("walker", seed=5), crowd=False)
    async with toy(WALKER, ONE, settings=TIGHT) as t:
        assert await episode(t, await t.core.open("walker", seed=5), crowd=True) == expected
        # Ten ticks, those of the crowd, the nine that were not rewound, three more.
        assert t.script.count("walk") == 10 + FULL + 9 + 3


async def test_what_ran_besides_is_replayed_when_it_had_committed() -> None:
    async with toy(settings=RunnerSettings(budget=Budget(evict="any"))) as t:
        info = await t.core.open("toy")
        await t.core.tick(infer(info, 1, step=0, frames=2))
        t.script.before["frames"] = _fail
        assert (await t.core.tick(infer(info, 2, step=1, frames=2))).frames_error is not None
        t.script.before.clear()
        await t.core.tick(infer(info, 3, step=2, frames=2))
        await evict(t, info)
        frames = (await t.core.tick(predict(info, 4, steps=1))).frames
        assert frames is not None
        assert frames.frames[0, 0, 0].tolist() == [3, 2, 0]  # two committed before; what the last one fed
        assert t.script.count("frames") == 3 + 2 + 1


def _fail(item: StageItem) -> None:
    raise RuntimeError


async def evict(t: Toy, info: SessionInfo) -> None:
    """Take the session's state away, as the runner's policy would, in the runner's own thread."""
    helper = await t.core.open(t.core.session(info.id, info.token).spec.pipeline)

    def take(item: StageItem) -> None:
        if item.session == helper.id:
            for manager in managers:
                if info.id in manager.sessions():
                    manager.evict(info.id)

    managers = _managers()
    t.script.before["context"] = take
    await t.core.tick(infer(helper, 1))
    t.script.before.clear()
    await t.core.close(helper.id, helper.token)


def _managers() -> list[StateManager]:
    return [o for o in gc.get_objects() if type(o) is StateManager]


async def test_a_fork_a_snapshot_and_a_rewind_of_an_evicted_session(tmp_path: Path) -> None:
    expected = await uncut(FULL + 2)
    store = ZarrSnapshots(tmp_path / "s", 1 << 24)
    async with toy(WALKER, TWO, settings=TIGHT, store=store) as t:
        info = await t.core.open("walker", seed=5)
        await walk(t, info, range(FULL))
        other = await crowd_out(t)
        await t.core.snapshot(info.id, info.token, "late")
        await walk(t, other, range(FULL, FULL + 1))
        child = await t.core.fork(info.id, info.token)
        await t.core.close(info.id, info.token)
        assert await walk(t, child, range(FULL, FULL + 2)) == expected[FULL:]
        await walk(t, other, range(FULL + 1, FULL + 2))
        assert await t.core.rewind(child.id, child.token, 3) == (1, 3)
        assert (await walk(t, child, range(4, 5), first_seq=20))[0][2][0] == 5
        await t.core.close(other.id, other.token)
        back = await t.core.restore("late")
        assert await walk(t, back, range(FULL, FULL + 2)) == expected[FULL:]


async def test_a_reset_revives_an_evicted_session() -> None:
    expected = await uncut(2)
    async with toy(WALKER, TWO, settings=TIGHT, config=SHORT) as t:
        info = await t.core.open("walker", seed=5)
        await walk(t, info, range(2))
        await t.core.reset(info.id, info.token)
        await walk(t, info, range(2), first_seq=3)
        await crowd_out(t)
        assert await t.core.reset(info.id, info.token) == 2
        told = await walk(t, info, range(2), first_seq=5)
        assert [chunk[1][0] for chunk in told] == [chunk[1][0] for chunk in expected]


async def test_a_reset_that_finds_no_room_leaves_the_session_as_it_was() -> None:
    expected = await uncut(FULL + 1)
    async with toy(WALKER, TWO, settings=TIGHT) as t:
        info = await t.core.open("walker", seed=5)
        await walk(t, info, range(FULL))
        handle = t.core._live[info.id].route.handles["context"]
        submit = handle.submit

        async def refuse(command: Command) -> Done:
            if isinstance(command, ResetSession):
                raise Exhausted("no room")
            return await submit(command)

        handle.submit = refuse  # type: ignore[method-assign]
        with pytest.raises(Exhausted):
            await t.core.reset(info.id, info.token, seed=1)
        handle.submit = submit  # type: ignore[method-assign]
        assert t.core.session(info.id, info.token).seed == 5
        assert await walk(t, info, range(FULL, FULL + 1)) == expected[FULL:]  # on the other runner too


async def test_a_plan_of_an_evicted_session_rebuilds_it_first() -> None:
    async with toy(WALKER, ONE, settings=TIGHT) as t:
        info = await t.core.open("walker", seed=5)
        await walk(t, info, range(FULL))
        await crowd_out(t)
        ran = t.script.count("walk")
        result = await t.core.tick(plan(info, FULL + 1, horizon=4))
        assert actions(result)[2][0] == FULL + 1
        assert t.script.count("walk") - ran == FULL + 1
        assert (await walk(t, info, range(FULL, FULL + 1), first_seq=FULL + 2))[0][2][0] == FULL + 1


async def test_a_session_whose_log_does_not_reach_back_is_lost_loudly() -> None:
    async with toy(WALKER, ONE, settings=ANY, config=SHORT) as t:
        info = await t.core.open("walker", seed=5)
        await walk(t, info, range(FULL))
        other = await crowd_out(t)
        for _ in range(2):
            with pytest.raises(StateError, match="its last committed step is 7") as caught:
                await t.core.tick(infer(info, FULL + 1, step=FULL))
            assert caught.value.reason is Reason.SESSION_LOST
        with pytest.raises(StateError) as caught:
            await t.core.fork(info.id, info.token)
        assert caught.value.reason is Reason.SESSION_LOST
        await walk(t, other, range(FULL, FULL + 1))  # nobody else notices
        await t.core.close(info.id, info.token)


async def test_state_that_only_its_session_could_rebuild_stays_when_policy_says_so() -> None:
    async with toy(WALKER, ONE, settings=TIGHT, config=SHORT) as t:
        info = await t.core.open("walker", seed=5)
        await walk(t, info, range(FULL))
        other = await t.core.open("walker")
        with pytest.raises(Exhausted) as caught:
            await walk(t, other, range(FULL))
        assert caught.value.missing_bytes > 0
        assert caught.value.retry_after_ms > 0
        await walk(t, info, range(FULL, FULL + 1))


async def test_a_snapshot_stands_in_for_a_log_that_does_not_reach_back(tmp_path: Path) -> None:
    expected = await uncut(2 * FULL)
    store = ZarrSnapshots(tmp_path / "s", 1 << 24)
    async with toy(WALKER, ONE, settings=ANY, config=SHORT, store=store) as t:
        info = await t.core.open("walker", seed=5)
        await walk(t, info, range(FULL))
        await t.core.snapshot(info.id, info.token, "a")
        told = await walk(t, info, range(FULL, FULL + 2))  # these are logged again
        await crowd_out(t)
        ran = t.script.count("walk")
        told += await walk(t, info, range(FULL + 2, FULL + 3))
        assert t.script.count("walk") - ran == 3  # two of the log, and the tick
        assert told == expected[FULL : FULL + 3]
        other = await crowd_out(t)
        await t.core.snapshot(other.id, other.token, "a")  # another session takes the name
        with pytest.raises(StateError, match="its snapshot 'a' was replaced by another") as caught:
            await t.core.tick(infer(info, FULL + 4, step=FULL + 3))
        assert caught.value.reason is Reason.SESSION_LOST


async def test_a_rebuild_that_fails_is_tried_again_by_whoever_calls_next() -> None:
    expected = await uncut(FULL + 1)
    async with toy(WALKER, TWO, settings=TIGHT) as t:
        info = await t.core.open("walker", seed=5)
        await walk(t, info, range(FULL))
        await crowd_out(t)
        t.script.before["walk"] = lambda item: _fail(item) if item.tick == 4 and item.session == info.id else None
        with pytest.raises(StageFailed):
            await walk(t, info, range(FULL, FULL + 1))
        listed = {s.id: s for s in t.core.list_sessions()}
        assert listed[info.id].phase == "evicted"
        with pytest.raises(StageFailed):
            await t.core.fork(info.id, info.token)
        with pytest.raises(StageFailed):
            await t.core.rewind(info.id, info.token, 6)
        t.script.before.clear()
        assert await walk(t, info, range(FULL, FULL + 1)) == expected[FULL:]


async def test_a_deadline_ends_the_call_and_not_the_rebuilding() -> None:
    expected = await uncut(FULL + 1)
    async with toy(WALKER, ONE, settings=TIGHT) as t:
        info = await t.core.open("walker", seed=5)
        await walk(t, info, range(FULL))
        await crowd_out(t)
        gate = Gate()
        t.script.before["walk"] = gate
        call = asyncio.create_task(t.core.tick(infer(info, FULL + 1, step=FULL, mark=FULL, deadline_ms=20)))
        await gate.reached()
        with pytest.raises(OmniLoopError) as caught:
            await call
        assert caught.value.reason is Reason.EXPIRED
        gate.open()
        ran = t.script.count("walk")
        assert await walk(t, info, range(FULL, FULL + 1)) == expected[FULL:]
        assert t.script.count("walk") - ran == FULL  # the rest of the log, and the tick: it was not begun anew


async def test_closing_during_a_rebuild_frees_everything() -> None:
    async with toy(WALKER, TWO, settings=TIGHT) as t:
        info = await t.core.open("walker", seed=5)
        await walk(t, info, range(FULL))
        await crowd_out(t)
        gate = Gate()
        t.script.before["walk"] = gate
        call = asyncio.create_task(t.core.tick(infer(info, FULL + 1, step=FULL)))
        await gate.reached()
        closing = asyncio.create_task(t.core.close(info.id, info.token))
        with pytest.raises(StateError) as caught:
            await call
        assert caught.value.reason is Reason.CLOSED
        gate.open()
        await closing
        assert t.script.count("walk") < 2 * FULL + 3  # the replay ended early


async def test_forks_with_seeds_of_their_own_are_rebuilt_with_the_noise_of_each() -> None:
    async def branch(t: Toy) -> SessionInfo:
        info = await t.core.open("walker", seed=5)
        await walk(t, info, range(4))
        child = await t.core.fork(info.id, info.token, seed=6)
        await walk(t, child, range(4, FULL))
        grandchild = await t.core.fork(child.id, child.token, seed=7)
        for gone in (info, child):
            await t.core.close(gone.id, gone.token)
        return grandchild

    async with toy(WALKER, ONE) as t:
        expected = await walk(t, await branch(t), range(FULL, FULL + 3))
    async with toy(WALKER, TWO, settings=TIGHT) as t:
        info = await branch(t)
        await crowd_out(t)
        assert await walk(t, info, range(FULL, FULL + 3)) == expected
        assert t.core.session(info.id, info.token).seed == 7


async def test_many_sessions_take_turns_in_the_room_of_one() -> None:
    expected = [await uncut(4, seed) for seed in range(5)]
    async with toy(WALKER, ONE, settings=TIGHT, clock=FakeClock()) as t:
        infos = [await t.core.open("walker", seed=seed) for seed in range(5)]
        told: list[list[list[list[float]]]] = [[] for _ in infos]
        for step in range(4):
            for number, info in enumerate(infos):
                told[number] += await walk(t, info, range(step, step + 1))
        assert told == expected


async def test_a_rewind_to_before_the_logs_base_is_refused_and_loses_nothing(tmp_path: Path) -> None:
    expected = await uncut(2 * FULL)
    store = ZarrSnapshots(tmp_path / "s", 1 << 24)
    async with toy(WALKER, ONE, settings=ANY, config=SHORT, store=store) as t:
        info = await t.core.open("walker", seed=5)
        await walk(t, info, range(FULL))
        await t.core.snapshot(info.id, info.token, "a")
        await walk(t, info, range(FULL, FULL + 2))
        await crowd_out(t)
        with pytest.raises(StateError, match="no way back") as refused:
            await t.core.rewind(info.id, info.token, FULL - 2)
        assert refused.value.reason is Reason.BAD_REQUEST
        assert await walk(t, info, range(FULL + 2, FULL + 3)) == expected[FULL + 2 : FULL + 3]


async def test_saving_again_under_the_same_name_loses_nothing(tmp_path: Path) -> None:
    expected = await uncut(2 * FULL)
    store = ZarrSnapshots(tmp_path / "s", 1 << 24)
    async with toy(WALKER, ONE, settings=ANY, config=SHORT, store=store) as t:
        info = await t.core.open("walker", seed=5)
        await walk(t, info, range(FULL))
        await t.core.snapshot(info.id, info.token, "a")
        await walk(t, info, range(FULL, FULL + 2))
        await t.core.snapshot(info.id, info.token, "a")
        await walk(t, info, range(FULL + 2, FULL + 3))
        await crowd_out(t)
        assert await walk(t, info, range(FULL + 3, FULL + 4)) == expected[FULL + 3 : FULL + 4]
