"""F9: the wall clock jumps by an hour, forth and back, while sessions live: no lease ends early or late, no token is
lost.

The jumps are this process' own: every reading of ``time.time`` is off by what was drawn last.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from ...config import SessionConfig
from ...errors import OmniLoopError, UnknownSession
from ..board import Broken, expect
from .bed import ANSWER_S, Bed, Robot, bed, row

HOUR_S = 3600.0
_CONFIG = SessionConfig(idle_ttl_s=1.0, grace_s=0.5)


def measure(seed: int, full: bool) -> float:
    """Jumps survived."""
    draw = np.random.default_rng(seed)
    jumps = [float(draw.choice([-HOUR_S, HOUR_S])) + float(draw.normal(0, 5)) for _ in range(120 if full else 60)]
    return float(asyncio.run(_live(seed, jumps)))


async def _live(seed: int, jumps: list[float]) -> int:
    draw = np.random.default_rng(seed)
    async with bed(config=_CONFIG, threads=True) as made:
        kept, silent, lost = [await made.open(seed + i) for i in range(3)]
        attached = made.core.attach(lost.info.id, lost.info.token, lambda: None, None)
        made.core.detach(lost.info.id, attached.number)
        with _wall_clock() as jump:
            for by in jumps:
                jump(by)
                outcome = await kept.infer(row(draw))
                if isinstance(outcome, OmniLoopError):
                    raise Broken(f"a session in use ended: {outcome}")
                await asyncio.sleep(_CONFIG.idle_ttl_s / 20)
            for robot in (silent, lost):
                await _ends(made, robot)
            expect(made.core.session(kept.info.id, kept.info.token).id == kept.info.id, "a session in use is lost")
        return len(jumps)


async def _ends(made: Bed, robot: Robot) -> None:
    """Its lease, which began before the jumps, ends it."""
    for _ in range(round(10 * ANSWER_S)):
        try:
            made.core.session(robot.info.id, robot.info.token)
        except UnknownSession:
            return
        await asyncio.sleep(0.1)
    raise Broken("a session that nobody uses outlives its lease")


@contextmanager
def _wall_clock() -> Iterator[Callable[[float], None]]:
    """``jump(seconds)`` moves the wall clock, to where the machine's own has it plus that."""
    real, real_ns, off = time.time, time.time_ns, [0.0]

    def jump(by: float) -> None:
        off[0] = by

    time.time = lambda: real() + off[0]
    time.time_ns = lambda: real_ns() + int(off[0] * 1e9)
    try:
        yield jump
    finally:
        time.time, time.time_ns = real, real_ns
