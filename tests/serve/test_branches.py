"""Forks, rewinds, snapshots, plans and lists over a real connection; the toy's chunks tell on every mix-up."""

import asyncio

import grpc
import numpy as np
import pytest

from omni_loop.client import AsyncClient, AsyncSession, Refused, SessionSummary, WasRewound
from omni_loop.errors import Exhausted, InvalidInput, Reason, ServerUnavailable, StateError, UnknownName, UnknownSession
from omni_loop.serve.app import Server
from omni_loop.testing.bad_inputs import BAD_SNAPSHOT_NAMES, good_arrays, good_plan, plan_cases
from omni_loop.testing.toy_core import SPEC, ToyCore
from omni_loop.types import Op, PlanSummary, TickResult
from omni_loop.wire import codec
from omni_loop.wire import loop_pb2 as pb

ARRAYS = {name: good_arrays()[name] for name in ("image", "agent_pos")}


def first(result: TickResult) -> tuple[float, float]:
    """(seed + ticks committed, 100 * seq)."""
    assert result.chunk is not None
    a, b = result.chunk.actions[0]
    return float(a), float(b)


async def ran(client: AsyncClient, steps: int, **options: int) -> AsyncSession:
    session = await client.open("toy", seed=10, options=options)
    for step in range(steps):
        await session.infer(ARRAYS, step)
    return session


async def test_a_child_goes_on_where_its_parent_stands(client: AsyncClient) -> None:
    parent = await ran(client, 3)
    child = await parent.fork()
    assert child.id != parent.id
    assert (child.epoch, child.seed, child.keys, child.spec) == (parent.epoch, 10, parent.keys, SPEC)
    assert child.start_step == 2
    assert first(await child.infer(ARRAYS, 3)) == (14, 400)
    assert first(await parent.infer(ARRAYS, 3)) == (14, 400)  # the same seq in each
    await child.close()
    assert first(await parent.infer(ARRAYS, 4)) == (15, 500)


async def test_a_child_of_another_seed_and_a_grandchild(client: AsyncClient) -> None:
    child = await (await ran(client, 2)).fork(seed=50)
    grandchild = await child.fork()
    assert (child.seed, grandchild.seed) == (50, 50)
    assert first(await grandchild.infer(ARRAYS, 2)) == (53, 300)


async def test_a_child_uses_no_seq_of_a_failed_tick(client: AsyncClient) -> None:
    parent = await client.open("toy", seed=10, options={"fail_at": 2})
    await parent.infer(ARRAYS, 0)
    with pytest.raises(Exception, match="failed"):
        await parent.infer(ARRAYS, 1)
    child = await parent.fork()
    assert first(await child.infer(ARRAYS, 1)) == (12, 300)


async def test_a_child_sends_images_as_its_parent_does(client: AsyncClient) -> None:
    parent = await client.open("toy", image_encoding="png")
    assert (await parent.fork())._book.image_encoding == "png"


async def test_forking_needs_the_token(client: AsyncClient) -> None:
    session = await ran(client, 1)
    session._book.ref.resume_token = "guess"
    for call in (session.fork(), session.rewind(0), session.snapshot("a"), session.plan()):
        with pytest.raises(UnknownSession):
            await call


async def test_a_rewind_begins_an_epoch_and_seqs_go_on(client: AsyncClient) -> None:
    session = await ran(client, 4)
    assert await session.rewind(1) == session.epoch == 2
    assert session.start_step == 1
    assert first(await session.infer(ARRAYS, 2)) == (13, 500)
    with pytest.raises(StateError, match=r"step 3 cannot be reached; \[0, 1, 2\] can") as refusal:
        await session.rewind(3)
    assert (refusal.value.reason, refusal.value.epoch, session.epoch) == (Reason.BAD_REQUEST, 2, 2)


async def test_a_snapshot_is_restored_by_its_name(client: AsyncClient) -> None:
    session = await ran(client, 3)
    assert await session.snapshot("after-3") == 1003
    await session.infer(ARRAYS, 3)
    await session.close()
    restored = await client.restore("after-3", image_encoding="png")
    assert (restored.epoch, restored.seed, restored.start_step, restored.keys) == (1, 10, 2, session.keys)
    assert first(await restored.infer(ARRAYS, 3)) == (14, 400)
    assert first(await (await client.restore("after-3")).infer(ARRAYS, 3)) == (14, 400)
    with pytest.raises(UnknownName, match="there is no snapshot 'after-2'"):
        await client.restore("after-2")


