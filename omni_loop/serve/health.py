"""The standard health service, whose answer passes through the real work loop of every runner."""

from __future__ import annotations

import asyncio

from grpc_health.v1 import health, health_pb2

from ..errors import OmniLoopError
from .refusal import Context
from .service import SERVICE, LoopService

# A runner answers a ping between two forward passes; one that takes longer is stuck.
PING_S = 10.0
RECORDER = "omni_loop.v1.Recorder"
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Health(health.aio.HealthServicer):
    """NOT_SERVING until every stage has run once, while a runner is gone or stuck, and from draining on.

    The names are "" (the whole server) and ``omni_loop.v1.Loop``; and, where ticks are recorded, RECORDER, which is
    NOT_SERVING while some are lost: the robot goes on meanwhile.
    """

    def __init__(self, service: LoopService) -> None:
        super().__init__()
        self._service = service
        self._server_status = {"": _NOT_SERVING, SERVICE: _NOT_SERVING}

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Context) -> health_pb2.HealthCheckResponse:
        await self.refresh()
        return await super().Check(request, context)

    async def refresh(self) -> None:
        """Ask the runners, and tell those who watch."""
        status = _SERVING if await self._alive() else _NOT_SERVING
        for name in ("", SERVICE):
            await self.set(name, status)
        core = self._service.orchestrator
        if core is not None and core.recording is not None:
            await self.set(RECORDER, _SERVING if core.recording else _NOT_SERVING)

    async def _alive(self) -> bool:
        core = self._service.orchestrator
        if core is None or self._service.draining or not core.ready:
            return False
        try:
            async with asyncio.timeout(PING_S):
                await core.ping()
        except (OmniLoopError, TimeoutError):
            return False  # this is the answer, not a failure of the question
        return True
