"""Row B3: every named bad input, to a live server: refused with its reason and the words that help, at once, and the
session it came to goes on as if nothing had been."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import grpc
import grpc.aio

from ...client import AsyncClient, channel, connect_async
from ...config import Deployment, Listen
from ...config import Limits as LimitsConfig
from ...errors import OmniLoopError, Reason
from ...serve.app import Server
from ...wire import codec
from ...wire import loop_pb2 as pb
from .. import bad_inputs
from ..bad_calls import bad_calls
from ..board import Broken, expect
from ..toy_core import ToyCore
from .bed import ANSWER_S, nothing_leaks

LEAST = 150
ROUNDS = 3  # in full: in another order each time
Case = tuple[str, str, bytes, tuple[str, ...], Reason]


def measure(seed: int, full: bool) -> float:
    """Cases refused."""
    with nothing_leaks():
        return asyncio.run(_measure(random.Random(seed), ROUNDS if full else 1))


async def _measure(draw: random.Random, rounds: int) -> float:
    core = ToyCore()

    async def start(_: Deployment) -> Any:
        return core

    given = {
        name: getattr(bad_inputs.LIMITS, name) for name in LimitsConfig.model_fields if name != "max_message_bytes"
    }
    limits = LimitsConfig(**{**given, "max_message_bytes": 8 << 20})  # 100,000 keys are to be counted, not measured
    server = Server(Deployment(pipelines=("toy",), listen=Listen(port=0), limits=limits), start)
    address = await server.start()
    refused = 0
    try:
        async with connect_async(address, timeout_s=ANSWER_S) as client:
            for _ in range(rounds):
                refused += await _round(client, core, draw)
    finally:
        await server.stop(1.0)
    return refused


async def _round(client: AsyncClient, core: ToyCore, draw: random.Random) -> int:
    session = await client.open("toy", keys=bad_inputs.KEYS, seed=1000)
    opened = session._book.ref
    cases = _cases(opened)
    expect(len(cases) >= LEAST and len({case[0] for case in cases}) == len(cases), f"{len(cases)} cases")
    draw.shuffle(cases)
    for number, case in enumerate(cases):
        await _refused(client, case)
        if number % 10 == 0:
            await _good(client, opened, core)
    await _good(client, opened, core)
    await session.close()
    return len(cases)


async def _refused(client: AsyncClient, case: Case) -> None:
    name, method, raw, says, reason = case
    try:
        await client.channel.unary_unary(channel.method(method))(raw, timeout=ANSWER_S)
    except grpc.aio.AioRpcError as error:
        refusal: OmniLoopError = channel.typed(error, client.address)
    else:
        raise Broken(f"{name}: it was taken")
    expect(refusal.reason is reason, f"{name}: {refusal.reason} ({refusal.text}), expected {reason}")
    expect(not refusal.retryable, f"{name}: a client is told to try again")
    for words in says:
        expect(words in refusal.text, f"{name}: {refusal.text!r} does not say {words!r}")
    expect(len(refusal.text) <= 1024 and "Traceback" not in refusal.text, f"{name}: {refusal.text}")


async def _good(client: AsyncClient, ref: pb.SessionRef, core: ToyCore) -> None:
    """What is right is answered, by the state of what was right before and nothing else."""
    live = core.live[ref.session]
    request = bad_inputs.good_request(live.seq + 1)
    request.session.CopyFrom(ref)
    reply = await client.call("Infer", request, pb.TickReply)
    chunk = codec.decode_tensor("actions", reply.chunk.actions, codec.Limits())
    told = int(chunk[0, 0]) - 1000
    expect(told == live.seq == request.observation.seq, f"after bad inputs seq {live.seq} is answered as tick {told}")


def _cases(ref: pb.SessionRef) -> list[Case]:
    cases: list[Case] = []
    for case in bad_inputs.cases():
        request = bad_inputs.good_request()
        request.session.CopyFrom(ref)
        raw = case.spoil(request) or request.SerializeToString()
        cases.append((case.name, "Infer", raw, case.says, case.reason))
    for case in bad_inputs.plan_cases():
        plan = bad_inputs.good_plan()
        plan.session.CopyFrom(ref)
        raw = case.spoil(plan) or plan.SerializeToString()
        cases.append((case.name, "Plan", raw, case.says, case.reason))
    cases += [(call.name, call.method, call.raw(ref), (call.says,), call.reason) for call in bad_calls()]
    return cases
