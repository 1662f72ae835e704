"""Unary calls over a real connection, and what a server in front of robots must not get wrong."""

import asyncio
import logging
import re
from collections.abc import Callable
from typing import Any

import grpc
import numpy as np
import pytest

from omni_loop import errors
from omni_loop.client import AsyncClient, connect_async
from omni_loop.config import Deployment, Limits, Listen
from omni_loop.errors import Code, InvalidInput, OmniLoopError, Reason, StageFailed, StateError, UnknownSession
from omni_loop.serve.app import Server
from omni_loop.testing.bad_inputs import KEYS, cases, good_arrays, good_request
from omni_loop.testing.toy_core import SECRET, SPEC, ToyCore
from omni_loop.types import Op, TickResult
from omni_loop.wire import codec
from omni_loop.wire import loop_pb2 as pb

ARRAYS = {name: good_arrays()[name] for name in ("image", "agent_pos")}


def expected(seed: int, committed: int, seq: int) -> np.ndarray:
    return np.stack([np.full(4, seed + committed), 100 * seq + np.arange(4)], axis=1).astype(np.float32)


async def test_info_before_any_session(client: AsyncClient) -> None:
    info = await client.info()
    assert info.ready
    assert info.protocol == "omni_loop.v1"
    assert info.pipelines == {"toy": SPEC}
    assert info.limits.max_message_bytes == 1 << 20


async def test_an_episode(client: AsyncClient, core: ToyCore) -> None:
    async with await client.open("toy", prompt="push", seed=5, keys=KEYS) as session:
        assert session.spec == SPEC
        assert (session.seed, session.epoch, session.keys) == (5, 1, KEYS)
        result = await session.infer(good_arrays(), 0)
        assert result.chunk is not None
        np.testing.assert_array_equal(result.chunk.actions, expected(5, 1, 1))
        assert result.frames is None
        assert result.timings.stages_ms == {"act": 1.5}

        executed = np.ones((2, 2), np.float32)
        result = await session.infer(good_arrays(), 2, executed=executed, frames=3, deadline_ms=900.0)
        assert result.chunk is not None
        assert result.frames is not None
        assert result.frames.frames.shape == (3, 8, 8, 3)
        request = core.requests[-1]
        assert (request.op, request.seq, request.step, request.frames, request.deadline_ms) == (
            Op.INFER,
            2,
            2,
            3,
            900.0,
        )
        np.testing.assert_array_equal(request.executed, executed)
        for name, array in good_arrays().items():
            np.testing.assert_array_equal(request.arrays[name], array)

        actions = np.full((2, 2), 7, np.float32)
        assert (await session.predict(actions)).frames is not None
        np.testing.assert_array_equal(core.requests[-1].actions, actions)
        await session.predict(steps=4)
        assert (core.requests[-1].op, core.requests[-1].actions, core.requests[-1].steps) == (Op.PREDICT, None, 4)

        run = {name: np.stack([array] * 3) for name, array in good_arrays().items()}
        result = await session.recondition(run, executed=executed, first_step=4)
        assert result.chunk is None
        request = core.requests[-1]
        assert (request.op, request.step, request.seq) == (Op.RECONDITION, 4, 5)
        assert request.arrays["image"].shape == (3, 8, 8, 3)

        assert await session.reset(seed=9) == session.epoch == 2
        result = await session.infer(good_arrays(), 0)
        assert result.chunk is not None
        assert (result.epoch, result.chunk.actions[0, 0]) == (2, 10)
    assert not core.live


async def test_png_arrives_as_it_was(client: AsyncClient, core: ToyCore) -> None:
    session = await client.open("toy", image_encoding="png")
    await session.infer(ARRAYS, 0)
    np.testing.assert_array_equal(core.requests[-1].arrays["image"], ARRAYS["image"])


async def test_the_server_goes_on_after_every_bad_input(client: AsyncClient, server: Server, raw_call) -> None:
    canary = await client.open("toy", seed=40)
    victim = await client.open("toy", keys=KEYS)
    infer = raw_call("Infer")
    for count, case in enumerate(cases(), start=1):
        request = good_request(seq=count)
        request.session.CopyFrom(victim._book.ref)
        raw = case.spoil(request)
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await infer(request.SerializeToString() if raw is None else raw)
        trailers = dict(failure.value.trailing_metadata() or ())
        if codec.ERROR_KEY in trailers:  # a message over gRPC's own limit never reaches the service
            error = codec.decode_error(pb.Error.FromString(trailers[codec.ERROR_KEY]))
            assert isinstance(error, InvalidInput), case.name
            assert failure.value.code() is grpc.StatusCode.INVALID_ARGUMENT, case.name
        else:
            assert failure.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED, case.name
        result = await canary.infer(ARRAYS, count)
        assert result.chunk is not None
        np.testing.assert_array_equal(result.chunk.actions, expected(40, count, count))
    result = await victim.infer(good_arrays(), 0)
    assert result.chunk is not None
    np.testing.assert_array_equal(result.chunk.actions, expected(victim.seed, 1, 1))


