"""The board's bed behind the real server in a process of its own: ``python -m omni_loop.testing.rows.apart`` is what
``python -m omni_loop.serve`` is.

For rows that make gRPC's port begin anew (:mod:`omni_loop.serve.listening`): gRPC's clients crash when that happens in
their own process.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...client import AsyncClient, connect_async
from ...config import Deployment, Listen
from ...config import Limits as LimitsConfig
from ...serve.__main__ import main
from ...serve.background import BackgroundServer
from ..board import expect
from .bed import ANSWER_S, bed

if TYPE_CHECKING:
    from ...loop.orchestrator import Orchestrator

MAX_SESSIONS = 32
_kept = AsyncExitStack()  # the bed lives as long as the process


async def start(deployment: Deployment) -> Orchestrator:
    made = await _kept.enter_async_context(bed(max_sessions=MAX_SESSIONS, threads=True))
    return made.core


class _Server(BackgroundServer):
    module = "omni_loop.testing.rows.apart"


@dataclass(frozen=True, slots=True)
class Apart:
    address: str
    server: BackgroundServer

    def client(self, address: str = "", **options: Any) -> AsyncClient:
        return connect_async(address or self.address, timeout_s=ANSWER_S, **options)

    async def open_files(self, most: int) -> int:
        """File descriptors of the server, once they are no more than ``most``, or after two seconds."""
        fewest = sys.maxsize
        for _ in range(40):
            fewest = min(fewest, len(os.listdir(f"/proc/{self.server.pid}/fd")))
            if fewest <= most:
                break
            await asyncio.sleep(0.05)
        return fewest


@asynccontextmanager
async def apart(abandoned: bool = False) -> AsyncIterator[Apart]:
    """At the end, without an error, the server still runs and has no session, but for those ``abandoned``."""
    limits = LimitsConfig(max_message_bytes=1 << 20, max_sessions=MAX_SESSIONS)
    server = _Server(Deployment(pipelines=("toy",), listen=Listen(port=0), limits=limits))
    await asyncio.to_thread(server.start)
    try:
        made = Apart(server.address, server)
        yield made
        async with made.client() as client:
            left = dict((await client.sessions()).counts)
        expect(abandoned or not left, f"sessions are left: {left}")
    finally:
        await asyncio.to_thread(server.stop)


if __name__ == "__main__":
    sys.exit(main(start=start))
