"""Mode ``live``: a simulated clock goes on while the policy thinks, as on a robot::

    period    0 1 2 3 4 5 6 7 8 9 ..
    asks        o     o     o           the observation of a period leaves
    answers       - - B - - C - - D     and is there so many periods later (here 3)
    plays     A A A A B B B C C C       meanwhile the chunk before is played; none is left: a deadline is missed

The simulator runs in lockstep with that clock, so that a result is a pure function of task, episode and seed however
fast the machine is. What is played when, and when it is asked, is decided by the very
:class:`~omni_loop.client.playback.Playback` that a robot's ``ChunkPlayer`` uses.

One observation is under way at a time. With chunks ``joined`` a second one leaves when an answer takes longer than
those before it (jitter, ``measured``), which on a robot supersedes the first; answers come in the order of asking.

An episode's clock starts with its first chunk, as a robot waits for its first one (``ChunkPlayer.wait``).
"""

from __future__ import annotations

import math
import zlib
from collections import deque
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from omni_loop.client.playback import Playback, Sending
from omni_loop.types import ActionChunk

from .api import LoopSession
from .course import Course
from .drive import checked
from .suite import Live

_ABOVE = 1e-9  # of a period: 0.7 s at 10 Hz are 7 periods, whatever rounding says
_STREAM = 12  # of a seed's random numbers


@dataclass(frozen=True, slots=True)
class _UnderWay:
    """An answer on its way: played from ``due`` on."""

    due: int
    sending: Sending
    chunk: ActionChunk


class Latency:
    """How many control periods each answer takes. The same for the same task, seed and tick, unless it is measured."""

    def __init__(self, live: Live, hz: float, task: str, seed: int) -> None:
        self._live, self._hz = live, hz
        self._stream = [zlib.crc32(task.encode()), seed, _STREAM]

    def periods(self, tick: int, round_trip_ms: float) -> int:
        live, ms = self._live, self._live.latency_ms
        if live.jitter_ms:
            ms += live.jitter_ms * np.random.default_rng([*self._stream, tick]).standard_normal()
        if live.measured:
            ms += round_trip_ms
        return max(0, math.ceil(ms * self._hz / 1e3 - _ABOVE))


def drive_live(course: Course, session: LoopSession, task: str) -> None:
    """Runs ``course`` to its end; counts the periods in which no action was there as ``misses``."""
    suite, live = course.suite, course.suite.live
    watchdog = "hold" if suite.hold is None else np.array(suite.hold, np.float32)
    horizon = suite.execution_horizon or session.spec.execution_horizon
    robot = _Robot(course, session, Playback(session.spec, watchdog, None, horizon, live.join), horizon)
    latency = Latency(live, session.spec.control_hz, task, course.seed)
    course.reset(suite.keys)
    under_way: deque[_UnderWay] = deque()

    def arrive() -> None:
        while under_way and under_way[0].due <= robot.period:
            come = under_way.popleft()
            robot.take(come.sending, come.chunk)

    while not course.over:
        arrive()
        if (asked := robot.ask()) is not None:
            takes = latency.periods(len(course.ticks) - 1, course.ticks[-1].round_trip_ms)
            waits = takes if robot.playing else 0  # the clock starts with the first chunk
            under_way.append(_UnderWay(robot.period + waits, *asked))
            if not robot.playing:
                robot.expects(takes)
        arrive()  # an answer that takes no time
        robot.act()


class _Robot:
    """A playback, the env it acts in and the session it asks."""

    def __init__(self, course: Course, session: LoopSession, playback: Playback, horizon: int) -> None:
        self._course, self._session, self._playback, self._horizon = course, session, playback, horizon
        self._chunks = course.suite.live.chunks
        self._rows: list[NDArray[np.float32]] = []  # executed ones of chunks, by control step
        self._told = 0  # steps the server knows of
        self._first = 0.0
        self.playing = False

    @property
    def period(self) -> int:
        return self._playback.period

    def expects(self, periods: int) -> None:
        """What the first answer would have taken, had somebody played meanwhile."""
        self._first = max(periods - 0.5, 0.0) / self._session.spec.control_hz

    def ask(self) -> tuple[Sending, ActionChunk] | None:
        """Send what is seen now, if it is time; the answer, which is not there yet."""
        keys = self._course.suite.keys
        self._playback.see({})  # the env is looked at only for what is sent
        if self._chunks == "waiting" and not self._playback.dry:
            return None
        sending = self._playback.due()
        if sending is None:
            return None
        step = sending.seen.step
        more = {} if sending.executed_through is None else {"executed_through": sending.executed_through}
        result = self._course.infer(self._session, self._course.observe(keys), step, self._executed(step), **more)
        chunk = checked(result.chunk, step, self._horizon)
        self._course.revision = chunk.policy_revision
        return sending, chunk

    def take(self, sending: Sending, chunk: ActionChunk) -> None:
        if self._chunks == "naive":
            chunk = replace(chunk, first_step=self._playback.step)
        elif self._chunks == "waiting":
            chunk = replace(chunk, actions=chunk.actions[: self._horizon])
        self._playback.answered(sending, chunk, 0.0 if self.playing else self._first)
        self.playing = True

    def act(self) -> None:
        """This period's action."""
        played = self._playback.next()
        assert played.action is not None  # the first chunk is there before the first period
        action = self._course.clip(played.action)
        if played.source == "chunk":
            self._rows.append(action)
        else:
            self._course.misses += 1
        self._course.step(action)

    def _executed(self, step: int) -> NDArray[np.float32] | None:
        """Rows since the last observation; in lockstep the server has committed every one that left."""
        if not self._course.ticks:
            return None
        rows, self._told = self._rows[self._told : step], step
        return np.stack(rows) if rows else np.zeros((0, *self._session.spec.action.shape), np.float32)
