"""The real server over the board's bed, in this process, and a canary: a session that must not notice anything."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np

from ...client import AsyncClient, AsyncSession, connect_async
from ...config import Deployment, Listen, SessionConfig
from ...config import Limits as LimitsConfig
from ...endpoints import AccessConfig
from ...errors import OmniLoopError
from ...loop.orchestrator import Orchestrator
from ...serve.app import Server
from ...session.snapshot import SnapshotStore
from ...types import TickResult
from ..board import Broken, expect
from .bed import ANSWER_S, Bed, bed, row, same
from .toys import NAME

MAX_SESSIONS = 32
_INSIDE = "failed inside the server"  # what a stranger is told of an error that is not typed


class _Kept:
    """An orchestrator whose bed, not its server, ends it."""

    def __init__(self, core: Orchestrator) -> None:
        self._core = core

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)

    async def stop(self, grace_s: float = 0.0) -> None:
        pass


@dataclass
class Served:
    bed: Bed
    server: Server
    address: str

    def client(self, address: str = "", **options: Any) -> AsyncClient:
        return connect_async(address or self.address, timeout_s=ANSWER_S, **options)


@asynccontextmanager
async def served(
    config: SessionConfig | None = None,
    credentials: grpc.ServerCredentials | None = None,
    store: SnapshotStore | None = None,
    max_message_bytes: int = 1 << 20,
    access: AccessConfig | None = None,
) -> AsyncIterator[Served]:
    """A server on a free loopback port. At the end, without an error, nothing of any session may be left."""
    deployment = Deployment(
        pipelines=("toy",),
        listen=Listen(port=0),
        session=config or SessionConfig(),
        limits=LimitsConfig(max_message_bytes=max_message_bytes, max_sessions=MAX_SESSIONS),
        access=access or AccessConfig(),
    )
    async with bed(config=config, max_sessions=MAX_SESSIONS, store=store) as made:

        async def start(_: Deployment) -> Any:
            return _Kept(made.core)

        server = Server(deployment, start)
        server.credentials = credentials or server.credentials
        try:
            yield Served(made, server, await server.start())
        finally:
            await server.stop(1.0)


@dataclass
class Canary:
    """A client that goes on throughout. ``answers`` by observation."""

    session: AsyncSession
    seed: int
    draw: np.random.Generator
    seen: list[np.ndarray[Any, np.dtype[np.float32]]] = field(default_factory=list)
    answers: list[TickResult] = field(default_factory=list)

    @classmethod
    async def open(cls, client: AsyncClient, seed: int) -> Canary:
        return cls(await client.open(NAME, seed=seed), seed, np.random.default_rng(seed))

    async def tick(self) -> None:
        """One more step, answered in time. Raises :class:`~..board.Broken` otherwise."""
        x = row(self.draw)
        step = len(self.seen)
        try:
            answer = await asyncio.wait_for(self.session.infer({"x": x}, step, frames=step % 2), ANSWER_S)
        except OmniLoopError as error:
            raise Broken(f"the canary's step {step} was refused: {error.text}") from error
        except TimeoutError:
            raise Broken(f"the canary's step {step} was not answered within {ANSWER_S:g} s") from None
        self.seen.append(x)
        self.answers.append(answer)

    async def beat(self, until: asyncio.Event, every_s: float = 0.01) -> None:
        """Ticks until told to stop, then the last one."""
        while not until.is_set():
            await self.tick()
            await asyncio.sleep(every_s)
        await self.tick()

    async def check(self, client: AsyncClient) -> None:
        """A session that lives the same again, when all is over, is answered the same to the last bit."""
        again = await Canary.open(client, self.seed)
        for number, answer in enumerate(self.answers):
            await again.tick()
            expect(same(again.answers[number], answer), f"the canary's step {number} was answered otherwise than alone")
        await again.session.close()
        await self.session.close()


async def together(*works: Coroutine[Any, Any, Any]) -> None:
    """All of ``works`` at once; what the first of them raises ends the others."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def with_canary(made: Served, seed: int, work: Coroutine[Any, Any, Any]) -> None:
    """``await work`` while a canary lives, which must not notice."""
    async with made.client() as client:
        canary = await Canary.open(client, seed)
        await canary.tick()
        over = asyncio.Event()
        beating = asyncio.create_task(canary.beat(over))
        working = asyncio.ensure_future(work)
        try:
            await asyncio.wait((beating, working), return_when=asyncio.FIRST_COMPLETED)
            if beating.done():  # too early: it says why
                beating.result()
            await working
            over.set()
            await beating
        finally:
            over.set()
            working.cancel()
            beating.cancel()
            await asyncio.gather(working, beating, return_exceptions=True)
        await canary.check(client)


def check_typed(error: OmniLoopError, doing: str, allowed: Sequence[str] = ()) -> None:
    """``error`` is one the server meant, with words for a stranger; reasons ``allowed`` besides those of refusals."""
    expect(_INSIDE not in error.text, f"{doing}: an error that is not typed")
    internal = error.code == "internal" and error.reason not in allowed
    expect(not internal, f"{doing}: {error.code} ({error.reason}): {error.text}")
