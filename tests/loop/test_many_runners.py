"""Stages spread over runners and connectors: overlap, payloads carried across, runners that go, leases that end."""

from __future__ import annotations

import asyncio
import threading
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from omni_loop import registry
from omni_loop.clock import FakeClock
from omni_loop.config import Deployment, Pools, RunnerConfig, SessionConfig, SnapshotConfig
from omni_loop.connect.shm import ShmConnector
from omni_loop.errors import ConfigError, Reason, ServerUnavailable, StateError, UnknownName, UnknownSession
from omni_loop.loop.orchestrator import Orchestrator
from omni_loop.loop.pipeline import Edge, Plan, StageDef
from omni_loop.messages import PayloadKind
from omni_loop.types import Op

from .toy import TOY, Gate, Script, Toy, _factory, infer, predict, recondition, toy
from .walker import ONE, WALKER, plain, walk

SPREAD = (("context",), ("act",), ("frames",))


@pytest.mark.parametrize("shared", [False, True])
async def test_stages_on_runners_of_their_own_give_the_same(shared: bool) -> None:
    connectors = [ShmConnector(), None, ShmConnector()] if shared else [None, None, None]
    async with toy(placement=SPREAD, connectors=connectors) as spread, toy() as together:
        results = []
        for t in (spread, together):
            info = await t.core.open("toy", seed=3)
            first = await t.core.tick(infer(info, 1, step=0, frames=2))
            second = await t.core.tick(predict(info, 2, actions=np.ones((2, 2), np.float32)))
            third = await t.core.tick(recondition(info, 3, first=1, n=1, rows=1))
            fourth = await t.core.tick(predict(info, 4, steps=1))
            assert first.chunk is not None
            assert third.epoch == 1
            frames = [r.frames.frames.tolist() for r in (first, second, fourth) if r.frames is not None]
            results.append((first.chunk.actions.tolist(), frames))
        assert results[0] == results[1]


async def test_a_stage_in_a_process_of_its_own_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))  # a spawned process gets our path
    stages = tuple(StageDef(s.name, s.kind, "toy:plain", {"name": s.name}) for s in TOY.stages)
    runners = (RunnerConfig(name="main"), RunnerConfig(name="other", stages=("toy/frames",), placement="process"))
    results = []
    with registry.registered(registry.PIPELINES, "toy", replace(TOY, stages=stages)):
        for placed in (runners[:1], runners):
            core = await Orchestrator.start(Deployment(pipelines=("toy",), runners=placed))
            try:
                info = await core.open("toy", seed=3)
                first = await core.tick(infer(info, 1, frames=2))
                second = await core.tick(predict(info, 2, actions=np.ones((2, 2), np.float32)))
                assert first.frames is not None
                assert second.frames is not None
                results.append((first.frames.frames.tolist(), second.frames.frames.tolist()))
            finally:
                await core.stop()
    assert results[0] == results[1]