async def test_unknown_methods_and_bytes_do_no_harm(client: AsyncClient, raw_call) -> None:
    rng = np.random.default_rng(7)
    names = ["GetServerInfo", "OpenSession", "Infer", "Predict", "Recondition", "Reset", "Close"]
    statuses = set()
    for i in range(200):
        call = raw_call(names[i % len(names)])(rng.bytes(int(rng.integers(0, 80))))
        statuses.add(await call.code())
    assert statuses <= {grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND}
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await raw_call("Explode")(b"")
    assert failure.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert (await client.info()).ready


async def test_a_stolen_id_looks_like_an_unknown_one(client: AsyncClient) -> None:
    session = await client.open("toy")
    request = pb.InferRequest(session=pb.SessionRef(session=session.id, resume_token="guess"))
    unknown = pb.InferRequest(session=pb.SessionRef(session="0" * 16, resume_token="guess"))
    texts = []
    for attempt in (request, unknown):
        with pytest.raises(UnknownSession) as refusal:
            await client.call("Infer", attempt, pb.TickReply)
        texts.append((refusal.value.text, refusal.value.epoch))
    assert texts[0] == texts[1]


async def test_a_failed_tick_leaves_the_session_usable(client: AsyncClient) -> None:
    session = await client.open("toy", seed=3, options={"fail_at": 2})
    await session.infer(ARRAYS, 0)
    with pytest.raises(StageFailed, match="stage 'act' failed") as failure:
        await session.infer(ARRAYS, 1)
    assert failure.value.epoch == 1
    result = await session.infer(ARRAYS, 1)
    assert result.chunk is not None
    np.testing.assert_array_equal(result.chunk.actions, expected(3, 2, 3))


async def test_nothing_of_a_crash_reaches_the_client(
    client: AsyncClient, raw_call, caplog: pytest.LogCaptureFixture
) -> None:
    session = await client.open("toy", options={"crash_at": 1})
    request = good_request()
    del request.observation.arrays["points"], request.observation.arrays["gripper"]
    request.session.CopyFrom(session._book.ref)
    with caplog.at_level(logging.ERROR), pytest.raises(grpc.aio.AioRpcError) as failure:
        await raw_call("Infer")(request.SerializeToString())
    seen = f"{failure.value.details()}{failure.value.trailing_metadata()}{failure.value.debug_error_string()}"
    for leak in (SECRET, "RuntimeError", "Traceback", ".py", session._book.ref.resume_token):
        assert leak not in seen
    assert failure.value.code() is grpc.StatusCode.INTERNAL
    assert SECRET in caplog.text  # the server's own log does say why


async def test_a_frames_failure_loses_the_frames_only(client: AsyncClient) -> None:
    session = await client.open("toy", options={"frames_fail": 1})
    result = await session.infer(ARRAYS, 0, frames=2)
    assert result.chunk is not None
    assert result.frames is None
    assert isinstance(result.frames_error, StageFailed)


async def test_a_late_tick(client: AsyncClient) -> None:
    session = await client.open("toy", options={"late_at": 1})
    with pytest.raises(OmniLoopError) as failure:
        await session.infer(ARRAYS, 0, deadline_ms=1.0)
    assert (failure.value.code, failure.value.reason) == (Code.DEADLINE_EXCEEDED, Reason.EXPIRED)


async def test_a_socket_lost_in_a_tick_loses_nothing(client: AsyncClient, core: ToyCore) -> None:
    session = await client.open("toy", seed=1)
    core.gate.clear()
    observation = session._book.infer(ARRAYS, 0)
    request = pb.InferRequest(session=session._book.ref, observation=observation)
    lost = asyncio.create_task(client.call("Infer", request, pb.TickReply))
    await core.entered.wait()
    lost.cancel()
    await asyncio.gather(lost, return_exceptions=True)
    core.gate.set()
    first = await client.call("Infer", request, pb.TickReply)
    again = await client.call("Infer", request, pb.TickReply)
    assert first == again
    assert core.computed == 1
    result = session._book.read(first)
    assert result.chunk is not None
    np.testing.assert_array_equal(result.chunk.actions, expected(1, 1, 1))


