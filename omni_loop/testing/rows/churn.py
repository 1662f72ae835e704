"""L4: sessions opened by the thousand, closed or abandoned. What they took comes back: places, blocks, bytes, tasks."""

from __future__ import annotations

import asyncio
import gc

import numpy as np

from ...clock import FakeClock
from ...config import SessionConfig
from ...errors import Exhausted, OmniLoopError
from ...runner.state import Budget
from ..board import Broken, expect
from .bed import Bed, Robot, bed, nothing_leaks, row
from .long import in_use

ROOM = 32
_CONFIG = SessionConfig(idle_ttl_s=30.0, grace_s=5.0)
_MB = 1 << 20


def measure(seed: int, full: bool) -> float:
    """Sessions opened."""
    with nothing_leaks():
        return float(asyncio.run(_churn(seed, 10_000 if full else 600)))


async def _churn(seed: int, count: int) -> int:
    draw, clock = np.random.default_rng(seed), FakeClock()
    async with bed(Budget(ROOM), None, _CONFIG, clock, max_sessions=ROOM) as made:
        robots: list[Robot] = []
        used, refused = 0, 0
        for n in range(count):
            if n == count // 4:  # what is made once is made by now
                used = _settled_bytes()
            try:
                robot = await made.open(seed + n)
            except Exhausted as full_up:
                refused += 1
                expect(full_up.retry_after_ms > 0, "a full table does not say when to come again")
                await _abandoned(made, clock, full_up.retry_after_ms / 1e3)
                robots.clear()
                robot = await made.open(seed + n)
            robots.append(robot)
            if isinstance(outcome := await robot.infer(row(draw)), OmniLoopError):
                raise Broken(f"session {n}: {outcome}")
            await _leave(made, robots, draw)
        await _abandoned(made, clock, _CONFIG.idle_ttl_s)
        expect(refused > 0, "the table was never full")
        expect(len(made.core._manager) == 0, f"{len(made.core._manager)} sessions outlived their leases")
        won = (_settled_bytes() - used) / _MB
        expect(won < 4, f"{won:.1f} MB are kept of sessions that are over")
        return count


async def _leave(made: Bed, robots: list[Robot], draw: np.random.Generator) -> None:
    """A third is closed, a third loses its stream, a third falls silent."""
    kind = draw.integers(3)
    robot = robots[-1]
    info = robot.info
    if kind == 0:
        robots.pop()
        await made.core.close(info.id, info.token)
    elif kind == 1:
        attached = made.core.attach(info.id, info.token, lambda: None, None)
        made.core.detach(info.id, attached.number)


async def _abandoned(made: Bed, clock: FakeClock, seconds: float) -> None:
    """The last lease ends."""
    await made.settled()  # else time runs on before the last tick's end has begun a lease
    await clock.advance(seconds + _CONFIG.idle_ttl_s)
    await made.settled()


def _settled_bytes() -> int:
    gc.collect()
    return in_use()
