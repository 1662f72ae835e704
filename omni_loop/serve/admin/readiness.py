"""Whether the server can serve now: asked of the runners' work loops, not of what they said last."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from ...errors import OmniLoopError
from ..health import PING_S

if TYPE_CHECKING:
    from ..service import LoopService


class Readiness:
    """However many ask at once, one probe is under way: each runner's work loop is passed once, with memory taken on
    its device and payloads there and back."""

    def __init__(self, service: LoopService) -> None:
        self._service = service
        self._asking: asyncio.Task[str] | None = None

    async def why_not(self) -> str:
        """What is in the way; "" when the server is ready."""
        return await asyncio.shield(self._probe())

    async def refresh(self, timeout_s: float) -> None:
        """Probe, for what the runners tell besides; whoever asks waits ``timeout_s`` at most."""
        await asyncio.wait([self._probe()], timeout=timeout_s)

    def _probe(self) -> asyncio.Task[str]:
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask())
        return self._asking

    async def _ask(self) -> str:
        core = self._service.orchestrator
        if core is None:
            return "the server is loading"
        if self._service.draining:
            return "the server is about to stop"
        if not core.ready:
            return "a runner is gone"
        try:
            async with asyncio.timeout(PING_S):
                await core.ping()
        except TimeoutError:
            return f"a runner did not answer within {PING_S:g} s"
        except OmniLoopError as error:
            return error.text
        return ""
