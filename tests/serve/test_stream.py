"""The bidirectional stream: each seq answered exactly once, whatever happens."""

import asyncio

import numpy as np
import pytest

from omni_loop.client import AsyncClient, AsyncSession, Draining, FramesLost, Refused, SessionStream, Skipped, WasReset
from omni_loop.errors import Code, DeadlineExceeded, InvalidInput, Reason, StageFailed, StateError, UnknownSession
from omni_loop.serve.app import Server
from omni_loop.testing.bad_inputs import KEYS, cases, good_arrays, good_request
from omni_loop.testing.toy_core import SECRET, ToyCore
from omni_loop.types import FramePrediction, TickResult
from omni_loop.wire import loop_pb2 as pb

ARRAYS = {name: good_arrays()[name] for name in ("image", "agent_pos")}


async def rest(stream: SessionStream) -> list:
    await stream.done()
    return [event async for event in stream]


async def test_ticks_are_answered_in_order(client: AsyncClient, core: ToyCore) -> None:
    session = await client.open("toy", seed=2)
    async with session.stream() as stream:
        for step in range(20):
            assert await stream.infer(ARRAYS, step) == step + 1
        events = await rest(stream)
    assert [event.seq for event in events] == list(range(1, 21))
    assert all(isinstance(event, TickResult) for event in events)
    assert events[-1].chunk.actions[0, 0] == 2 + 20
    assert core.computed == 20


async def test_every_kind_of_request(client: AsyncClient, core: ToyCore) -> None:
    session = await client.open("toy")
    async with session.stream() as stream:
        await stream.infer(ARRAYS, 0)
        await stream.predict(np.ones((2, 2), np.float32))
        await stream.predict(steps=3)
        await stream.recondition({name: array[None] for name, array in ARRAYS.items()}, first_step=1)
        await stream.reset(seed=8)
        await stream.infer(ARRAYS, 0)
        events = await rest(stream)
    assert [type(event) for event in events] == [TickResult] * 4 + [WasReset, TickResult]
    assert events[1].frames.frames.shape[0] == 2
    assert events[2].frames.frames.shape[0] == 3
    assert (events[4].epoch, events[5].epoch, session.epoch) == (2, 2, 2)
    assert events[5].chunk.actions[0, 0] == 9


async def test_frames_follow_the_answer(client: AsyncClient) -> None:
    session = await client.open("toy")
    async with session.stream() as stream:
        seq = await stream.infer(ARRAYS, 0, frames=2)
        answer, frames = await rest(stream)
    assert isinstance(answer, TickResult)
    assert answer.frames is None
    assert isinstance(frames, FramePrediction)
    assert (answer.seq, frames.seq, frames.frames.shape[0]) == (seq, seq, 2)


async def test_frames_that_fail_leave_the_answer(client: AsyncClient) -> None:
    session = await client.open("toy", options={"frames_fail": 1})
    async with session.stream() as stream:
        seq = await stream.infer(ARRAYS, 0, frames=2)
        answer, lost = await rest(stream)
    assert isinstance(answer, TickResult)
    assert answer.chunk is not None
    assert isinstance(lost, FramesLost)
    assert (lost.seq, type(lost.error)) == (seq, StageFailed)


async def test_errors_do_not_end_the_stream(client: AsyncClient) -> None:
    session = await client.open("toy", options={"crash_at": 1, "fail_at": 2, "late_at": 3})
    async with session.stream() as stream:
        for step in range(4):
            await stream.infer(ARRAYS, step)
        crashed, failed, late, fine = await rest(stream)
    assert (failed.seq, failed.error.text) == (2, "stage 'act' failed")
    assert isinstance(crashed, Refused)
    assert (crashed.seq, crashed.error.code, crashed.error.epoch) == (1, Code.INTERNAL, 1)
    assert SECRET not in crashed.error.text
    assert late == Skipped(3, "expired")
    assert isinstance(fine, TickResult)


async def test_every_bad_input_is_answered_and_the_next_is_served(client: AsyncClient, server: Server) -> None:
    session = await client.open("toy", keys=KEYS)
    refused = 0
    async with session.stream() as stream:
        events = aiter(stream)
        for case in cases():
            request = good_request(seq=10_000)
            if case.spoil(request) is None and request.ByteSize() < 1 << 20:
                await stream._send(pb.ClientMessage(observation=request.observation))
                event = await anext(events)
                assert isinstance(event, Refused), case.name
                assert isinstance(event.error, InvalidInput), case.name
                assert event.seq == request.observation.seq
                refused += 1
        await stream.infer(good_arrays(), 0)
        assert isinstance(await anext(events), TickResult)
    assert refused >= 60


