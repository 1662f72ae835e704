"""The admin port: uvicorn in the server's own event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import uvicorn

from ..auth import Gate
from ..ports import address, listen, why_not
from .app import build
from .live import LiveView
from .readiness import Readiness

if TYPE_CHECKING:
    from ...endpoints import AdminEndpoint
    from ..service import LoopService


async def start(config: AdminEndpoint, service: LoopService, gate: Gate | None = None) -> AdminServer:
    """Listen. ``gate`` None lets everybody of this machine in.

    Raises:
        ServerUnavailable: the port is busy.
    """
    server = AdminServer(config, service, gate or Gate())
    await server.start()
    return server


class _Uvicorn(uvicorn.Server):
    """Signals are the server's, not uvicorn's."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class AdminServer:
    """One port for people and their tools."""

    name = "admin"

    def __init__(self, config: AdminEndpoint, service: LoopService, gate: Gate) -> None:
        self.config = config
        self.address = ""
        self.live = LiveView(service)
        self.readiness = Readiness(service)
        app = build(service, gate, self.readiness, self.live)
        self._server = _Uvicorn(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                server_header=False,
                lifespan="off",
                ws="none",
                limit_concurrency=64,
                timeout_keep_alive=5,
            )
        )
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        host, port = self.config.host, self.config.port
        try:
            listening = listen(host, port)
        except OSError as error:
            raise why_not(error, host, port, self.name) from error
        self.address = address(listening)
        self._task = asyncio.create_task(self._server.serve(sockets=[listening]))
        while not self._server.started:
            if self._task.done():
                await self._task
            await asyncio.sleep(0.01)

    async def stop(self, grace_s: float) -> None:
        """Take nobody new; requests under way are answered within ``grace_s``."""
        self.live.close()
        if self._task is None:
            return
        self._server.config.timeout_graceful_shutdown = max(1, round(grace_s))
        self._server.should_exit = True
        await self._task