async def test_names_that_lead_elsewhere_never_reach_the_core(client: AsyncClient, core: ToyCore, raw_call) -> None:
    session = await ran(client, 1)
    core.kept = None  # type: ignore[assignment]  whoever looks a name up fails otherwise
    for name in BAD_SNAPSHOT_NAMES:
        for method, request in (
            ("Snapshot", pb.SnapshotRequest(session=session._book.ref, name=name)),
            ("Restore", pb.RestoreRequest(name=name)),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await raw_call(method)(request.SerializeToString())
            assert failure.value.code() is grpc.StatusCode.INVALID_ARGUMENT, (method, name[:20])
        with pytest.raises(InvalidInput):
            await session.snapshot(name)
        with pytest.raises(InvalidInput):
            await client.restore(name)


async def test_a_plan_changes_nothing(client: AsyncClient, core: ToyCore) -> None:
    session = await ran(client, 2)
    goal, init = ARRAYS["image"], np.full((3, 2), 7, np.float32)
    result = await session.plan(
        horizon=3, candidates=32, iterations=2, method="mppi", budget_ms=9, goal=goal, init=init
    )
    assert result.plan == PlanSummary(3, 0.25, 0.5, 32, 2, 3, True)
    assert first(result) == (12, 300)
    request = core.requests[-1]
    assert (request.op, request.seq) == (Op.PLAN, 3)
    assert request.plan is not None
    assert (request.plan.method, request.plan.budget_ms) == ("mppi", 9.0)
    np.testing.assert_array_equal(request.plan.goal, goal)
    np.testing.assert_array_equal(request.plan.init, init)
    assert first(await session.infer(ARRAYS, 2)) == (13, 400)


async def test_a_plan_with_nothing_said(client: AsyncClient, core: ToyCore) -> None:
    session = await ran(client, 1)
    assert (await session.plan()).plan == PlanSummary(2, 0.25, 0.5, 64, 3, 8)
    request = core.requests[-1]
    assert request.plan is not None
    assert (request.plan.method, request.plan.goal, request.plan.init) == ("cem", None, None)


async def test_a_goal_may_be_compressed(client: AsyncClient, core: ToyCore) -> None:
    session = await client.open("toy", image_encoding="png")
    await session.plan(goal=ARRAYS["image"])
    request = core.requests[-1]
    assert request.plan is not None
    np.testing.assert_array_equal(request.plan.goal, ARRAYS["image"])


async def test_the_canary_stays_exact_after_every_bad_plan(client: AsyncClient, raw_call) -> None:
    canary, victim = await ran(client, 0), await ran(client, 0)
    for count, case in enumerate(plan_cases(), start=1):
        request = good_plan(count)
        request.session.CopyFrom(victim._book.ref)
        case.spoil(request)
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await raw_call("Plan")(request.SerializeToString())
        assert failure.value.code() is grpc.StatusCode.INVALID_ARGUMENT, case.name
        assert first(await canary.infer(ARRAYS, count)) == (10 + count, 100 * count)
    assert first(await victim.infer(ARRAYS, 0)) == (11, 100)


async def test_when_to_try_again_is_in_the_trailers(client: AsyncClient, raw_call) -> None:
    session = await ran(client, 0, full_at=1)
    with pytest.raises(Exhausted) as full:
        await session.infer(ARRAYS, 0)
    assert (full.value.retry_after_ms, full.value.missing_bytes, full.value.retryable) == (250.0, 4096, True)
    request = pb.InferRequest(session=session._book.ref, observation=session._book.infer(ARRAYS, 0))
    request.observation.seq = 1
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await raw_call("Infer")(request.SerializeToString())
    trailer = pb.Error.FromString(dict(failure.value.trailing_metadata() or ())[codec.ERROR_KEY])
    assert (trailer.retry_after_ms, trailer.missing_bytes) == (250.0, 4096)


async def test_a_list_counts_all_and_shows_ones_own(client: AsyncClient, core: ToyCore) -> None:
    mine, others = await ran(client, 2), await ran(client, 1)
    stolen = await ran(client, 1)
    stolen._book.ref.resume_token = "guess"
    closed = await ran(client, 1)
    await closed.close()
    listed = await client.sessions(mine, stolen, closed)
    assert listed.counts == {"toy": 3}
    assert listed.sessions == (SessionSummary(mine.id, "toy", "idle", 1, 1, 2),)
    assert (await client.sessions()).sessions == ()
    secrets = [live.info.token for live in core.live.values()] + [others.id]
    reply = str(await client.call("ListSessions", pb.ListSessionsRequest(), pb.ListSessionsReply))
    assert not any(secret in reply for secret in secrets)


async def test_a_list_of_too_many_is_refused(client: AsyncClient) -> None:
    session = await ran(client, 0)
    with pytest.raises(InvalidInput, match="65 sessions"):
        await client.sessions(*[session] * 65)


async def rest(stream) -> list:
    await stream.done()
    return [event async for event in stream]


async def test_plans_and_rewinds_on_the_stream_keep_their_order(client: AsyncClient) -> None:
    session = await ran(client, 3)
    async with session.stream() as stream:
        assert await stream.infer(ARRAYS, 3) == 4
        await stream.rewind(1)
        assert await stream.plan(horizon=2) == 5
        assert await stream.infer(ARRAYS, 2) == 6
        await stream.rewind(9)
        events = await rest(stream)
    before, rewound, plan, after, refused = events
    assert first(before) == (14, 400)
    assert rewound == WasRewound(2, 1)
    assert plan.plan == PlanSummary(5, 0.25, 0.5, 64, 3, 2)
    assert (plan.epoch, first(plan)) == (2, (12, 500))
    assert first(after) == (13, 600)
    assert isinstance(refused, Refused)
    assert (refused.seq, refused.error.reason, refused.error.epoch) == (0, Reason.BAD_REQUEST, 2)
    assert (session.epoch, session.start_step) == (2, 1)


async def test_what_is_missing_is_said_on_the_stream(client: AsyncClient) -> None:
    session = await ran(client, 0, full_at=1)
    async with session.stream() as stream:
        await stream.infer(ARRAYS, 0)
        (refused,) = await rest(stream)
    assert (refused.seq, refused.error.retry_after_ms, refused.error.missing_bytes) == (1, 250.0, 4096)


async def test_a_fork_beside_a_stream(client: AsyncClient, core: ToyCore) -> None:
    session = await ran(client, 0)
    async with session.stream() as stream:
        core.gate.clear()
        for step in range(3):
            await stream.infer(ARRAYS, step)
        await core.entered.wait()
        forking = asyncio.create_task(session.fork())
        for _ in range(50):
            await asyncio.sleep(0)
        core.gate.set()
        child = await forking
        await rest(stream)
    assert (await child.infer(ARRAYS, 3)).seq == 4


async def test_draining_opens_nothing(client: AsyncClient, server: Server) -> None:
    session = await ran(client, 1)
    await session.snapshot("a")
    server.service.draining = True
    for call in (session.fork(), client.restore("a"), client.open("toy")):
        with pytest.raises(ServerUnavailable) as refusal:
            await call
        assert refusal.value.reason is Reason.DRAINING
    assert await session.snapshot("b") == 1001
    server.service.draining = False


async def test_random_bytes_are_refused(client: AsyncClient, raw_call) -> None:
    rng = np.random.default_rng(11)
    names = ["Fork", "Rewind", "Snapshot", "Restore", "Plan", "ListSessions"]
    taken = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND}
    for i in range(120):
        status = await raw_call(names[i % len(names)])(rng.bytes(int(rng.integers(0, 80)))).code()
        assert status in taken | ({grpc.StatusCode.OK} if names[i % len(names)] == "ListSessions" else set())


async def test_every_method_of_the_protocol_is_served(client: AsyncClient, raw_call) -> None:
    for method in pb.DESCRIPTOR.services_by_name["Loop"].methods:
        if not method.client_streaming:
            assert await raw_call(method.name)(b"").code() is not grpc.StatusCode.UNIMPLEMENTED, method.name