async def test_messages_without_a_meaning(client: AsyncClient) -> None:
    session = await client.open("toy")
    async with session.stream() as stream:
        await stream._send(pb.ClientMessage())
        await stream._send(pb.ClientMessage(attach=pb.Attach(session=session._book.ref)))
        await stream.infer(ARRAYS, 0)
        empty, twice, fine = await rest(stream)
    assert "must hold an observation" in empty.error.text
    assert "attached already" in twice.error.text
    assert isinstance(fine, TickResult)


async def raw_stream(client: AsyncClient, *messages: bytes) -> list[pb.ServerMessage]:
    call = client.channel.stream_stream(
        "/omni_loop.v1.Loop/Stream", response_deserializer=pb.ServerMessage.FromString
    )()
    for message in messages:
        await call.write(message)
    await call.done_writing()
    return [message async for message in call]


async def test_bytes_that_are_no_message(client: AsyncClient) -> None:
    session = await client.open("toy")
    attach = pb.ClientMessage(attach=pb.Attach(session=session._book.ref)).SerializeToString()
    attached, refusal = await raw_stream(client, attach, b"\xff" * 9)
    assert attached.WhichOneof("kind") == "attached"
    assert (refusal.error.seq, refusal.error.reason) == (0, Reason.BAD_REQUEST)


async def test_attach_comes_first(client: AsyncClient, session_stream_without_attach) -> None:
    with pytest.raises(InvalidInput, match="must be attach"):
        await session_stream_without_attach(pb.ClientMessage(observation=pb.Observation(seq=1)))
    with pytest.raises(InvalidInput, match="must be attach"):
        await session_stream_without_attach(None)


@pytest.fixture
def session_stream_without_attach(client: AsyncClient):
    async def run(message: pb.ClientMessage | None) -> None:
        session = await client.open("toy")
        stream = SessionStream(client.channel, client.address, session._book)
        if message is not None:
            await stream._send(message)
        await stream.done()
        async for event in stream:
            raise AssertionError(event)

    return run


async def test_attach_needs_the_token(client: AsyncClient) -> None:
    session = await client.open("toy")
    session._book.ref.resume_token = "guess"
    with pytest.raises(UnknownSession):
        async with session.stream():
            raise AssertionError


async def test_a_seq_sent_again_while_it_runs(client: AsyncClient, core: ToyCore) -> None:
    session = await client.open("toy")
    async with session.stream() as stream:
        core.gate.clear()
        await stream.infer(ARRAYS, 0)
        await core.entered.wait()
        session._book.seq = 0
        await stream.infer(ARRAYS, 0)
        events = aiter(stream)
        assert await anext(events) == Skipped(1, "duplicate_in_flight")
        core.gate.set()
        assert isinstance(await anext(events), TickResult)
    assert core.computed == 1


async def test_a_stream_cut_in_a_tick_resumes_with_the_same_answer(client: AsyncClient, core: ToyCore) -> None:
    session = await client.open("toy", seed=4)
    async with session.stream() as stream:
        core.gate.clear()
        await stream.infer(ARRAYS, 0)
        await core.entered.wait()
    core.gate.set()
    session._book.seq = 0
    async with session.stream() as stream:
        await stream.infer(ARRAYS, 0)
        (answer,) = await rest(stream)
    assert core.computed == 1
    assert (answer.seq, answer.chunk.actions[0, 0]) == (1, 5)


async def test_attached_says_what_was_answered(client: AsyncClient) -> None:
    session = await client.open("toy")
    await session.infer(ARRAYS, 0)
    async with session.stream() as stream:
        assert stream.last_seq == 1


async def test_a_newer_stream_fences_the_older(client: AsyncClient) -> None:
    session: AsyncSession = await client.open("toy")
    async with session.stream() as older, session.stream() as newer:
        with pytest.raises(StateError) as fenced:
            await anext(aiter(older))
        assert (fenced.value.code, fenced.value.epoch) == (Code.ABORTED, 1)
        await newer.infer(ARRAYS, 0)
        (answer,) = await rest(newer)
        assert isinstance(answer, TickResult)


async def test_a_session_closed_under_its_stream(client: AsyncClient) -> None:
    session = await client.open("toy")
    async with session.stream() as stream:
        await session.close()
        await stream.infer(ARRAYS, 0)
        (refused,) = await rest(stream)
    assert isinstance(refused.error, UnknownSession)


