"""Which action is for which control period, without IO and without a clock: what :mod:`.player` does with its answers.

::

    chunk A   0 1 2 3 4 5 6 7          rows by control step
    chunk B         3 4 5 6 7 8 9 ..   made from the observation at step 3, there when step 5 is next
    played    0 1 2 3 4|5 6 7 8 ..     B takes over with its own row for step 5: nothing is skipped, nothing repeated

A *step* is an action of a chunk that was handed out; a *period* is one call of :meth:`Playback.next`. They differ when
actions have run dry: a watchdog action takes a period and no step, so that the chunk that comes goes on where the last
one ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Union

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import InvalidInput, TensorError, nearest
from ..types import ActionChunk, Array, SessionSpec
from .book import as_array
from .delays import Delays, Seams

Action = NDArray[np.float32]
Watchdog = Union[Literal["hold", "stop", "home"], ArrayLike]  # noqa: UP007  3.10
WATCHDOGS = ("hold", "stop", "home")


@dataclass(frozen=True, slots=True)
class Played:
    """The action of one control period. ``source`` "chunk": ``action float32[action_dim]`` is that of control step
    ``step``, from the answer ``seq``. ``source`` "watchdog": there is none, and ``action`` is the watchdog's, which is
    None where it is to hold and nothing was played in this episode: command nothing."""

    action: Action | None
    step: int
    source: Literal["chunk", "watchdog"]
    seq: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """An observation as it was handed in, when ``step`` was the next one."""

    arrays: Mapping[str, Array]
    step: int
    captured_ns: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Sending:
    """An observation to send. ``executed``: None lets the server take them from the chunk it sent. ``period`` and
    ``episode``: when it leaves."""

    seen: Seen
    executed: Action | None
    executed_through: int | None
    supersede: bool
    period: int
    episode: int


@dataclass(slots=True)
class Counts:
    """Since the player began."""

    played: int = 0  # actions of chunks
    watchdog: int = 0  # periods without one
    sent: int = 0
    chunks: int = 0  # that took over
    late: int = 0  # chunks all of whose rows were for steps that are over
    stale: int = 0  # answers of an episode that is over
    skipped: int = 0
    refused: int = 0
    resets: int = 0
    seams: Seams = field(default_factory=Seams)


class Playback:
    """Belongs to one thread at a time. ``execution_horizon``: rows of a chunk that are played before the next takes
    over, 0: as the spec says. ``join``: real-time chunking is asked for (``executed_through``), and an observation that
    is not answered in time is superseded by a newer one."""

    def __init__(
        self,
        spec: SessionSpec,
        watchdog: Watchdog = "hold",
        home: ArrayLike | None = None,
        execution_horizon: int = 0,
        join: bool = True,
    ) -> None:
        if not 0 <= execution_horizon <= spec.horizon:
            text = f"execution_horizon is {execution_horizon}; it must be 1..{spec.horizon}, or 0 for the pipeline's"
            raise InvalidInput(text)
        self._spec, self._join = spec, join
        self._every = execution_horizon or spec.execution_horizon
        self._idle = _idle(spec, watchdog, home)  # None: hold
        self.counts = Counts()
        self.delays = Delays(spec.control_hz)
        self.period = 0
        self.episode = 0
        self._begin()

    def _begin(self) -> None:
        self.step = 0
        self._chunk: ActionChunk | None = None
        self._playing = 0  # seq of the chunk the last action came from
        self._last: Action | None = None
        self._committed = -1  # step of the last observation that was answered with a chunk
        self._executed: deque[Action] = deque()  # since then
        self._sure = True  # that the server has committed what was answered, and nothing else
        self._seen: Seen | None = None
        self._under_way: list[Sending] = []

    @property
    def dry(self) -> bool:
        """No action is there for the next period."""
        return self._row() is None

    def next(self) -> Played:
        """The action of this period."""
        self.period += 1
        row = self._row()
        if row is None or self._chunk is None:
            self.counts.watchdog += 1
            return Played(self._last if self._idle is None else self._idle, self.step, "watchdog")
        if self._last is not None:
            self.counts.seams.add(row - self._last, seam=self._playing != self._chunk.seq)
        self._playing, self._last = self._chunk.seq, row
        self._executed.append(row)
        self.counts.played += 1
        self.step += 1
        return Played(row, self.step - 1, "chunk", self._chunk.seq)

    def see(self, arrays: Mapping[str, Array], captured_ns: int = 0) -> None:
        """What was sensed before the action of the next step; replaces what was seen before and not sent."""
        self._seen = Seen(arrays, self.step, captured_ns)

    def due(self) -> Sending | None:
        """The newest observation, when it is time to send it: so early that the answer is there when
        ``execution_horizon`` rows of the present chunk have been played. It is under way then, until :meth:`answered`
        or :meth:`failed`."""
        seen, lead = self._seen, self.delays.periods
        if seen is None or not self._wanted(seen, lead):
            return None
        self._seen = None
        alone = not self._under_way
        sending = Sending(
            seen,
            # Whether one that is under way will have been committed only the server knows.
            executed=self._rows(seen) if alone and self._sure else None,
            executed_through=self.step + lead - 1 if self._join and self._chunk is not None else None,
            supersede=not alone,
            period=self.period,
            episode=self.episode,
        )
        self._under_way.append(sending)
        self.counts.sent += 1
        return sending

    def answered(self, sending: Sending, chunk: ActionChunk, latency_s: float = 0.0) -> None:
        """``chunk`` answers ``sending``."""
        if not self._over(sending):
            return
        self.delays.add(self.period - sending.period, latency_s)
        self._commit(sending.seen.step)
        if self._chunk is not None and chunk.first_step < self._chunk.first_step:
            self.counts.late += 1  # a newer one plays
            return
        if chunk.first_step + len(chunk.actions) <= self.step:
            self.counts.late += 1
            return
        self._chunk = chunk
        self.counts.chunks += 1

    def failed(self, sending: Sending, skipped: bool, unsure: bool = False) -> None:
        """``sending`` was ``skipped``, or refused; ``unsure``: perhaps since the server stands at another step."""
        if not self._over(sending):
            return
        self._sure = not unsure
        if skipped:
            self.counts.skipped += 1
        else:
            self.counts.refused += 1

    def reset(self) -> None:
        """A new episode: nothing of the one before is played any more, not even to hold it."""
        self.episode += 1
        self.counts.resets += 1
        self._begin()

    def _row(self) -> Action | None:
        if self._chunk is None:
            return None
        at = self.step - self._chunk.first_step
        return self._chunk.actions[at] if 0 <= at < len(self._chunk.actions) else None

    def _wanted(self, seen: Seen, lead: int) -> bool:
        if self._under_way:
            newest = self._under_way[-1]
            late = len(self._under_way) < 2 and self.period - newest.period > lead and self.delays.known
            return self._join and late and seen.step > newest.seen.step
        if self._chunk is None or self.dry:
            return True
        return seen.step > self._chunk.first_step and self.step + lead - self._chunk.first_step >= self._every

    def _rows(self, seen: Seen) -> Action:
        """``float32[n, action_dim]`` executed since the observation the server has committed."""
        rows = list(self._executed)[: seen.step - self._committed] if self._committed >= 0 else []
        return np.stack(rows) if rows else np.zeros((0, *self._spec.action.shape), np.float32)

    def _commit(self, step: int) -> None:
        before = self._committed if self._committed >= 0 else 0
        for _ in range(max(step - before, 0)):
            self._executed.popleft()
        self._committed, self._sure = max(self._committed, step), True

    def _over(self, sending: Sending) -> bool:
        """Whether it is one of this episode; it is not under way any more."""
        if sending.episode != self.episode:
            self.counts.stale += 1
            return False
        self._under_way.remove(sending)
        return True


def _idle(spec: SessionSpec, watchdog: Watchdog, home: ArrayLike | None) -> Action | None:
    """The watchdog's action; None: the last one is held."""
    if isinstance(watchdog, str):
        if watchdog not in WATCHDOGS:
            raise InvalidInput(f"no watchdog is called {watchdog!r}.{nearest(watchdog, WATCHDOGS)} Or give an action")
        if watchdog == "hold":
            return None
        if watchdog == "stop":
            return _action(spec, np.zeros(spec.action.shape, np.float32), "stop")
        if home is None:
            raise InvalidInput("the watchdog 'home' needs the action that leads there: home=[...]")
        return _action(spec, home, "home")
    return _action(spec, watchdog, "watchdog")


def _action(spec: SessionSpec, value: ArrayLike, name: str) -> Action:
    action = np.array(as_array(spec.action, value, name))
    if action.dtype != np.float32 or action.shape != spec.action.shape:
        wanted = f"float32{list(spec.action.shape)}"
        raise TensorError(f"{name!r} is {action.dtype}{list(action.shape)}; an action is {wanted}")
    low, high = spec.action.low, spec.action.high
    if (low is not None and action.min() < low) or (high is not None and action.max() > high):
        raise TensorError(f"{name!r} leaves the action's range {low}..{high}")
    return action
