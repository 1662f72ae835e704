"""Frames that are shown while they are made, over gRPC: to a callback of either client, and on a stream."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest

from omni_loop import registry
from omni_loop.client import AsyncClient, AsyncSession, Refused, connect, connect_async
from omni_loop.config import Deployment, Listen, RunnerConfig
from omni_loop.errors import StageFailed
from omni_loop.loop.pipeline import CLIENT, Edge, Pipeline, Plan, StageDef
from omni_loop.messages import PayloadKind
from omni_loop.serve.app import Server
from omni_loop.stage import CounterSpec, Outputs, Payload, StageItem, StateSpec, in_steps, one_by_one
from omni_loop.types import ArraySpec, FramePrediction, Op, SessionSpec, StageKind, TickResult
from omni_loop.wire import codec
from omni_loop.wire import loop_pb2 as pb

SPEC = SessionSpec(
    pipeline="film",
    observations=(ArraySpec("mark", "float32", (1,)),),
    action=ArraySpec("action", "float32", (1,), low=-1000, high=1000),
    horizon=4,
    execution_horizon=2,
    control_hz=10,
    ops=(Op.INFER, Op.PREDICT),
    frame=ArraySpec("frame", "uint8", (2, 2, 3)),
    max_predict=8,
)
FILM = Pipeline(
    name="film",
    spec=lambda: SPEC,
    stages=(
        StageDef("act", StageKind.ACT, "film_act"),
        StageDef("draw", StageKind.FRAMES, "film_draw"),
        StageDef("develop", StageKind.DECODE, "film_develop"),
    ),
    edges=(
        Edge(CLIENT, "observation", "act", "observation", PayloadKind.OBSERVATION),
        Edge(CLIENT, "actions", "draw", "actions", PayloadKind.ACTIONS, optional=True),
        Edge("draw", "latents", "develop", "latents", PayloadKind.LATENTS, streams=True),
    ),
    plans={
        Op.INFER: Plan(("act",), ("draw", "develop"), chunk="act.actions", frames="develop.frames"),
        Op.PREDICT: Plan(("draw", "develop"), frames="develop.frames"),
    },
)
N = 4
FAIL = 666.0  # an action that ends the drawing after two frames


@dataclass
class Job:
    item: StageItem
    frames: int
    values: list[float]
    passed: int = 0
    told: int = 0

    @property
    def finished(self) -> bool:
        return self.passed == self.frames


class Draw:
    """A frame a pass, at the pace of whoever looks: none is drawn before the one before has been developed."""

    kind, revision = StageKind.FRAMES, "film-1"
    paced = threading.Semaphore(0)
    seen = threading.Semaphore(0)  # parts of a tick that is to fail, by its client

    def state_specs(self) -> Mapping[str, StateSpec]:
        return {"count": CounterSpec()}

    def run(self, items: Sequence[StageItem]) -> Sequence[Outputs | Exception]:
        return in_steps(self, items)

    def begin(self, item: StageItem) -> Job:
        while Draw.paced.acquire(blocking=False):  # of the whole before
            pass
        count, n = item.state.counter("count"), int(item.params["frames"])
        count.set(count.get() + 1)
        given = item.inputs["actions"].arrays["actions"].ravel() if "actions" in item.inputs else np.zeros(n)
        return Job(item, n, [float(v) + count.get() for v in given])

    def advance(self, jobs: Sequence[Job]) -> Sequence[Exception | None]:
        for job in jobs:
            if job.told:  # somebody looks
                assert Draw.paced.acquire(timeout=30)
                assert max(job.values) <= FAIL or Draw.seen.acquire(timeout=30)
            job.passed += 1
        return [ArithmeticError() if job.passed == 3 and max(job.values) > FAIL else None for job in jobs]

    def parts(self, job: Job) -> Sequence[Outputs]:
        first, job.told = job.told, job.passed
        return [self._latents(job.values[i : i + 1], job.item.step + 1 + i, i == 0) for i in range(first, job.told)]

    def finish(self, job: Job) -> Outputs:
        return self._latents(job.values, job.item.step + 1, False)

    def _latents(self, values: list[float], first: int, preview: bool) -> Outputs:
        latents = np.array(values, np.float32)[:, None] % 251
        meta = {"first_step": first, "preview": preview}
        return {"latents": Payload(PayloadKind.LATENTS, {"latents": latents}, meta)}

    def warm_up(self) -> None:
        pass


class Develop:
    kind, revision = StageKind.DECODE, "film-1"

    def state_specs(self) -> Mapping[str, StateSpec]:
        return {}

    def run(self, items: Sequence[StageItem]) -> Sequence[Outputs | Exception]:
        return one_by_one(self._one, items)

    def _one(self, item: StageItem) -> Outputs:
        payload = item.inputs["latents"]
        latents = np.asarray(payload.arrays["latents"])
        frames = np.broadcast_to(latents[:, :, None, None], (len(latents), 2, 2, 3)).astype(np.uint8)
        Draw.paced.release()
        return {"frames": Payload(PayloadKind.FRAMES, {"frames": frames}, payload.meta)}

    def warm_up(self) -> None:
        pass


class Act(Develop):
    kind = StageKind.ACT

    def _one(self, item: StageItem) -> Outputs:
        return {"actions": Payload(PayloadKind.ACTIONS, {"actions": np.zeros((4, 1), np.float32)})}


@pytest.fixture
async def address() -> AsyncIterator[str]:
    Draw.paced, Draw.seen = threading.Semaphore(0), threading.Semaphore(0)
    runners = (RunnerConfig(name="main"), RunnerConfig(name="apart", stages=("film/develop",)))
    with (
        registry.registered(registry.PIPELINES, "film", FILM),
        registry.registered(registry.STAGES, "film_act", Act),
        registry.registered(registry.STAGES, "film_draw", Draw),
        registry.registered(registry.STAGES, "film_develop", Develop),
    ):
        server = Server(Deployment(pipelines=("film",), runners=runners, listen=Listen(port=0)))
        yield await server.start()
        await server.stop(1.0)


@pytest.fixture
async def client(address: str) -> AsyncIterator[AsyncClient]:
    async with connect_async(address, timeout_s=30) as client:
        yield client


async def opened(client: AsyncClient) -> AsyncSession:
    session = await client.open("film", seed=1)
    await session.infer({"mark": [0.0]}, 0)
    return session


def actions(value: float = 1.0) -> np.ndarray:
    return np.full((N, 1), value, np.float32)


def check(parts: list[FramePrediction], whole: FramePrediction | None) -> None:
    assert whole is not None
    assert (whole.part, whole.preview, len(whole.frames)) == (0, False, N)
    assert [part.part for part in parts] == list(range(1, N))
    assert [part.preview for part in parts] == [True, False, False]
    assert [part.first_step for part in parts] == [whole.first_step + i for i in range(N - 1)]
    for i, part in enumerate(parts):
        np.testing.assert_array_equal(part.frames[0], whole.frames[i])


async def test_a_callback_hears_of_parts_and_the_answer_is_that_of_a_plain_call(client: AsyncClient) -> None:
    watched, plain = await opened(client), await opened(client)
    parts: list[FramePrediction] = []
    a = await watched.predict(actions(), on_part=parts.append)
    b = await plain.predict(actions())
    check(parts, a.frames)
    assert b.frames is not None
    np.testing.assert_array_equal(a.frames.frames, b.frames.frames)  # type: ignore[union-attr]
    assert replace(a, frames=None, timings=b.timings) == replace(b, frames=None)
    assert (await watched.predict(actions())).seq == 3


async def test_a_blocking_client_hears_of_them_too(address: str) -> None:
    parts: list[FramePrediction] = []

    def call() -> TickResult:
        with connect(address, timeout_s=30) as client, client.open("film", seed=1) as session:
            session.infer({"mark": [0.0]}, 0)
            return session.predict(actions(), on_part=parts.append)

    whole = await asyncio.to_thread(call)
    check(parts, whole.frames)


async def test_frames_besides_a_chunk_are_shown_after_it(client: AsyncClient) -> None:
    session, parts = await client.open("film", seed=1), list[FramePrediction]()
    whole = await session.infer({"mark": [0.0]}, 0, frames=N, on_part=parts.append)
    check(parts, whole.frames)
    assert whole.chunk is not None


async def test_a_stream_shows_them_between_request_and_answer(client: AsyncClient) -> None:
    session = await client.open("film", seed=1)
    async with session.stream() as stream:
        await stream.infer({"mark": [0.0]}, 0, frames=N, previews=True)
        await stream.predict(actions(), previews=True)
        await stream.predict(actions())
        await stream.done()
        events = [event async for event in stream]
    first = [e for e in events if e.seq == 1]  # type: ignore[union-attr]
    assert isinstance(first[0], TickResult)
    check([e for e in first[1:-1] if isinstance(e, FramePrediction)], first[-1])  # type: ignore[arg-type]
    second = [e for e in events if e.seq == 2]  # type: ignore[union-attr]
    assert isinstance(second[-1], TickResult)
    check([e for e in second[:-1] if isinstance(e, FramePrediction)], second[-1].frames)
    assert [type(e) for e in events if e.seq == 3] == [TickResult]  # type: ignore[union-attr]


async def test_parts_of_a_tick_that_fails_are_followed_by_its_error(client: AsyncClient) -> None:
    """Parts that come before the failure: it waits for them (others may be left out). None comes after it."""
    session, parts = await opened(client), list[FramePrediction]()

    def seen(part: FramePrediction) -> None:
        parts.append(part)
        Draw.seen.release()

    with pytest.raises(StageFailed):
        await session.predict(actions(FAIL), on_part=seen)
    assert [part.part for part in parts] == [1, 2]
    events = []
    async with session.stream() as stream:
        failing = await stream.predict(actions(FAIL), previews=True)
        good = await stream.predict(actions(), previews=True)
        await stream.done()
        async for event in stream:
            events.append(event)
            if isinstance(event, FramePrediction) and event.seq == failing:
                Draw.seen.release()
    kinds = [(type(e), e.seq) for e in events]  # type: ignore[union-attr]
    assert kinds[:3] == [(FramePrediction, failing), (FramePrediction, failing), (Refused, failing)]
    assert {seq for _, seq in kinds[3:]} == {good}
    last = events[-1]
    assert isinstance(last, TickResult)
    assert last.frames is not None
    assert last.frames.frames[0, 0, 0, 0] == 2  # the first commit: nothing of the failed ones counts


async def test_what_a_callback_raises_ends_the_call_and_the_session_goes_on(client: AsyncClient) -> None:
    session = await opened(client)

    def stop(part: FramePrediction) -> None:
        raise KeyError(part.part)

    with pytest.raises(KeyError):
        await session.predict(actions(), on_part=stop)
    assert (await session.predict(actions())).seq == 3


def test_a_part_is_the_same_behind_the_wire() -> None:
    part = FramePrediction(3, 4, np.zeros((1, 2, 2, 3), np.uint8), 5, None, True, 7)
    back = codec.decode_frames(codec.encode_frames(part), SPEC, codec.Limits())
    assert (back.seq, back.first_step, back.epoch, back.preview, back.part) == (3, 4, 5, True, 7)
    assert pb.FramePrediction().part == 0