async def test_a_stale_seq(client: AsyncClient) -> None:
    session = await client.open("toy")
    for step in range(9):  # one more than answers are kept
        await session.infer(ARRAYS, step)
    session._book.seq = 0
    with pytest.raises(StateError) as refusal:
        await session.infer(ARRAYS, 0)
    assert refusal.value.reason is Reason.STALE_SEQ


async def test_many_sessions_are_not_mixed_up(client: AsyncClient) -> None:
    sessions = [await client.open("toy", seed=1000 * i) for i in range(8)]

    async def drive(index: int) -> None:
        for tick in range(1, 6):
            result: TickResult = await sessions[index].infer(ARRAYS, tick)
            assert result.chunk is not None
            np.testing.assert_array_equal(result.chunk.actions, expected(1000 * index, tick, tick))

    await asyncio.gather(*(drive(i) for i in range(8)))


async def test_a_waiting_tick_does_not_hold_up_anybody(client: AsyncClient, core: ToyCore) -> None:
    session = await client.open("toy")
    core.gate.clear()
    waiting = asyncio.create_task(session.infer(ARRAYS, 0))
    await core.entered.wait()
    assert (await client.info()).ready
    assert not waiting.done()
    core.gate.set()
    assert (await waiting).chunk is not None


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"pipeline": "toi"}, errors.UnknownName, "Did you mean 'toy'?"),
        ({"pipeline": ""}, errors.UnknownName, "Known: toy"),
        ({"pipeline": "../toy"}, errors.UnknownName, "toy"),
        ({"prompt": "x" * 5000}, InvalidInput, "5000 bytes"),
        ({"prompt": "\0"}, InvalidInput, "NUL"),
        ({"spec_digest": "0" * 64}, InvalidInput, "another spec"),
        ({"keys": tuple(f"k{i}" for i in range(100))}, InvalidInput, "100 arrays"),
        ({"options": {f"o{i}": 1 for i in range(100)}}, InvalidInput, "100 arrays"),
        ({"keys": "image"}, InvalidInput, "a sequence"),
        ({"seed": -1}, InvalidInput, "seed is -1"),
        ({"seed": 1.5}, InvalidInput, "whole number"),
    ],
)
async def test_a_bad_open(client: AsyncClient, core: ToyCore, arguments, error, says: str) -> None:
    with pytest.raises(error, match=re.escape(says)):
        await client.open(**{"pipeline": "toy", **arguments})
    assert not core.live


async def test_a_good_digest_opens(client: AsyncClient) -> None:
    assert (await client.open("toy", spec_digest=SPEC.digest)).spec == SPEC


async def test_a_bad_prompt_at_reset(client: AsyncClient) -> None:
    session = await client.open("toy")
    with pytest.raises(InvalidInput, match="5000 bytes"):
        await session.reset(prompt="x" * 5000)
    assert (await session.infer(ARRAYS, 0)).epoch == 1


async def test_closed_is_unknown(client: AsyncClient) -> None:
    session = await client.open("toy")
    await session.close()
    await session.close()
    with pytest.raises(UnknownSession):
        await session.infer(ARRAYS, 0)


async def test_a_message_over_the_limit(client: AsyncClient) -> None:
    session = await client.open("toy")
    with pytest.raises(InvalidInput) as refusal:
        await session.recondition(
            {"image": np.zeros((6000, 8, 8, 3), np.uint8), "agent_pos": np.zeros((6000, 2, 2), np.float32)}
        )
    assert refusal.value.reason is Reason.TOO_LARGE
    assert (await session.infer(ARRAYS, 0)).chunk is not None


async def test_the_greatest_message_a_deployment_allows_can_be_served(core: ToyCore) -> None:
    greatest = Limits(max_message_bytes=(1 << 31) - 1, max_tensor_bytes=(1 << 31) - 1)

    async def start(_: Deployment) -> ToyCore:
        return core

    server = Server(Deployment(pipelines=("toy",), listen=Listen(port=0), limits=greatest), start)  # type: ignore[arg-type]
    await server.start()
    try:
        async with connect_async(server.address, timeout_s=20) as client:
            assert (await client.info()).limits.max_message_bytes == (1 << 31) - 1
    finally:
        await server.stop(1.0)


async def test_a_long_name_is_refused_and_not_repeated(raw_call: Callable[[str], Callable[..., Any]]) -> None:
    request = pb.OpenSessionRequest(pipeline="p" * 900_000)
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await raw_call("OpenSession")(request.SerializeToString())
    assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert len(refusal.value.details() or "") < 200
