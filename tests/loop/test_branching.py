"""Forks, rewinds and plans: what comes along, what stays behind, and that nobody else notices."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from omni_loop.config import SessionConfig
from omni_loop.errors import (
    ConfigError,
    Exhausted,
    InvalidInput,
    OmniLoopError,
    Reason,
    StageFailed,
    StateError,
    UnknownSession,
    Unsupported,
)
from omni_loop.loop.graph import compile_pipeline
from omni_loop.loop.pipeline import Plan
from omni_loop.types import Op, PlanSummary

from . import toy as toys
from .toy import DIM, Gate, actions, infer, predict, recondition, toy
from .walker import ONE, TIGHT, TWO, WALKER, plan, walk

PLACED = pytest.mark.parametrize("placement", [ONE, TWO], ids=["one-runner", "two-runners"])


# Forks ----------------------------------------------------------------------------------------------------


@PLACED
async def test_a_fork_goes_on_like_its_parent_and_neither_touches_the_other(placement: Sequence[Sequence[str]]) -> None:
    async with toy(WALKER, placement) as t:
        info, twin = await t.core.open("walker", seed=5), await t.core.open("walker", seed=5)
        await walk(t, info, range(6))
        child = await t.core.fork(info.id, info.token)
        assert (child.epoch, child.seed, child.step, child.last_seq) == (0, 5, 5, 6)
        assert child.id != info.id
        assert child.token != info.token
        expected = (await walk(t, twin, range(12)))[6:]
        assert await walk(t, child, range(6, 12)) == expected
        assert await walk(t, info, range(6, 12)) == expected  # the child's ticks left nothing in it
        with pytest.raises(UnknownSession):
            t.core.session(child.id, info.token)


async def test_a_fork_with_a_seed_of_its_own_differs_from_the_next_tick_on() -> None:
    async with toy(WALKER, ONE) as t:
        info = await t.core.open("walker", seed=5)
        await walk(t, info, range(3))
        child = await t.core.fork(info.id, info.token, seed=6)
        other = await t.core.fork(info.id, info.token, seed=6)
        assert child.seed == 6
        mine, own, again = [(await walk(t, i, range(3, 4)))[0] for i in (info, child, other)]
        assert own == again
        assert mine[3][1] != own[3][1]  # the noise
        assert mine[1][0] == own[1][0]  # as many tokens


async def test_a_fork_carries_the_chunk_and_what_was_fed() -> None:
    async with toy() as t:
        info = await t.core.open("toy")
        await t.core.tick(infer(info, 1, step=3))
        await t.core.tick(predict(info, 2, steps=2))
        child = await t.core.fork(info.id, info.token)
        frames = (await t.core.tick(predict(child, 3, steps=1))).frames
        assert frames is not None
        assert frames.frames[0, 0, 0].tolist() == [2, 2, 0]  # second tick of frames; two steps were predicted before
        rows = actions(await t.core.tick(infer(child, 4, step=5)))[1]
        assert rows[0] == 2  # the actions of the parent's chunk, which the child was not asked for


async def test_a_fork_waits_for_the_ticks_before_it_and_not_for_those_behind() -> None:
    async with toy(WALKER, ONE) as t:
        info = await t.core.open("walker")
        gate = Gate()
        t.script.before["walk"] = gate
        first = asyncio.create_task(t.core.tick(infer(info, 1, step=0)))
        await gate.reached()
        forking = asyncio.create_task(t.core.fork(info.id, info.token))
        await asyncio.sleep(0)
        second = asyncio.create_task(t.core.tick(infer(info, 2, step=1)))
        await asyncio.sleep(0)
        gate.open()
        child = await forking
        await asyncio.gather(first, second)
        assert (child.step, child.last_seq) == (0, 1)


async def test_a_fork_that_finds_no_room_leaves_no_trace() -> None:
    async with toy(WALKER, TWO, max_sessions=2) as t:
        info = await t.core.open("walker")
        await walk(t, info, range(2))
        child = await t.core.fork(info.id, info.token)
        with pytest.raises(Exhausted) as caught:
            await t.core.fork(info.id, info.token)
        assert caught.value.reason is Reason.TOO_MANY_SESSIONS
        await t.core.close(child.id, child.token)
        assert await walk(t, await t.core.fork(info.id, info.token), range(2, 3)) == await walk(t, info, range(2, 3))


async def test_an_abandoned_fork_frees_its_place() -> None:
    async with toy(WALKER, ONE, max_sessions=2) as t:
        info = await t.core.open("walker")
        forking = asyncio.create_task(t.core.fork(info.id, info.token))
        await asyncio.sleep(0)
        forking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await forking
        await t.core._tasks.wait()
        await t.core.fork(info.id, info.token)


# Rewinds --------------------------------------------------------------------------------------------------


@PLACED
@pytest.mark.parametrize("to", [0, 3, 8, 9])
async def test_a_rewound_session_stands_as_it_stood(placement: Sequence[Sequence[str]], to: int) -> None:
    """Near steps come from what the runners keep, far ones from the log."""
    config = SessionConfig(rewind_ticks=4)
    async with toy(WALKER, placement, config=config) as t:
        info, short = await t.core.open("walker", seed=5), await t.core.open("walker", seed=5)
        await walk(t, info, range(10))
        await walk(t, short, range(to + 1))
        assert await t.core.rewind(info.id, info.token, to) == (1, to)
        assert t.core.session(info.id, info.token).step == to
        await t.core.rewind(short.id, short.token, to)  # to where it is: only the epoch, and so the noise, changes
        told = await walk(t, info, range(to + 1, to + 4), first_seq=11)
        assert told == await walk(t, short, range(to + 1, to + 4), first_seq=to + 2)
        assert told[0][2][0] == to + 2  # ticks counted in committed state


async def test_a_rewind_goes_on_from_the_chunk_of_that_step() -> None:
    async with toy() as t:
        info = await t.core.open("toy")
        for seq, step in enumerate((0, 4, 8), 1):
            await t.core.tick(infer(info, seq, step=step, executed=np.ones((4 if step else 0, 2), np.float32)))
        await t.core.rewind(info.id, info.token, 4)
        assert actions(await t.core.tick(infer(info, 4, step=6)))[1][0] == 2  # rows of the chunk of step 4
        with pytest.raises(StateError, match="stale"):
            await t.core.tick(infer(info, 3, step=8))  # replies of the old epoch are never given again


async def test_a_step_out_of_reach_names_those_within() -> None:
    async with toy(WALKER, ONE, config=SessionConfig(rewind_ticks=3, log_bytes=4000)) as t:
        info = await t.core.open("walker", seed=5)
        with pytest.raises(StateError, match="no way back to step 3: no step can be"):
            await t.core.rewind(info.id, info.token, 3)
        await walk(t, info, range(10))
        with pytest.raises(StateError, match="no way back to step 2: steps that can be reached: 7, 8, 9") as caught:
            await t.core.rewind(info.id, info.token, 2)
        assert caught.value.reason is Reason.BAD_REQUEST
        assert t.core.session(info.id, info.token).epoch == 0
        with pytest.raises(InvalidInput, match="step is -1"):
            await t.core.rewind(info.id, info.token, -1)
        assert (await walk(t, info, range(10, 11)))[0][2][0] == 11  # nothing has changed


@PLACED
async def test_versions_that_made_room_are_replayed(placement: Sequence[Sequence[str]]) -> None:
    """A full session leaves one block of the pool: what the runners kept of its past has gone."""
    async with toy(WALKER, placement, settings=TIGHT) as t, toy(WALKER, placement) as roomy:
        told = []
        for setup in (t, roomy):
            info = await setup.core.open("walker", seed=5)
            await walk(setup, info, range(9))
            assert await setup.core.rewind(info.id, info.token, 5) == (1, 5)
            told.append(await walk(setup, info, range(6, 9), first_seq=10))
        assert told[0] == told[1]
        assert (t.script.count("walk"), roomy.script.count("walk")) == (9 + 6 + 3, 9 + 3)


@PLACED
async def test_versions_that_made_room_are_refused_where_no_log_helps(placement: Sequence[Sequence[str]]) -> None:
    config = SessionConfig(log_bytes=4000)
    async with toy(WALKER, placement, settings=TIGHT, config=config) as t:
        info = await t.core.open("walker", seed=5)
        before = await walk(t, info, range(9))
        await t.core.tick(predict(info, 10, steps=1))
        with pytest.raises(StateError, match="the state of step 5 made room for others") as caught:
            await t.core.rewind(info.id, info.token, 5)
        assert caught.value.reason is Reason.BAD_REQUEST
        assert "5" not in caught.value.text.partition("reached:")[2]
        assert t.core.session(info.id, info.token).epoch == 0
        # No runner has gone back alone: all ticks count, and what was fed is still there.
        after = actions(await t.core.tick(infer(info, 11, step=9, executed=np.ones((1, DIM), np.float32))))
        assert after[2][0] == before[-1][2][0] + 2
        assert after[2][1] != -1


async def test_imagined_steps_are_undone_by_a_rewind() -> None:
    async with toy(WALKER, ONE) as t:
        info = await t.core.open("walker", seed=5)
        before = (await walk(t, info, range(3)))[-1]
        await t.core.tick(predict(info, 4, steps=4))
        assert t.core.session(info.id, info.token).step == 6
        await t.core.rewind(info.id, info.token, 2)
        after = actions(await t.core.tick(infer(info, 5, step=3)))
        assert after[1][0] == before[1][0] + 2  # tokens: the imagined ones are gone, a block came


async def test_a_rewind_behind_a_recondition_to_the_past_and_a_second_one() -> None:
    async with toy(WALKER, ONE) as t:
        info = await t.core.open("walker", seed=5)
        await walk(t, info, range(3))
        assert (await t.core.tick(recondition(info, 4, first=2, n=1, rows=1))).epoch == 1
        for seq, step in ((5, 3), (6, 4)):
            await t.core.tick(infer(info, seq, step, executed=np.ones((1, DIM), np.float32)))
        assert await t.core.rewind(info.id, info.token, 1) == (2, 1)
        first = await walk(t, info, range(2, 4), first_seq=7)
        assert await t.core.rewind(info.id, info.token, 1) == (3, 1)
        assert [c[2][0] for c in first] == [3, 4]
        assert [c[2][0] for c in await walk(t, info, range(2, 4), first_seq=9)] == [3, 4]


# Plans ----------------------------------------------------------------------------------------------------


async def test_a_plan_answers_and_changes_nothing() -> None:
    async with toy(WALKER, ONE) as t:
        info, twin = await t.core.open("walker", seed=5), await t.core.open("walker", seed=5)
        await walk(t, info, range(3))
        await walk(t, twin, range(3))
        before = t.core.session(info.id, info.token)
        goal, init = np.full((4, 4, 3), 8, np.uint8), np.ones((5, 2), np.float32)
        request = plan(info, 4, horizon=5, candidates=12, goal=goal, init=init)
        result = await t.core.tick(request)
        assert result.plan == PlanSummary(4, 8.0, 2.0, 12, 1, 5)
        assert result.chunk is not None
        assert result.chunk.actions.shape == (5, 2)
        assert result.chunk.first_step == 2
        assert result.chunk.actions[-1].tolist() == [1, 1]
        assert result.frames is not None
        assert (result.frames.first_step, len(result.frames.frames)) == (3, 5)
        assert result.timings.total_ms > 0
        assert t.core.session(info.id, info.token) == replace(before, last_seq=4)
        assert await t.core.tick(request) is result  # computed once
        assert t.script.count("walk") == 7
        # The noise of later ticks, their count and what was fed are as if there had been no plan, and so is the log.
        assert await walk(t, info, range(3, 5), first_seq=5) == await walk(t, twin, range(3, 5))
        assert await t.core.rewind(info.id, info.token, 2) == (1, 2)


async def test_a_plan_without_goal_and_start_sends_none() -> None:
    async with toy(WALKER, ONE) as t:
        seen: dict[str, object] = {}

        def look(item: object) -> None:
            seen.update(item.params)  # type: ignore[attr-defined]
            seen["goal"] = dict(item.inputs["goal"].arrays) if "goal" in item.inputs else None  # type: ignore[attr-defined]

        info = await t.core.open("walker")
        await walk(t, info, range(1))
        t.script.before["walk"] = look
        await t.core.tick(plan(info, 2, horizon=4, method="mppi", iterations=2, budget_ms=7.5))
        expected = {"horizon": 4, "candidates": 64, "iterations": 2, "method": "mppi", "budget_ms": 7.5, "frames": 4}
        assert expected.items() <= seen.items()
        assert seen["goal"] == {}


async def test_a_plan_that_fails_may_be_sent_again() -> None:
    async with toy(WALKER, ONE) as t:
        info = await t.core.open("walker")
        await walk(t, info, range(1))
        t.script.before["walk"] = toys.fail_for(info.id, RuntimeError())  # type: ignore[assignment]
        with pytest.raises(StageFailed):
            await t.core.tick(plan(info, 2, horizon=4))
        t.script.before.clear()
        assert (await t.core.tick(plan(info, 2, horizon=4))).plan is not None
        t.script.change["walk"] = _without_cost
        with pytest.raises(StageFailed, match="a plan's 'cost' is None, expected a number"):
            await t.core.tick(plan(info, 3, horizon=4))


def _without_cost(outputs: dict[str, object]) -> dict[str, object]:
    chunk = outputs["actions"]
    return {**outputs, "actions": replace(chunk, meta={})}  # type: ignore[type-var]


@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        ({"horizon": 9}, "horizon is 9; pipeline 'walker' plans with 1..8"),
        ({"horizon": 0}, "horizon is 0"),
        ({"horizon": 8, "candidates": 4096, "iterations": 3}, "imagine 98304 frames; one plan may imagine 65536"),
        ({"candidates": 0}, "candidates is 0; pipeline 'walker' plans with 1..4096"),
        ({"iterations": 65}, "iterations is 65"),
        ({"method": "cme"}, "no method is called 'cme'. Did you mean 'cem'"),
        ({"budget_ms": float("nan")}, "budget_ms is nan"),
        ({"goal": np.zeros((4, 3, 3), np.uint8)}, r"'goal' is uint8\[4, 3, 3\], expected uint8\[4, 4, 3\]"),
        ({"goal": np.zeros((4, 4, 3), np.float32)}, r"'goal' is float32"),
        ({"init": np.zeros((3, 2), np.float32), "horizon": 4}, "'init' has 3 rows for a horizon of 4"),
        ({"init": np.zeros((4, 3), np.float32), "horizon": 4}, r"'init' has shape \[4, 3\]"),
    ],
)
async def test_a_plan_that_does_not_fit_is_refused(wanted: dict[str, object], text: str) -> None:
    async with toy(WALKER, ONE) as t:
        info = await t.core.open("walker")
        await walk(t, info, range(1))
        with pytest.raises(InvalidInput, match=text):
            await t.core.tick(plan(info, 2, **wanted))
        assert t.script.count("walk") == 1


async def test_plans_where_they_cannot_be() -> None:
    async with toy(WALKER, ONE) as t, toy() as plain:
        info, other = await t.core.open("walker"), await plain.core.open("toy")
        with pytest.raises(StateError, match="plan continues from an observation: infer or recondition first"):
            await t.core.tick(plan(info, 1))
        with pytest.raises(InvalidInput, match="send 'plan'"):
            await t.core.tick(replace(plan(info, 1), plan=None))
        with pytest.raises(InvalidInput, match="infer searches for nothing"):
            await t.core.tick(replace(infer(info, 1), plan=plan(info, 1).plan))
        with pytest.raises(Unsupported, match="pipeline 'toy' cannot plan; it can infer, predict, recondition"):
            await plain.core.tick(plan(other, 1))


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        (
            Plan(("walk",), ("context",), chunk="walk.actions"),
            "plan plan commits nothing, so that nothing can run",
        ),
        (Plan(("walk",)), "plan plan has no chunk"),
        (Plan(("context",), chunk="context.x"), "needs observation, which a client does not send for plan"),
    ],
)
def test_a_graph_whose_plan_cannot_be_is_named(changed: Plan, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        compile_pipeline(replace(WALKER, plans={**WALKER.plans, Op.PLAN: changed}))


async def test_all_sessions_are_listed_without_what_gives_access() -> None:
    async with toy(WALKER, ONE) as t:
        info = await t.core.open("walker")
        await walk(t, info, range(3))
        child = await t.core.fork(info.id, info.token)
        listed = {s.id: s for s in t.core.list_sessions()}
        assert set(listed) == {info.id, child.id}
        one = listed[info.id]
        assert (one.pipeline, one.phase, one.epoch, one.step, one.last_seq) == ("walker", "idle", 0, 2, 3)
        assert info.token not in repr(t.core.list_sessions())


async def test_nothing_new_begins_while_the_server_is_about_to_stop() -> None:
    async with toy(WALKER, ONE) as t:
        info = await t.core.open("walker")
        await t.core.stop()
        for call in (
            t.core.fork(info.id, info.token),
            t.core.rewind(info.id, info.token, 0),
            t.core.snapshot(info.id, info.token, "x"),
            t.core.restore("x"),
        ):
            with pytest.raises(OmniLoopError) as caught:
                await call
            assert caught.value.reason is Reason.DRAINING
