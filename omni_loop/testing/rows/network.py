"""Row F14: a network that delays, cuts, goes silent and spoils; over TCP and over TLS.

A client repeats each observation with its seq until it is answered. However often the network fails, a deadline ends
every wait, every seq is answered by one computation, and the answers are those of a network without faults. Under TLS a
flipped bit ends its connection and never reaches the codec. In plain TCP nobody can tell a flipped bit from what was
meant, so there only the server's health and another session's answers are held.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
import numpy as np

from ...client import AsyncClient, channel, connect_async
from ...client.book import ANSWERS
from ...errors import Code, OmniLoopError
from ...types import TickResult
from ...wire import codec
from ...wire import loop_pb2 as pb
from ..board import Broken, NotRun, expect
from ..fault_proxy import FaultProxy
from ..history import History
from ..nemesis import Nemesis, of_flips, of_network
from .bed import ANSWER_S, nothing_leaks, row, same
from .served import Served, served, with_canary
from .toys import NAME, SPEC

STEPS, SCALED = 60, 12
TRIES_S = 0.5  # deadline of one try
# For tests alone: a broken connection is tried again at once. gRPC takes the first of two values, so they are one.
_QUICK = dict(channel.OPTIONS) | {
    "grpc.initial_reconnect_backoff_ms": 20,
    "grpc.min_reconnect_backoff_ms": 1_000,  # also what a handshake may take
    "grpc.max_reconnect_backoff_ms": 100,
}
_WATCHFUL = _QUICK | {
    "grpc.keepalive_time_ms": 400,
    "grpc.keepalive_timeout_ms": 300,
    "grpc.http2.ping_timeout_ms": 300,
}


def measure(seed: int, full: bool) -> float:
    """Faults survived."""
    steps = STEPS if full else SCALED
    with nothing_leaks():
        survived = asyncio.run(_bad_network(seed, steps))
        survived += asyncio.run(_silence(seed))
        survived += asyncio.run(_flips(seed, steps))
        survived += asyncio.run(_flips_under_tls(seed, steps))
    return survived


@dataclass
class Line:
    """One session over a network that may be bad; ``tries`` so far."""

    channel: grpc.aio.Channel
    opened: pb.OpenSessionReply
    history: History
    draw: np.random.Generator
    tries: int = 0
    answers: list[TickResult] = field(default_factory=list)
    sent: set[bytes] = field(default_factory=set)
    refused: list[OmniLoopError] = field(default_factory=list)  # in words of the server

    @property
    def ref(self) -> pb.SessionRef:
        return pb.SessionRef(session=self.opened.session, resume_token=self.opened.resume_token)

    async def step(self) -> None:
        """The next observation, again and again until it is answered."""
        seq = len(self.answers) + 1
        observation = pb.Observation(seq=seq, step=seq - 1, arrays={"x": codec.encode_tensor(row(self.draw))})
        request = pb.InferRequest(session=self.ref, observation=observation)
        self.sent.add(request.SerializeToString())
        async with asyncio.timeout(ANSWER_S):
            answer = await self._try(request)
            while answer is None:
                await asyncio.sleep(0.01)
                answer = await self._try(request)
        self.answers.append(answer)

    async def _try(self, request: pb.InferRequest) -> TickResult | None:
        self.tries += 1
        connection = self.history.connect()
        self.history.sent(connection, request.observation.seq)
        began = asyncio.get_running_loop().time()
        try:
            reply = await call(self.channel, "Infer", request, pb.TickReply, TRIES_S)
        except OmniLoopError as error:
            took = asyncio.get_running_loop().time() - began
            expect(took < 10 * TRIES_S, f"a deadline of {TRIES_S} s ended a call after {took:.1f} s")
            if error.code not in (Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED):
                self.refused.append(error)
            return None
        result = codec.decode_result(reply, SPEC, ANSWERS)
        self.history.tick(connection, result)
        return result


async def call(channel_: grpc.aio.Channel, name: str, request: Any, reply: Any, timeout_s: float = ANSWER_S) -> Any:
    """One call, with typed errors and a deadline."""
    method = channel_.unary_unary(
        channel.method(name), request_serializer=type(request).SerializeToString, response_deserializer=reply.FromString
    )
    try:
        return await method(request, timeout=timeout_s)
    except grpc.aio.AioRpcError as error:
        raise channel.typed(error, "the server") from None


@asynccontextmanager
async def line(made: Served, address: str, seed: int, root: bytes = b"") -> AsyncIterator[Line]:
    """A session opened over the good network, used over ``address``."""
    async with _channel(made.address, root) as good:
        opened = await call(good, "OpenSession", pb.OpenSessionRequest(pipeline=NAME, seed=seed), pb.OpenSessionReply)
        async with _channel(address, root) as bad:
            made_line = Line(bad, opened, History(), np.random.default_rng(seed))
            yield made_line
        await call(good, "Close", pb.CloseRequest(session=made_line.ref), pb.CloseReply)


def _channel(address: str, root: bytes = b"", options: dict[str, int] = _QUICK) -> grpc.aio.Channel:
    given = list(options.items())
    if not root:
        return grpc.aio.insecure_channel(address, options=given)
    return grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(root), options=given)


async def check_same(made: Served, seed: int, line_: Line, root: bytes = b"") -> None:
    """The answers are those of a network without faults, each of one computation."""
    line_.history.check()
    async with line(made, made.address, seed, root) as quiet:
        for answer in line_.answers:
            await quiet.step()
            expect(same(quiet.answers[-1], answer), f"seq {answer.seq} was answered otherwise than without faults")


async def _bad_network(seed: int, steps: int) -> int:
    """Delays, cuts, half-closed and frozen connections, drawn from the seed."""
    async with served() as made, FaultProxy() as proxy:
        await proxy.start(made.address)
        nemesis = Nemesis(random.Random(seed), of_network(proxy))
        async with line(made, proxy.address, seed) as bad:
            await _struck(nemesis, bad, steps)
        try:
            expect(not bad.refused, f"{[error.text for error in bad.refused]}")
            await check_same(made, seed, bad)
        except Broken as e:
            raise Broken(f"{e} (faults: {', '.join(nemesis.log[-20:])})") from e
    return len(nemesis.log)


async def _struck(nemesis: Nemesis, bad: Line, steps: int, pace_s: float = 0.0) -> None:
    over = asyncio.Event()
    striking = asyncio.create_task(nemesis.run(over))
    try:
        for _ in range(steps):
            await bad.step()
            await asyncio.sleep(pace_s)
    finally:
        over.set()
        await striking


async def _silence(seed: int) -> int:
    """A silent connection: the deadline ends a call, keepalive a stream without one, and the session goes on."""
    async with served() as made, FaultProxy() as proxy:
        await proxy.start(made.address)
        async with line(made, proxy.address, seed) as bad:
            await bad.step()
            proxy.freeze()
            step = asyncio.create_task(bad.step())
            await asyncio.sleep(1.5 * TRIES_S)
            expect(not step.done() and bad.tries >= 2, "a call over a silent connection did not end by its deadline")
            proxy.heal()
            await step
            await check_same(made, seed, bad)
        async with _channel(proxy.address, options=_WATCHFUL) as waiting:
            await call(waiting, "GetServerInfo", pb.GetServerInfoRequest(), pb.GetServerInfoReply)
            stream: Any = waiting.stream_stream(channel.method("Stream"))()
            proxy.freeze()
            async with asyncio.timeout(ANSWER_S):
                status = await stream.code()
            expect(status is grpc.StatusCode.UNAVAILABLE, f"a stream over a silent connection ended with {status}")
            proxy.heal()
    return 2


async def _flips(seed: int, steps: int) -> int:
    """Bits flip in plain TCP: every call ends, the server stays, and a session beside it stays bit-exact."""
    async with served() as made, FaultProxy() as proxy:
        await proxy.start(made.address)
        nemesis = Nemesis(random.Random(seed), of_flips(proxy, 512), gap_s=(0.0, 0.02))

        async def suffer() -> None:
            over = asyncio.Event()
            striking = asyncio.create_task(nemesis.run(over))
            draw = np.random.default_rng(seed)
            try:
                async with connect_async(proxy.address, timeout_s=TRIES_S) as client:
                    await client.channel.close()
                    client.channel = _channel(proxy.address)  # one that tries again at once
                    for _ in range(steps):
                        await _anyhow(client, draw)
            finally:
                over.set()
                await striking

        await with_canary(made, seed, suffer())
        return proxy.flipped


async def _anyhow(client: AsyncClient, draw: np.random.Generator) -> None:
    """A session opened, used and closed, each as far as it goes; whatever comes back is an answer or a typed error."""
    try:
        session = await client.open(NAME, seed=1)
        try:
            await session.infer({"x": row(draw)}, 0)
        finally:
            await session.close()
    except OmniLoopError as error:
        expect("failed inside the server" not in error.text, f"an error that is not typed: {error.text}")


async def _flips_under_tls(seed: int, steps: int) -> int:
    """Every message that reaches the codec is one that was sent, and every answer one of the server's."""
    try:
        from ..certificates import Authority

        authority = Authority()
    except ImportError:
        raise NotRun("certificates for TLS need the package cryptography") from None
    pair = authority.issue("server", ("127.0.0.1",))
    credentials = grpc.ssl_server_credentials([(pair.key, pair.certificate)])
    root = authority.pem
    async with served(credentials=credentials) as made, FaultProxy() as proxy:
        await proxy.start(made.address)
        parsed = _tap(made)
        # A handshake has to pass between two flips.
        nemesis = Nemesis(random.Random(seed), of_flips(proxy), gap_s=(0.05, 0.25))
        async with line(made, proxy.address, seed, root) as bad:
            await _struck(nemesis, bad, steps, pace_s=0.05)
            proxy.heal()
        expect(not bad.refused, f"refused: {[error.text for error in bad.refused]}")
        expect(parsed <= bad.sent, f"{len(parsed - bad.sent)} messages that nobody sent reached the codec")
        await check_same(made, seed, bad, root)
        expect(proxy.flipped > 0, "no bit was flipped")
        return proxy.flipped


def _tap(made: Served) -> set[bytes]:
    """Bytes of every observation that reaches the codec from now on."""
    decoder: Any = made.server.service.decoder
    parse = decoder.parse
    seen: set[bytes] = set()

    async def tapped(kind: Any, raw: bytes) -> Any:
        if kind is pb.InferRequest:
            seen.add(raw)
        return await parse(kind, raw)

    decoder.parse = tapped
    return seen
