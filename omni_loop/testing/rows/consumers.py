"""F5: clients that do not read cost a bounded outbox, the newest of their answers wins, and others do not wait."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace
from typing import Any

import grpc
import grpc.aio
import numpy as np

from ...client import AsyncClient, AsyncSession, FramesLost, Refused, SessionStream, Skipped, connect_async
from ...config import Deployment, Listen, SessionConfig
from ...config import Limits as LimitsConfig
from ...serve.app import Server
from ...types import ArraySpec, FramePrediction, TickResult
from ..board import Broken, expect
from ..toy_core import SPEC as TOY_SPEC
from ..toy_core import ToyCore
from .bed import ANSWER_S, nothing_leaks

_CONSUMERS, _SENT = 64, 60
_OUTBOX = 16 << 10
_FRAMES, _SIDE = 4, 64  # of 12 KB each
_BIG = replace(TOY_SPEC, frame=ArraySpec("frame", "uint8", (_SIDE, _SIDE, 3)), ops=TOY_SPEC.ops)
# A client whose machine stopped would take megabytes first; here each takes one frame's worth.
_NARROW = [("grpc.http2.lookahead_bytes", 16 << 10), ("grpc.http2.bdp_probe", 0), ("grpc.use_local_subchannel_pool", 1)]


def consumers(seed: int, full: bool) -> float:
    """How many times the p99 of others beside 64 clients that do not read is what it is without: at most 2; in CI, for
    seconds on a machine it shares, at most 5."""
    with nothing_leaks():
        return asyncio.run(_consumers(seed, full))


async def _consumers(seed: int, full: bool) -> float:
    core = ToyCore(_BIG)

    async def start(_: Deployment) -> Any:
        return core

    limits = LimitsConfig(max_sessions=_CONSUMERS + 1, max_message_bytes=1 << 20)
    sessions = SessionConfig(outbox_bytes=_OUTBOX)
    server = Server(Deployment(pipelines=("toy",), listen=Listen(port=0), session=sessions, limits=limits), start)
    address = await server.start()
    stopped: list[_Stopped] = []
    try:
        async with connect_async(address, timeout_s=ANSWER_S) as client:
            canary = await client.open("toy", seed=seed)
            quiet = await _p99(canary, 2000 if full else 300)
            stopped += [await _Stopped.open(client, address) for _ in range(_CONSUMERS)]
            await asyncio.gather(*(one.send() for one in stopped))
            await _settled(core)
            beside = await _p99(canary, 2000 if full else 300)
            held = [(s.outbox.nbytes, s.outbox.dropped) for s in server.service.streams]
            expect(len(held) == _CONSUMERS, f"{len(held)} of {_CONSUMERS} streams are left")
            most = max(nbytes for nbytes, _ in held)
            # Beyond the bound: what max_in_flight answers, which cannot be replaced, may add.
            expect(most < 2 * _OUTBOX, f"an outbox of {_OUTBOX} bytes holds {most}")
            expect(all(dropped for _, dropped in held), "a client that does not read lost nothing")
            for one in stopped:
                await one.read_all()
    finally:
        for one in stopped:
            await one.channel.close()
        await server.stop(1.0)
    ratio, bound = beside / quiet, 2.0 if full else 5.0
    told = f"p99 {1e3 * quiet:.2f} ms alone, {1e3 * beside:.2f} ms beside {_CONSUMERS} that do not read"
    expect(ratio <= bound, f"{told}: {ratio:.1f} times, at most {bound:g}")
    return ratio


async def _settled(core: ToyCore) -> None:
    """Until what was sent is computed, or is not read."""
    computed = -1
    while computed < core.computed:
        computed = core.computed
        await asyncio.sleep(0.3)


async def _p99(session: AsyncSession, count: int) -> float:
    """Seconds, of a client that asks and reads."""
    taken, arrays = [], _arrays()
    for step in range(count):
        began = time.perf_counter()
        await asyncio.wait_for(session.infer(arrays, step), ANSWER_S)
        taken.append(time.perf_counter() - began)
    return float(np.quantile(taken, 0.99))


def _arrays() -> dict[str, Any]:
    return {"image": np.zeros((8, 8, 3), np.uint8), "agent_pos": np.zeros((2, 2), np.float32)}


@dataclass
class _Stopped:
    """A client that sends and does not read."""

    channel: grpc.aio.Channel
    stream: SessionStream

    @classmethod
    async def open(cls, client: AsyncClient, address: str) -> _Stopped:
        session = await client.open("toy")
        channel = grpc.aio.insecure_channel(address, options=_NARROW)
        stream = SessionStream(channel, address, session._book)
        await stream.attach()
        return cls(channel, stream)

    async def send(self) -> None:
        for step in range(_SENT):
            await self.stream.infer(_arrays(), step, frames=_FRAMES)

    async def read_all(self) -> None:
        """Every seq was answered once, in order, and the newest with its chunk."""
        await self.stream.done()
        ends: list[int] = []
        chunks: list[int] = []
        frames: list[int] = []
        async with asyncio.timeout(ANSWER_S):
            async for event in self.stream:
                if isinstance(event, (TickResult, Skipped)):
                    ends.append(event.seq)
                if isinstance(event, TickResult):
                    chunks.append(event.seq)
                elif isinstance(event, (FramePrediction, FramesLost)):
                    frames.append(event.seq)
                elif isinstance(event, Refused):
                    raise Broken(f"seq {event.seq} was refused: {event.error.text}")
        expect(ends == list(range(1, _SENT + 1)), f"the answers were {ends}")
        expect(bool(chunks) and chunks[-1] == _SENT, f"the newest chunk read was {chunks[-1:]}, not {_SENT}")
        expect(frames == chunks, "a chunk has no word about its frames, or one of a request that was skipped came")
