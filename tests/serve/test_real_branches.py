"""Forks, rewinds, snapshots and plans over gRPC, the real orchestrator and a runner with real state."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from omni_loop import registry
from omni_loop.client import AsyncClient, AsyncSession, WasRewound, connect_async
from omni_loop.config import Deployment, Limits, Listen, Pools, SnapshotConfig
from omni_loop.errors import Exhausted, InvalidInput, Reason, SnapshotError, StateError, UnknownName, Unsupported
from omni_loop.loop.pipeline import CLIENT, Edge, Pipeline, Plan, StageDef
from omni_loop.messages import PayloadKind
from omni_loop.serve.app import Server
from omni_loop.stage import CounterSpec, KVSpec, Outputs, Payload, StageItem, StateSpec
from omni_loop.testing.bad_inputs import good_arrays
from omni_loop.testing.toy_core import SPEC as TOY_SPEC
from omni_loop.types import Op, PlanSummary, StageKind, TickResult

SPEC = replace(TOY_SPEC, ops=(Op.INFER, Op.PLAN))
ARRAYS = {name: good_arrays()[name] for name in ("image", "agent_pos")}
BLOCK = 2


class Act:
    """A chunk's rows: [what the whole past adds up to, noise of the tick]. A plan's: the goal's first value."""

    kind, revision = StageKind.ACT, "toy-1"

    def state_specs(self) -> Mapping[str, StateSpec]:
        return {"count": CounterSpec(), "kv": KVSpec(1, 1, 2, BLOCK, window_blocks=64)}

    def run(self, items: Sequence[StageItem]) -> Sequence[Outputs | Exception]:
        return [self._plan(item) if item.op is Op.PLAN else self._act(item) for item in items]

    def _act(self, item: StageItem) -> Outputs:
        import torch

        count, kv = item.state.counter("count"), item.state.kv("kv")
        count.set(count.get() + 1)
        kv.append(torch.full((1, 2, BLOCK, 1, 2), float(item.step)))
        past = float(np.asarray(kv.gather()).sum()) / (4 * BLOCK) + 100 * count.get()
        noise = np.random.default_rng(item.noise_seed("act")).random()
        rows = np.full((SPEC.horizon, 2), [past % 512, noise], np.float32)
        return {"actions": Payload(PayloadKind.ACTIONS, {"actions": rows})}

    def _plan(self, item: StageItem) -> Outputs:
        import torch

        item.state.kv("kv").append(torch.zeros(1, 2, BLOCK, 1, 2))  # staged, and never committed
        goal = item.inputs["goal"].arrays
        value = float(np.asarray(goal["goal"]).flat[1]) if "goal" in goal else 0.0
        meta = {"cost": 0.5, "first_cost": 2.0, "candidates": item.params["candidates"], "iterations": 1}
        rows = np.full((int(item.params["horizon"]), 2), value, np.float32)
        return {"plan": Payload(PayloadKind.ACTIONS, {"actions": rows}, {**meta, "out_of_time": True})}

    def warm_up(self) -> None:
        pass


TOY = Pipeline(
    name="toy",
    spec=lambda: SPEC,
    stages=(StageDef("act", StageKind.ACT, "toy-act"),),
    edges=(
        Edge(CLIENT, "observation", "act", "observation", PayloadKind.OBSERVATION, optional=True),
        Edge(CLIENT, "goal", "act", "goal", PayloadKind.GOAL, optional=True),
    ),
    plans={Op.INFER: Plan(("act",), chunk="act.actions"), Op.PLAN: Plan(("act",), chunk="act.plan")},
)


@asynccontextmanager
async def serving(folder: Path | None = None, **pools: Any) -> AsyncIterator[AsyncClient]:
    deployment = Deployment(
        pipelines=("toy",),
        listen=Listen(port=0),
        limits=Limits(max_sessions=4),
        pools=Pools(**pools),
        snapshots=SnapshotConfig(folder=None if folder is None else str(folder)),
    )
    with registry.registered(registry.PIPELINES, "toy", TOY), registry.registered(registry.STAGES, "toy-act", Act):
        server = Server(deployment)
        try:
            await server.start()
            async with connect_async(server.address, timeout_s=20) as client:
                yield client
        finally:
            await server.stop(1.0)


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[AsyncClient]:
    async with serving(tmp_path / "snapshots") as client:
        yield client


async def ran(client: AsyncClient, steps: int) -> AsyncSession:
    session = await client.open("toy", seed=3, prompt="push")
    for step in range(steps):
        await session.infer(ARRAYS, step)
    return session


async def go_on(session: AsyncSession, first: int, last: int) -> list[np.ndarray]:
    return [chunk(await session.infer(ARRAYS, step)) for step in range(first, last)]


def chunk(result: TickResult) -> np.ndarray:
    assert result.chunk is not None
    return result.chunk.actions


def flip_a_bit_of_every_file(folder: Path) -> None:
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)


async def test_a_child_goes_on_as_its_parent_would_have(client: AsyncClient) -> None:
    parent = await ran(client, 3)
    child = await parent.fork()
    other = await parent.fork(seed=4)
    assert (child.start_step, child.epoch) == (2, parent.epoch)
    theirs = await go_on(child, 3, 6)
    np.testing.assert_array_equal(theirs, await go_on(parent, 3, 6))
    differs = await go_on(other, 3, 6)
    np.testing.assert_array_equal(np.array(differs)[..., 0], np.array(theirs)[..., 0])
    assert not np.array_equal(differs, theirs)
    await parent.close()
    assert (await child.infer(ARRAYS, 6)).seq == 7


