"""Time that can be injected: the system's monotonic clock, and one that tests move by hand."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from typing import Protocol


class Clock(Protocol):
    """Monotonic time. Nothing here ever looks at the wall clock, which may jump."""

    def now_ns(self) -> int:
        """Nanoseconds since an arbitrary beginning."""

    def now(self) -> float:
        """The same in seconds."""

    async def sleep(self, seconds: float) -> None:
        """Return once ``seconds`` have passed on this clock."""


class SystemClock:
    """The machine's monotonic clock."""

    def now_ns(self) -> int:
        return time.monotonic_ns()

    def now(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class FakeClock:
    """Stands still until :meth:`advance`; sleepers wake in the order of their times."""

    def __init__(self, start_ns: int = 0) -> None:
        self._now_ns = start_ns
        self._order = itertools.count()
        self._sleepers: list[tuple[int, int, asyncio.Future[None]]] = []

    def now_ns(self) -> int:
        return self._now_ns

    def now(self) -> float:
        return self._now_ns / 1e9

    async def sleep(self, seconds: float) -> None:
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        future = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._now_ns + round(seconds * 1e9), next(self._order), future))
        await future

    async def advance(self, seconds: float) -> None:
        """Move on, stopping at each sleeper's time so that what it starts sees that time."""
        if seconds < 0:
            raise ValueError("a monotonic clock does not go back")
        await asyncio.sleep(0)  # let tasks that were just started reach their sleep
        end = self._now_ns + round(seconds * 1e9)
        while self._sleepers and self._sleepers[0][0] <= end:
            self._now_ns, _, future = heapq.heappop(self._sleepers)
            if not future.done():  # a cancelled sleeper is done already
                future.set_result(None)
                await asyncio.sleep(0)
                await asyncio.sleep(0)
        self._now_ns = end
        await asyncio.sleep(0)
