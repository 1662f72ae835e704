"""A stream that outlives its connections: every request answered once, and as if the stream had never been cut."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable

import numpy as np
import pytest

from omni_loop.client import (
    AsyncClient,
    AsyncSession,
    Draining,
    FramesLost,
    Refused,
    ResumingStream,
    Skipped,
    WasReset,
    WasRewound,
    connect_async,
)
from omni_loop.config import Deployment
from omni_loop.errors import Exhausted, Reason, ServerUnavailable, StateError
from omni_loop.serve.app import Server
from omni_loop.testing.bad_inputs import good_arrays
from omni_loop.testing.fault_proxy import FaultProxy
from omni_loop.testing.history import digest_of
from omni_loop.testing.toy_core import ToyCore
from omni_loop.types import FramePrediction, TickResult

ARRAYS = {name: good_arrays()[name] for name in ("image", "agent_pos")}


@pytest.fixture
async def proxy(server: Server) -> AsyncIterator[FaultProxy]:
    async with FaultProxy() as proxy:
        await proxy.start(server.address)
        yield proxy


@pytest.fixture
async def robot(proxy: FaultProxy) -> AsyncIterator[AsyncClient]:
    """A client whose network is the proxy."""
    async with connect_async(proxy.address, timeout_s=20) as robot:
        yield robot


async def rest(stream: ResumingStream) -> list:
    await stream.done()
    async with asyncio.timeout(20):
        return [event async for event in stream]


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not true():  # noqa: ASYNC110  no event of the server's says it
            await asyncio.sleep(0.001)


async def lost(server: Server) -> None:
    """Until the server has noticed that every stream is gone."""
    await until(lambda: not server.service.streams)


async def test_it_is_a_stream(robot: AsyncClient) -> None:
    session = await robot.open("toy", seed=2)
    async with session.resuming() as stream:
        for step in range(20):
            assert await stream.infer(ARRAYS, step) == step + 1
        events = await rest(stream)
    assert [event.seq for event in events] == list(range(1, 21))
    assert events[-1].chunk.actions[0, 0] == 2 + 20
    assert stream.attachments == 1


async def test_an_answer_lost_on_its_way_is_said_again(
    robot: AsyncClient, proxy: FaultProxy, server: Server, core: ToyCore
) -> None:
    session = await robot.open("toy", seed=4)
    async with session.resuming() as stream:
        core.gate.clear()
        await stream.infer(ARRAYS, 0)
        await core.entered.wait()
        proxy.cut()
        await lost(server)
        core.gate.set()
        (answer,) = await rest(stream)
        assert stream.attached is not None
        assert stream.attached.replayed + len(stream.attached.pending) == 1
    assert (answer.seq, answer.chunk.actions[0, 0], core.computed) == (1, 5, 1)
    assert stream.attachments == 2


async def test_a_request_lost_on_its_way_is_sent_again(robot: AsyncClient, proxy: FaultProxy, core: ToyCore) -> None:
    session = await robot.open("toy", seed=4)
    async with session.resuming() as stream:
        proxy.half_close("up")  # the server hears nothing more
        await stream.infer(ARRAYS, 0)
        proxy.cut()
        (answer,) = await rest(stream)
    assert (answer.seq, answer.chunk.actions[0, 0], core.computed) == (1, 5, 1)


async def test_what_is_under_way_is_answered_on_the_new_stream(
    robot: AsyncClient, proxy: FaultProxy, server: Server, core: ToyCore
) -> None:
    session = await robot.open("toy")
    async with session.resuming() as stream:
        core.gate.clear()
        for step in range(3):
            await stream.infer(ARRAYS, step)
        await core.entered.wait()
        reading = asyncio.create_task(anext(aiter(stream)))
        proxy.cut()
        await until(lambda: stream.attachments == 2)
        core.gate.set()
        events = [await reading, *await rest(stream)]
    assert [event.seq for event in events] == [1, 2, 3]
    assert core.computed == 3


async def test_frames_besides_a_chunk_come_once(robot: AsyncClient, proxy: FaultProxy, core: ToyCore) -> None:
    session = await robot.open("toy")
    async with session.resuming() as stream:
        events = []
        for step in range(30):
            await stream.infer(ARRAYS, step, frames=2)
            if step % 3 == 0:
                proxy.cut_after(random.Random(step).randrange(2000))
        events = await rest(stream)
    answers = [event.seq for event in events if isinstance(event, TickResult)]
    frames = [event.seq for event in events if isinstance(event, FramePrediction)]
    assert answers == frames == list(range(1, 31))
    assert core.computed == 30


async def test_a_prediction_that_nobody_waits_for_ends_and_may_be_asked_again(
    robot: AsyncClient, proxy: FaultProxy, server: Server, core: ToyCore
) -> None:
    session = await robot.open("toy")
    async with session.resuming() as stream:
        core.gate.clear()
        await stream.predict(np.ones((2, 2), np.float32))
        await core.entered.wait()
        proxy.cut()
        await lost(server)
        core.gate.set()
        assert core.computed == 0
        (answer,) = await rest(stream)
    assert answer.frames.frames.shape[0] == 2
    assert core.computed == 1


async def test_a_reset_whose_answer_was_lost_is_not_done_twice(
    robot: AsyncClient, proxy: FaultProxy, server: Server, core: ToyCore
) -> None:
    session = await robot.open("toy", seed=4)
    async with session.resuming() as stream:
        await stream.infer(ARRAYS, 0)
        events = aiter(stream)
        assert isinstance(await anext(events), TickResult)
        proxy.cut_after(0, "down")  # with the first byte of an answer
        await stream.reset()
        await stream.infer(ARRAYS, 0)
        reset, answer = await rest(stream)
    assert reset == WasReset(2)
    assert (answer.seq, answer.epoch, answer.chunk.actions[0, 0]) == (2, 2, 5)


async def test_a_reset_that_waits_its_turn_is_not_done_twice(
    robot: AsyncClient, proxy: FaultProxy, server: Server, core: ToyCore
) -> None:
    session = await robot.open("toy", seed=4)
    async with session.resuming() as stream:
        core.gate.clear()
        await stream.infer(ARRAYS, 0)
        await stream.reset()
        await stream.infer(ARRAYS, 0)
        (connection,) = server.service.streams
        await until(lambda: connection.unanswered == 3)
        proxy.cut()
        await lost(server)
        await stream.attach()
        core.gate.set()
        first, reset, answer = await rest(stream)
    assert (first.seq, first.epoch) == (1, 1)
    assert reset == WasReset(2)
    assert (answer.seq, answer.epoch, answer.chunk.actions[0, 0]) == (2, 2, 5)


async def test_a_rewind_that_never_came_is_sent_again(robot: AsyncClient, proxy: FaultProxy) -> None:
    session = await robot.open("toy", seed=4)
    async with session.resuming() as stream:
        for step in range(3):
            await stream.infer(ARRAYS, step)
        events = aiter(stream)
        for _ in range(3):
            await anext(events)
        proxy.half_close("up")
        await stream.rewind(1)
        await stream.infer(ARRAYS, 2)
        proxy.cut()
        rewound, answer = await rest(stream)
    assert rewound == WasRewound(2, 1)
    assert (answer.epoch, answer.chunk.actions[0, 0]) == (2, 4 + 3)


async def test_observations_that_no_server_has_seen_are_superseded(
    robot: AsyncClient, proxy: FaultProxy, server: Server, core: ToyCore
) -> None:
    session = await robot.open("toy")
    async with session.resuming() as stream:
        proxy.refuse()
        proxy.cut()
        await lost(server)
        reading = asyncio.create_task(anext(aiter(stream)))
        await asyncio.sleep(0.05)
        for step in range(4):
            await stream.infer(ARRAYS, step, supersede=True)
        proxy.heal()
        events = [await reading, *await rest(stream)]
    assert [event for event in events if isinstance(event, Skipped)] == [Skipped(n, "superseded") for n in (1, 2, 3)]
    assert [event.seq for event in events if isinstance(event, TickResult)] == [4]
    assert core.computed == 1


async def test_a_request_is_cancelled(robot: AsyncClient, proxy: FaultProxy, server: Server, core: ToyCore) -> None:
    session = await robot.open("toy", options={"hang_at": 1})
    async with session.resuming() as stream:
        await stream.infer(ARRAYS, 0)
        await core.entered.wait()
        await stream.cancel_request(1)
        events = aiter(stream)
        assert await anext(events) == Skipped(1, "cancelled")
        proxy.cut()
        await stream.infer(ARRAYS, 1)
        assert (await anext(events)).seq == 2
        await stream.cancel_request(2)  # answered already
        assert await rest(stream) == []


async def test_a_newer_stream_ends_it(robot: AsyncClient, server: Server) -> None:
    session = await robot.open("toy")
    async with session.resuming() as older:
        async with session.resuming() as newer:
            with pytest.raises(StateError) as fenced:
                await anext(aiter(older))
            assert fenced.value.reason is Reason.FENCED
            with pytest.raises(StateError):
                await older.infer(ARRAYS, 0)
            await newer.infer(ARRAYS, 0)
            (answer,) = await rest(newer)
        assert isinstance(answer, TickResult)


async def test_a_session_that_is_gone(robot: AsyncClient, proxy: FaultProxy, core: ToyCore) -> None:
    session = await robot.open("toy")
    async with session.resuming() as stream:
        await stream.infer(ARRAYS, 0)
        events = aiter(stream)
        await anext(events)
        core.live.clear()
        proxy.cut()
        with pytest.raises(StateError, match="up to seq 1") as gone:
            await anext(events)
    assert gone.value.reason is Reason.SESSION_LOST


async def test_it_gives_up(robot: AsyncClient, proxy: FaultProxy) -> None:
    session = await robot.open("toy")
    async with session.resuming(give_up_s=0.2) as stream:
        proxy.refuse()
        proxy.cut()
        with pytest.raises(ServerUnavailable):
            await anext(aiter(stream))


async def test_a_silent_network_is_taken_for_dead(robot: AsyncClient, proxy: FaultProxy, core: ToyCore) -> None:
    session = await robot.open("toy")
    async with session.resuming(stall_s=0.3) as stream:
        proxy.half_close("up")
        proxy.half_close("down")
        await stream.infer(ARRAYS, 0)
        (answer,) = await rest(stream)
    assert (answer.seq, core.computed) == (1, 1)


async def test_unanswered_requests_are_bounded(robot: AsyncClient, core: ToyCore) -> None:
    session = await robot.open("toy")
    async with session.resuming() as stream:
        core.gate.clear()
        for step in range(256):
            await stream.infer(ARRAYS, step)
        with pytest.raises(Exhausted, match="no answer yet"):
            await stream.infer(ARRAYS, 256)
        core.gate.set()
        assert len(await rest(stream)) == 256


async def test_errors_are_answers(robot: AsyncClient, proxy: FaultProxy) -> None:
    session = await robot.open("toy", options={"fail_at": 1, "late_at": 2, "frames_fail": 1})
    async with session.resuming() as stream:
        await stream.infer(ARRAYS, 0)
        await stream.infer(ARRAYS, 1)
        await stream.infer(ARRAYS, 2, frames=1)
        await stream.rewind(99)
        failed, late, answer, frames, refused = await rest(stream)
    assert (failed.seq, type(failed)) == (1, Refused)
    assert late == Skipped(2, "expired")
    assert isinstance(answer, TickResult)
    assert isinstance(frames, FramesLost)
    assert (refused.seq, type(refused)) == (0, Refused)


async def test_a_server_that_drains_and_comes_back(deployment: Deployment, core: ToyCore, proxy: FaultProxy) -> None:
    """The session outlives the server here because both have one core."""

    async def start(_: Deployment) -> ToyCore:
        return core

    first = Server(deployment, start)  # type: ignore[arg-type]
    proxy.target = await first.start()
    async with connect_async(proxy.address, timeout_s=20) as robot:
        session: AsyncSession = await robot.open("toy")
        async with session.resuming() as stream:
            events = aiter(stream)
            await stream.infer(ARRAYS, 0)
            assert isinstance(await anext(events), TickResult)
            stopping = asyncio.create_task(first.stop(5.0))
            assert isinstance(await anext(events), Draining)
            await stopping
            second = Server(deployment, start)  # type: ignore[arg-type]
            core.ready = True
            proxy.target = await second.start()
            await stream.infer(ARRAYS, 1)
            (answer,) = await rest(stream)
            assert (answer.seq, answer.chunk.actions[0, 0]) == (2, session.seed + 2)
    await second.stop()


@pytest.mark.parametrize("direction", ["up", "down"])
async def test_cut_anywhere_it_says_what_an_uncut_stream_says(
    robot: AsyncClient, proxy: FaultProxy, core: ToyCore, direction
) -> None:
    async def play(cut_at: int | None) -> list[bytes]:
        session = await robot.open("toy", seed=7)
        async with session.resuming() as stream:
            if cut_at is not None:
                proxy.cut_after(cut_at, direction)
            for step in range(4):
                await stream.infer(ARRAYS, step, frames=step % 2)
            events = await rest(stream)
        answers = [event for event in events if isinstance(event, TickResult)]
        assert [answer.seq for answer in answers] == [1, 2, 3, 4]
        assert [event.seq for event in events if isinstance(event, FramePrediction)] == [2, 4]
        return [digest_of(answer) for answer in answers]

    uncut = await play(None)
    draw = random.Random(0)
    for _ in range(25):
        assert await play(draw.randrange(3000)) == uncut
        proxy.heal()
    assert core.computed == 26 * 4