async def test_a_child_of_a_session_that_was_reset_or_refused(client: AsyncClient) -> None:
    parent = await ran(client, 2)
    with pytest.raises(StateError, match="before the session's last observation"):
        await parent.infer(ARRAYS, 0)
    assert (await (await parent.fork()).infer(ARRAYS, 2)).seq == 4
    await parent.reset()
    child = await parent.fork()
    assert (child.start_step, child.epoch) == (0, parent.epoch)
    np.testing.assert_array_equal(await go_on(child, 0, 2), await go_on(parent, 0, 2))


async def test_a_rewound_session_forgets_what_came_later(client: AsyncClient) -> None:
    session, epoch = await ran(client, 4), 0
    twin = await ran(client, 2)
    assert await session.rewind(1) > epoch
    assert session.start_step == 1
    again, straight = await go_on(session, 2, 4), await go_on(twin, 2, 4)
    np.testing.assert_array_equal(np.array(again)[..., 0], np.array(straight)[..., 0])
    with pytest.raises(StateError, match=r"no way back to step 7.*0, 1, 2, 3") as refusal:
        await session.rewind(7)
    assert refusal.value.epoch == session.epoch
    shown = await client.sessions(session, twin)
    assert [(s.step, s.last_seq, s.epoch) for s in shown.sessions] == [(3, 6, session.epoch), (3, 4, twin.epoch)]
    assert shown.counts == {"toy": 2}


async def test_a_snapshot_continues_in_another_server_bit_for_bit(tmp_path: Path) -> None:
    async with serving(tmp_path) as client:
        session = await ran(client, 3)
        assert await session.snapshot("robot.1") > 0
        uncut = await go_on(session, 3, 6)
    async with serving(tmp_path) as client:
        restored = await client.restore("robot.1")
        assert (restored.start_step, restored.seed, restored.epoch, restored.keys) == (
            2,
            3,
            session.epoch,
            session.keys,
        )
        np.testing.assert_array_equal(await go_on(restored, 3, 6), uncut)
        assert restored._book.seq == 6
        with pytest.raises(UnknownName):
            await client.restore("robot.2")
        flip_a_bit_of_every_file(tmp_path)
        with pytest.raises(SnapshotError) as corrupt:
            await client.restore("robot.1")
        assert str(tmp_path) not in corrupt.value.text
        assert (await client.sessions()).counts == {"toy": 1}


async def test_a_session_restored_after_a_reset_takes_the_next_seq(client: AsyncClient) -> None:
    session = await ran(client, 3)
    await session.reset()
    await session.snapshot("fresh")
    restored = await client.restore("fresh")
    assert restored.start_step == 0
    np.testing.assert_array_equal(await go_on(restored, 0, 2), await go_on(session, 0, 2))


async def test_a_server_without_a_folder_keeps_no_snapshots() -> None:
    async with serving() as client:
        session = await ran(client, 1)
        with pytest.raises(Unsupported, match="keeps no snapshots"):
            await session.snapshot("a")
        with pytest.raises(Unsupported, match="keeps no snapshots"):
            await client.restore("a")


async def test_a_plan_leaves_no_trace(client: AsyncClient) -> None:
    session, twin = await ran(client, 2), await ran(client, 2)
    planned = await session.plan(horizon=3, candidates=5, goal=ARRAYS["image"])
    assert planned.plan == PlanSummary(3, 0.5, 2.0, 5, 1, 3, True)
    np.testing.assert_array_equal(chunk(planned), np.ones((3, 2), np.float32))
    assert chunk(await session.plan()).shape == (8, 2)
    np.testing.assert_array_equal(await go_on(session, 2, 5), await go_on(twin, 2, 5))
    assert session.epoch == twin.epoch


async def test_a_plan_needs_something_to_go_on_from(client: AsyncClient) -> None:
    session = await client.open("toy")
    with pytest.raises(StateError, match="continues from an observation"):
        await session.plan()
    with pytest.raises(InvalidInput, match="horizon is 9"):
        await session.plan(horizon=9)
    assert (await session.infer(ARRAYS, 0)).seq == 2


async def test_a_rewind_on_the_stream(client: AsyncClient) -> None:
    session = await client.open("toy", seed=3)
    async with session.stream() as stream:
        for step in range(3):
            await stream.infer(ARRAYS, step)
        await stream.rewind(0)
        await stream.plan(horizon=2)
        await stream.infer(ARRAYS, 1)
        await stream.done()
        events = [event async for event in stream]
    assert events[3] == WasRewound(session.epoch, 0)
    assert events[4].plan.horizon == 2
    assert (events[5].seq, events[5].epoch) == (5, session.epoch)
    np.testing.assert_array_equal(events[5].chunk.actions[:, 0], events[1].chunk.actions[:, 0])


async def test_a_full_pool_says_what_is_missing() -> None:
    async with serving(blocks=4, queue_ms=0.0, evict="none") as client:
        full = await ran(client, 4)
        hungry = await client.open("toy")
        with pytest.raises(Exhausted) as refusal:
            await hungry.infer(ARRAYS, 0)
        assert refusal.value.reason is Reason.OUT_OF_BLOCKS
        assert refusal.value.retryable
        assert refusal.value.missing_bytes > 0
        assert refusal.value.retry_after_ms > 0
        await full.close()
        assert (await hungry.infer(ARRAYS, 0)).seq == 2