@pytest.mark.parametrize("shared", [False, True], ids=["local", "shm"])
async def test_a_session_branches_alike_wherever_its_stages_run(
    shared: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a thread, in a process, through shared memory: fork, rewind, save, restore, and rebuild after an eviction."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1]))  # a spawned process gets our path
    placed = (RunnerConfig(name="main", connector="shm" if shared else None),)
    if shared:
        placed = (*placed, RunnerConfig(name="other", stages=("walker/walk",), placement="process"))
    stages = tuple(StageDef(s.name, s.kind, f"{plain.__module__}:plain", {"name": s.name}) for s in WALKER.stages)
    deployment = Deployment(
        pipelines=("walker",),
        runners=placed,
        pools=Pools(blocks=7),
        snapshots=SnapshotConfig(folder=str(tmp_path)),
    )
    with registry.registered(registry.PIPELINES, "walker", replace(WALKER, stages=stages)):
        core = await Orchestrator.start(deployment)
        try:
            t = Toy(core, Script(), [])
            info = await core.open("walker", seed=5)
            await walk(t, info, range(9))
            await core.snapshot(info.id, info.token, "a")
            child = await core.fork(info.id, info.token)
            told = [await walk(t, child, range(9, 12))]  # each takes the room of the one before
            told.append(await walk(t, info, range(9, 12)))
            back = await core.restore("a")
            told.append(await walk(t, back, range(9, 12)))
            await core.close(back.id, back.token)  # its log begins in a snapshot, so that its state may not go
            told.append(await walk(t, info, range(12, 14)))
            await core.rewind(info.id, info.token, 4)
            told.append(await walk(t, info, range(5, 8), first_seq=15))
        finally:
            await core.stop()
    assert told[0] == told[1] == told[2]
    async with toy(WALKER, ONE) as t:
        twin = await t.core.open("walker", seed=5)
        assert (await walk(t, twin, range(14)))[9:] == told[0] + told[3]
        await t.core.rewind(twin.id, twin.token, 4)
        assert await walk(t, twin, range(5, 8), first_seq=15) == told[4]


async def test_independent_stages_of_one_tick_overlap() -> None:
    plan = Plan(("context", "act", "frames"), chunk="act.actions", frames="frames.frames")
    pipeline = replace(TOY, plans={**TOY.plans, Op.INFER: plan})
    async with toy(pipeline, placement=SPREAD) as t:
        both = threading.Barrier(2)
        t.script.before["act"] = t.script.before["frames"] = lambda item: both.wait(20) and None
        info = await t.core.open("toy")
        result = await t.core.tick(infer(info, 1, frames=1))  # neither could pass the barrier alone
        assert result.chunk is not None
        assert result.frames is not None


async def test_a_failure_beside_a_stage_that_still_runs_undoes_both() -> None:
    plan = Plan(("context", "act", "frames"), chunk="act.actions", frames="frames.frames")
    pipeline = replace(TOY, plans={**TOY.plans, Op.INFER: plan})
    async with toy(pipeline, placement=SPREAD) as t:
        gate = Gate()

        def fail(item: object) -> None:
            raise RuntimeError

        t.script.before["frames"], t.script.before["act"] = gate, fail
        info = await t.core.open("toy")
        with pytest.raises(Exception, match="'toy/act' failed"):  # at once, although frames is still at the gate
            await t.core.tick(infer(info, 1, frames=1))
        gate.open()
        t.script.before.clear()
        result = await t.core.tick(infer(info, 1, frames=1))
        assert result.chunk is not None
        assert result.frames is not None
        assert result.chunk.actions[2, 0] == 1
        assert result.frames.frames[0, 0, 0].tolist() == [1, 0, 0]


async def test_needed_feedback_that_is_missing_is_an_error_of_the_order() -> None:
    edges = (
        *(e for e in TOY.edges if not e.feedback),
        Edge("context", "hidden", "frames", "start", PayloadKind.HIDDEN, feedback=True),
    )
    async with toy(replace(TOY, edges=edges)) as t:
        info = await t.core.open("toy")
        await t.core.tick(infer(info, 1, step=0))
        assert (await t.core.tick(predict(info, 2, steps=1))).frames is not None
        with pytest.raises(StateError, match="predict continues from what 'context' gave in the tick before"):
            await t.core.tick(predict(info, 3, steps=1))  # the tick before was no infer
        await t.core.tick(infer(info, 4, step=1))
        assert (await t.core.tick(predict(info, 5, steps=1))).frames is not None


async def test_a_runner_that_is_gone_loses_sessions_loudly() -> None:
    async with toy(placement=SPREAD) as t:
        info, other = await t.core.open("toy"), await t.core.open("toy")
        await t.core.tick(infer(info, 1, step=4))
        await t.core._tasks.wait()  # the answer leaves before the tick is cleaned up
        await t.runners[1].stop()
        with pytest.raises(ServerUnavailable) as caught:
            await t.core.tick(infer(info, 2, step=4))
        assert caught.value.reason is Reason.RUNNER_GONE
        with pytest.raises(StateError, match="its last committed step is 4") as lost:
            await t.core.tick(infer(info, 2, step=4))
        assert lost.value.reason is Reason.SESSION_LOST
        with pytest.raises(ServerUnavailable):
            await t.core.reset(other.id, other.token)
        assert not t.core.ready
        with pytest.raises(ServerUnavailable):
            await t.core.ping()
        with pytest.raises(ServerUnavailable):
            await t.core.open("toy")
        await t.core.close(info.id, info.token)  # what is left of it is freed
        await t.core.close(other.id, other.token)


async def test_silent_sessions_end_with_their_lease() -> None:
    clock = FakeClock()
    async with toy(clock=clock, max_sessions=2, config=SessionConfig(idle_ttl_s=60)) as t:
        silent, busy = await t.core.open("toy"), await t.core.open("toy")
        await t.core.tick(infer(silent, 1))
        await clock.advance(50)
        await t.core.tick(infer(busy, 1))
        gate = Gate()
        t.script.before["context"] = gate
        call = asyncio.create_task(t.core.tick(infer(busy, 2, step=1)))
        await gate.reached()
        await clock.advance(70)  # both would be over by now
        gate.open()
        await call  # a lease is suspended while a tick runs
        await t.core._tasks.wait()
        with pytest.raises(UnknownSession):
            await t.core.tick(infer(silent, 2, step=1))
        t.script.before.clear()
        await t.core.open("toy")  # its place is free
        await clock.advance(59)
        await t.core.tick(infer(busy, 3, step=2))
        await clock.advance(59)
        await t.core.tick(infer(busy, 4, step=3))


async def test_nothing_runs_while_nobody_asks() -> None:
    async with toy() as t:
        before = asyncio.all_tasks()
        info = await t.core.open("toy")
        await t.core.tick(infer(info, 1))
        await t.core._tasks.wait()
        assert len(asyncio.all_tasks() - before) == 1  # the one that sleeps until the lease ends
        await t.core.close(info.id, info.token)


async def test_an_abandoned_open_frees_its_place() -> None:
    async with toy(max_sessions=1) as t:
        opening = asyncio.create_task(t.core.open("toy"))
        await asyncio.sleep(0)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        await t.core._tasks.wait()
        await t.core.open("toy")


async def test_a_deployment_becomes_runners() -> None:
    script = Script()
    named = (RunnerConfig(name="a", stages=("toy/act",)), RunnerConfig(name="b", connector="shm"))
    deployment = Deployment(pipelines=("toy",), runners=named)
    stages = [StageDef(s.name, s.kind, f"toy-{s.name}") for s in TOY.stages]
    with ExitStack() as stack:
        stack.enter_context(registry.registered(registry.PIPELINES, "toy", replace(TOY, stages=tuple(stages))))
        for stage in stages:
            factory = _factory(stage.name, script)
            stack.enter_context(registry.registered(registry.STAGES, stage.factory, factory))
        core = await Orchestrator.start(deployment)
        assert core.ready
        await core.ping()
        assert core.specs["toy"].horizon == 4
        info = await core.open("toy")
        assert (await core.tick(infer(info, 1, frames=1))).frames is not None
        await core.stop()
        assert not core.ready
        wrong = deployment.model_copy(update={"stage_options": {"toy-actt": {"x": 1}}})
        with pytest.raises(ConfigError, match=r"'toy-actt'. Did you mean 'toy-act'"):
            await Orchestrator.start(wrong)
        idle = (*named, RunnerConfig(name="c", stages=()))
        with pytest.raises(ConfigError, match="runner 'c' has no stage"):
            await Orchestrator.start(deployment.model_copy(update={"runners": idle}))
        with pytest.raises(UnknownName, match=r"'toi'. Did you mean 'toy'"):
            await Orchestrator.start(deployment.model_copy(update={"pipelines": ("toi",)}))
