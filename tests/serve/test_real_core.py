"""The server over the real orchestrator and a runner: a small pipeline of numpy stages, registered for the test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace

import grpc
import numpy as np
import pytest

from omni_loop import registry
from omni_loop.client import AsyncClient, connect_async
from omni_loop.config import Deployment, Limits, Listen, RunnerConfig
from omni_loop.errors import Exhausted, InvalidInput, Reason, StageFailed, StateError, Unsupported
from omni_loop.loop.pipeline import CLIENT, Edge, Pipeline, Plan, StageDef
from omni_loop.messages import PayloadKind
from omni_loop.serve.app import Server
from omni_loop.stage import CounterSpec, Outputs, Payload, StageItem, StateSpec
from omni_loop.testing.bad_inputs import KEYS, cases, good_arrays, good_request
from omni_loop.testing.toy_core import SECRET
from omni_loop.testing.toy_core import SPEC as TOY_SPEC
from omni_loop.types import FramePrediction, Op, StageKind, TickResult
from omni_loop.wire import loop_pb2 as pb

SPEC = replace(TOY_SPEC, ops=(Op.INFER, Op.PREDICT, Op.RECONDITION))
ARRAYS = {name: good_arrays()[name] for name in ("image", "agent_pos")}


class Act:
    """Row i: [seed + committed ticks, 10 * step + i]. Crashes at step 13."""

    kind, revision = StageKind.ACT, "toy-1"

    def state_specs(self) -> Mapping[str, StateSpec]:
        return {"count": CounterSpec()}

    def run(self, items: Sequence[StageItem]) -> Sequence[Outputs | Exception]:
        return [self._one(item) for item in items]

    def _one(self, item: StageItem) -> Outputs | Exception:
        count = item.state.counter("count")
        count.set(count.get() + 1)
        if item.step == 13:
            return RuntimeError(f"{SECRET} is not readable")
        rows = np.arange(SPEC.horizon)
        actions = np.stack([np.full(len(rows), item.seed + count.get()), 10 * item.step + rows], axis=1)
        return {"actions": Payload(PayloadKind.ACTIONS, {"actions": actions.astype(np.float32)})}

    def warm_up(self) -> None:
        pass


class Frames(Act):
    """As many grey frames as asked for."""

    kind = StageKind.FRAMES

    def _one(self, item: StageItem) -> Outputs:
        frames = np.full((int(item.params["frames"]), 8, 8, 3), item.step, np.uint8)
        return {"frames": Payload(PayloadKind.FRAMES, {"frames": frames})}


TOY = Pipeline(
    name="toy",
    spec=lambda: SPEC,
    stages=(StageDef("act", StageKind.ACT, "toy-act"), StageDef("frames", StageKind.FRAMES, "toy-frames")),
    edges=(
        Edge(CLIENT, "observation", "act", "observation", PayloadKind.OBSERVATION),
        Edge(CLIENT, "actions", "frames", "actions", PayloadKind.ACTIONS, optional=True),
        Edge("act", "actions", "frames", "chunk", PayloadKind.ACTIONS, optional=True),
    ),
    plans={
        Op.INFER: Plan(("act",), ("frames",), chunk="act.actions", frames="frames.frames"),
        Op.PREDICT: Plan(("frames",), frames="frames.frames"),
        Op.RECONDITION: Plan(("act",)),
    },
)


@pytest.fixture
async def client() -> AsyncIterator[AsyncClient]:
    deployment = Deployment(
        pipelines=("toy",), listen=Listen(port=0), runners=(RunnerConfig(name="main"),), limits=Limits(max_sessions=3)
    )
    with (
        registry.registered(registry.PIPELINES, "toy", TOY),
        registry.registered(registry.STAGES, "toy-act", Act),
        registry.registered(registry.STAGES, "toy-frames", Frames),
    ):
        server = Server(deployment)
        try:
            await server.start()
            async with connect_async(server.address, timeout_s=20) as client:
                yield client
        finally:
            await server.stop(1.0)


def first(result: TickResult) -> list[float]:
    assert result.chunk is not None
    return list(result.chunk.actions[0].tolist())


async def test_every_operation(client: AsyncClient) -> None:
    assert (await client.info()).pipelines == {"toy": SPEC}
    async with await client.open("toy", prompt="push", seed=5) as session:
        result = await session.infer(ARRAYS, 0, frames=2)
        assert first(result) == [6, 0]
        assert result.frames is not None
        assert result.frames.frames.shape == (2, 8, 8, 3)
        assert result.timings.total_ms > 0
        assert first(await session.infer(ARRAYS, 2)) == [7, 20]
        assert (await session.predict(np.ones((3, 2), np.float32))).frames is not None
        run = {name: array[None] for name, array in ARRAYS.items()}
        before = session.epoch
        await session.recondition(run, executed=np.ones((1, 2), np.float32), first_step=3)
        assert session.epoch == before + 1  # it replaced the imagined steps 3 to 5
        assert await session.reset(seed=50) == session.epoch == before + 2
        assert first(await session.infer(ARRAYS, 0)) == [51, 0]


async def test_frames_follow_on_the_stream(client: AsyncClient) -> None:
    session = await client.open("toy", seed=0)
    async with session.stream() as stream:
        await stream.infer(ARRAYS, 0, frames=2)
        await stream.infer(ARRAYS, 1)
        await stream.done()
        events = [event async for event in stream]
    assert [type(event) for event in events] == [TickResult, FramePrediction, TickResult]
    assert [event.seq for event in events] == [1, 1, 2]


async def test_the_canary_stays_exact_after_every_bad_input(client: AsyncClient) -> None:
    canary = await client.open("toy", seed=40)
    victim = await client.open("toy", keys=KEYS, seed=0)
    infer = client.channel.unary_unary("/omni_loop.v1.Loop/Infer")
    for count, case in enumerate(cases(), start=1):
        request = good_request(seq=1)
        request.session.CopyFrom(victim._book.ref)
        raw = case.spoil(request)
        status = await infer(request.SerializeToString() if raw is None else raw).code()
        assert status in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED), case.name
        assert first(await canary.infer(ARRAYS, 0)) == [40 + count, 0]
    assert first(await victim.infer(good_arrays(), 0)) == [1, 0]


async def test_a_crash_is_undone_and_says_nothing(client: AsyncClient) -> None:
    session = await client.open("toy", seed=0)
    assert first(await session.infer(ARRAYS, 12)) == [1, 120]
    with pytest.raises(StageFailed) as failure:
        await session.infer(ARRAYS, 13, executed=np.ones((1, 2), np.float32))
    assert SECRET not in failure.value.text
    assert first(await session.infer(ARRAYS, 14)) == [2, 140]


async def test_a_repeat_is_answered_from_one_computation(client: AsyncClient) -> None:
    session = await client.open("toy", seed=0)
    request = pb.InferRequest(session=session._book.ref, observation=session._book.infer(ARRAYS, 0))
    answers = await asyncio.gather(*(client.call("Infer", request, pb.TickReply) for _ in range(3)))
    assert answers[0].chunk == answers[1].chunk == answers[2].chunk
    assert first(await session.infer(ARRAYS, 1)) == [2, 10]


async def test_what_the_state_or_the_pipeline_refuses(client: AsyncClient) -> None:
    session = await client.open("toy")
    with pytest.raises(StateError, match="continues from an observation"):
        await session.predict(steps=1)
    with pytest.raises(InvalidInput, match="9"):
        await session.infer(ARRAYS, 0, frames=9)
    with pytest.raises(InvalidInput, match="Did you mean 'points'"):
        await client.open("toy", keys=("image", "agent_pos", "point"))
    await client.open("toy")
    await client.open("toy")
    with pytest.raises(Exhausted) as full:
        await client.open("toy")
    assert full.value.reason is Reason.TOO_MANY_SESSIONS


async def test_a_pipeline_without_prompt_refuses_one(client: AsyncClient) -> None:
    silent = replace(TOY, name="silent", spec=lambda: replace(SPEC, pipeline="silent", prompt=False))
    with registry.registered(registry.PIPELINES, "silent", silent):
        server = Server(Deployment(pipelines=("silent",), listen=Listen(port=0)))
        await server.start()
        try:
            async with connect_async(server.address, timeout_s=20) as other:
                with pytest.raises(Unsupported, match="reads no prompt"):
                    await other.open("silent", prompt="push")
        finally:
            await server.stop(1.0)
