"""The gRPC port, kept open.

grpc.aio reads the path of a call as UTF-8 in the one task that accepts calls (1.85): a path that is none ends that
task, and the server accepts nothing any more. Any client can send one. Here the port is then served anew; streams that
are open go on, new calls come a few milliseconds later.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any

import grpc.aio

from ..errors import ServerUnavailable
from ..loop.tick import eager
from ..telemetry import metrics

log = logging.getLogger(__name__)
TRIES, APART_S = 200, 0.01  # to bind again, while the old listener closes
_again = metrics.counter("omni_loop_ports_served_anew", "Times the gRPC port had to be served anew")


# Servers whose accepting ended: their open calls go on. gRPC's core may crash where such a one is stopped or freed.
_ended: list[grpc.aio.Server] = []


class Listening:
    """``make(port)`` binds a new server, with all its services, to ``port`` (0: any) and gives it with its address."""

    def __init__(self, make: Callable[[int], tuple[grpc.aio.Server, str]], port: int) -> None:
        self._make = make
        self._server, self.address = make(port)
        self._guard: asyncio.Task[None] | None = None

    async def start(self) -> None:
        accepting = await _started(self._server)
        self._guard = asyncio.create_task(self._watch(accepting))

    async def stop(self, grace_s: float) -> None:
        """As grpc.aio's: calls in flight go on within ``grace_s``."""
        if self._guard is not None:
            self._guard.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._guard
        await self._server.stop(grace_s)

    async def _watch(self, accepting: set[asyncio.Task[Any]]) -> None:
        """grpc.aio itself closes the listener of a server that accepts no more, and lets open calls go on."""
        while accepting:
            await asyncio.wait(accepting, return_when=asyncio.FIRST_COMPLETED)
            log.error("accepting calls ended, and begins anew")
            _again.inc()
            _ended.append(self._server)
            self._server = await self._bound()
            accepting = await _started(self._server)

    async def _bound(self) -> grpc.aio.Server:
        port = int(self.address.rpartition(":")[2])
        for _ in range(TRIES - 1):
            try:
                return self._make(port)[0]
            except ServerUnavailable:
                await asyncio.sleep(APART_S)
        return self._make(port)[0]


async def _started(server: grpc.aio.Server) -> set[asyncio.Task[Any]]:
    """Start ``server``; the task that accepts its calls. grpc.aio does not give it away: it is the one that starting
    makes before it first waits, while nobody else can make any. Its end is heard nowhere else while calls are open."""
    before = asyncio.all_tasks()
    starting = eager(server.start())
    made = asyncio.all_tasks() - before - {starting}
    await starting
    return made