async def test_who_does_not_read_is_not_read_from(client: AsyncClient, server: Server, core: ToyCore) -> None:
    session = await client.open("toy")
    async with session.stream() as stream:
        core.gate.clear()
        for step in range(12):
            await stream.infer(ARRAYS, step)
        await core.entered.wait()
        for _ in range(50):
            await asyncio.sleep(0)
        (connection,) = server.service.streams
        assert len(connection._running) <= 4
        core.gate.set()
        assert len(await rest(stream)) == 12


async def test_draining_answers_what_runs_and_says_so(client: AsyncClient, server: Server, core: ToyCore) -> None:
    session = await client.open("toy")
    async with session.stream() as stream:
        core.gate.clear()
        await stream.infer(ARRAYS, 0)
        await core.entered.wait()
        stopping = asyncio.create_task(server.stop(5.0))
        events = aiter(stream)
        assert isinstance(await anext(events), Draining)
        core.gate.set()
        assert isinstance(await anext(events), TickResult)
        with pytest.raises(StopAsyncIteration):
            await anext(events)
        await stopping


async def test_what_a_fenced_stream_sends_is_never_computed(client: AsyncClient, server: Server, core: ToyCore) -> None:
    session = await client.open("toy")
    async with session.stream() as older:
        (connection,) = server.service.streams
        await older.infer(ARRAYS, 0)
        assert (await anext(aiter(older))).seq == 1
        connection.fence()
        for step in range(1, 5):
            await older.infer(ARRAYS, step)
        with pytest.raises(StateError) as fenced:
            await anext(aiter(older))
        assert fenced.value.reason is Reason.FENCED
    await connection.gone.wait()
    assert core.computed == 1
    assert len(core.live[session.id].flights) == 0


async def test_a_cancel_is_heard_while_all_places_are_taken(client: AsyncClient, core: ToyCore) -> None:
    session = await client.open("toy", options={"hang_at": 1})
    async with session.stream() as stream:
        for step in range(4):
            await stream.infer(ARRAYS, step)
        await core.entered.wait()
        await stream.cancel_request(1)
        first, *others = await rest(stream)
    assert first == Skipped(1, "cancelled")
    assert [event.seq for event in others] == [2, 3, 4]


async def test_a_newer_observation_supersedes_those_that_wait(client: AsyncClient, core: ToyCore) -> None:
    session = await client.open("toy")
    async with session.stream() as stream:
        core.gate.clear()
        for step in range(3):
            await stream.infer(ARRAYS, step)
        await core.entered.wait()
        await stream.infer(ARRAYS, 3, supersede=True)
        events = aiter(stream)
        skipped = [await anext(events), await anext(events)]
        core.gate.set()
        answered = [event.seq for event in await rest(stream)]
    assert skipped == [Skipped(2, "superseded"), Skipped(3, "superseded")]
    assert answered == [1, 4]


async def test_answers_come_again_byte_for_byte(client: AsyncClient, core: ToyCore) -> None:
    session = await client.open("toy")

    async def stream_of(*messages: pb.ClientMessage) -> list[bytes]:
        call = client.channel.stream_stream("/omni_loop.v1.Loop/Stream")()
        for message in messages:
            await call.write(message.SerializeToString())
        await call.done_writing()
        return [message async for message in call]

    attach = pb.ClientMessage(attach=pb.Attach(session=session._book.ref))
    asked = [pb.ClientMessage(observation=session._book.infer(ARRAYS, step, frames=step)) for step in range(3)]
    _, *said = await stream_of(attach, *asked)
    attach.attach.last_received_seq = 0
    first, *again = await stream_of(attach)
    attached = pb.ServerMessage.FromString(first).attached
    assert (attached.attachment, attached.accepted, attached.replayed, attached.forgotten) == (2, 3, 3, 0)
    assert again == said
    assert core.computed == 3
    attach.attach.last_received_seq = 2
    assert (await stream_of(attach))[1:] == said[-2:]


async def test_a_stream_that_never_attaches_ends(
    client: AsyncClient, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("omni_loop.serve.stream.ATTACH_S", 0.05)
    session = await client.open("toy")
    silent = SessionStream(client.channel, client.address, session._book)
    with pytest.raises(DeadlineExceeded, match="attach"):
        await anext(aiter(silent))


async def test_a_lost_stream_is_told_to_the_core(client: AsyncClient, server: Server, core: ToyCore) -> None:
    session = await client.open("toy")
    async with session.stream():
        (connection,) = server.service.streams
    await connection.gone.wait()
    assert core.detached == [(session.id, 1)]
