"""L3: sessions that live for a day. What they do in it must not stay in memory."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import sys
from array import array

import numpy as np

from ...clock import FakeClock
from ...config import SessionConfig
from ...errors import OmniLoopError
from ...runner.state import Budget
from ..board import Broken, expect
from .bed import Bed, Robot, bed, nothing_leaks, row, some_actions

SESSIONS, HZ = 8, 5
HOURS, SCALED = 24.0, 1500 / (3600 * HZ)  # simulated; in CI
_CYCLE = 100  # rounds, after which sessions do the same again
_MB = 1e6
# What is bounded must reach its bound long before the slope is taken.
_CONFIG = SessionConfig(idle_ttl_s=60.0, log_bytes=1 << 17, rewind_ticks=4)


def measure(seed: int, full: bool) -> float:
    """Megabytes won per simulated hour: of resident memory in a whole day; of what the allocators say is in use in the
    scaled row, since what is resident is too coarse for minutes."""
    with nothing_leaks():
        return asyncio.run(_day(seed, full))


async def _day(seed: int, full: bool) -> float:
    clock, draw = FakeClock(), np.random.default_rng(seed)
    used = _resident if full else in_use
    room = Budget(SESSIONS + 2, rewind_ticks=_CONFIG.rewind_ticks)
    async with bed(room, {"max_batch": SESSIONS}, _CONFIG, clock, max_sessions=SESSIONS + 2) as made:
        robots = [await made.open(seed + i) for i in range(SESSIONS)]
        hours, megabytes, every = array("d"), array("d"), _CYCLE
        for n in range(round((HOURS if full else SCALED) * 3600 * HZ)):
            await _round(made, robots, n, draw)
            await clock.advance(1 / HZ)
            if n % every == 0:
                made.check()
                gc.collect()
                hours.append(n / HZ / 3600)
                megabytes.append(used() / _MB)
                if len(hours) == 256:  # keep few, spread over all the time there was
                    hours, megabytes, every = hours[::2], megabytes[::2], 2 * every
        _check_bounds(made)
    settled = len(hours) // 3  # what is bounded has reached its bound by then
    return float(np.polyfit(hours[settled:], megabytes[settled:], 1)[0])


async def _round(made: Bed, robots: list[Robot], n: int, draw: np.random.Generator) -> None:
    """All sessions at once: most observe, some imagine or go back, and now and then a model fails."""
    calls = []
    for i, robot in enumerate(robots):
        turn = (n + 7 * i) % _CYCLE
        if turn == 50 and robot.step >= 0:
            calls.append(robot.predict(some_actions(draw, 2)))
        elif turn == 51:
            calls.append(robot.recondition(row(draw, 2)))
        else:
            calls.append(robot.infer(row(draw), frames=2 if turn % 10 == 3 else 0))
            if turn == 70:
                made.faults.plant("act", robot.info.id, lambda item, outputs: {})
    for robot, outcome in zip(robots, await asyncio.gather(*calls), strict=True):
        turn = (n + 7 * robots.index(robot)) % _CYCLE
        if turn == 70:
            expect(made.faults.lift("act", robot.info.id) > 0, "a fault never happened")
        if isinstance(outcome, OmniLoopError) != (turn == 70):
            raise Broken(f"round {n}: {outcome}")
        robot.done.clear()
    if n % (5 * _CYCLE) == 4 * _CYCLE + 1:
        await _branch(made, robots[n // (5 * _CYCLE) % len(robots)], draw)


async def _branch(made: Bed, robot: Robot, draw: np.random.Generator) -> None:
    """A child lives for a tick; its parent begins anew."""
    core, info = made.core, robot.info
    child = Robot(made, await core.fork(info.id, info.token), robot.seq, robot.step)
    await child.infer(row(draw))
    await core.close(child.info.id, child.info.token)
    await core.rewind(info.id, info.token, robot.step)
    await core.reset(info.id, info.token)
    robot.step = -1


def _check_bounds(made: Bed) -> None:
    """What one session may keep besides its state."""
    for live in made.core._live.values():
        log = live.session.log
        expect(log.nbytes <= _CONFIG.log_bytes, f"a session's log has {log.nbytes} bytes")
        expect(len(log.kept) <= _CONFIG.rewind_ticks, f"a session keeps {len(log.kept)} versions")


def _resident() -> int:
    """Bytes of this process in memory."""
    with open("/proc/self/statm", encoding="ascii") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class _Mallinfo2(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in [
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        ]
    ]


def in_use() -> int:
    """Bytes that were allocated and not freed: of the C heap as it counts them; of Python's own, blocks of 64 each."""
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = _Mallinfo2
    info = libc.mallinfo2()
    return int(info.uordblks + info.hblkhd) + 64 * sys.getallocatedblocks()
