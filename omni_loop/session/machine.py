"""A session's life as a transition table, without any IO: what is accepted, repeated, stale or refused.

Rules of ``seq``: it starts at 1 and grows; gaps are allowed, since newer observations may replace ones that were
never sent. The seq answered last is answered again from the cache; one that is waiting or running is joined; the
highest one may be sent again after it failed (nothing was committed); everything else is stale.

Rules of ``epoch``: +1 at a reset, at a rewind, and when a recondition replaces steps that were already committed. The
tick number counts commits within the epoch, so a retried tick draws the same noise, and a plan, which commits nothing,
leaves the noise of the ticks after it as it was.

Eviction is seen when a runner refuses: the state is made anew (REBUILDING) before the tick goes on, and when that fails
the session stays EVICTED, to be rebuilt by whoever calls next.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .._compat import StrEnum
from ..errors import Exhausted, InvalidInput, OmniLoopError, Reason, StateError


class Phase(StrEnum):
    NEW = "new"  # state is being allocated
    IDLE = "idle"
    RUNNING = "running"  # a tick runs, nothing of it is committed
    REBUILDING = "rebuilding"  # its state was evicted and is made anew, then the tick runs
    TRAILING = "trailing"  # its answer is committed; what was asked besides runs
    EVICTED = "evicted"  # idle, and the runners' state must be made anew before anything else
    LOST = "lost"  # a runner may have kept or dropped what another did not
    CLOSED = "closed"


class Event(StrEnum):
    OPENED = "opened"
    STARTED = "started"
    COMMITTED = "committed"
    ANSWERED = "answered"  # a tick that commits nothing
    FINISHED = "finished"
    FAILED = "failed"
    RESET = "reset"
    REWOUND = "rewound"
    EVICTED = "evicted"
    REBUILT = "rebuilt"
    LOST = "lost"
    CLOSED = "closed"


class Verdict(StrEnum):
    """What to do with a seq that arrived."""

    NEW = "new"  # run it when its turn comes
    REPEAT = "repeat"  # answer from the cache
    JOIN = "join"  # wait for the one that is under way


TABLE: dict[tuple[Phase, Event], Phase] = {
    (Phase.NEW, Event.OPENED): Phase.IDLE,
    (Phase.NEW, Event.CLOSED): Phase.CLOSED,
    (Phase.IDLE, Event.STARTED): Phase.RUNNING,
    (Phase.IDLE, Event.RESET): Phase.IDLE,
    (Phase.IDLE, Event.REWOUND): Phase.IDLE,
    (Phase.IDLE, Event.EVICTED): Phase.EVICTED,
    (Phase.IDLE, Event.LOST): Phase.LOST,
    (Phase.IDLE, Event.CLOSED): Phase.CLOSED,
    (Phase.RUNNING, Event.COMMITTED): Phase.TRAILING,
    (Phase.RUNNING, Event.ANSWERED): Phase.TRAILING,
    (Phase.RUNNING, Event.FAILED): Phase.IDLE,
    (Phase.RUNNING, Event.EVICTED): Phase.REBUILDING,
    (Phase.RUNNING, Event.LOST): Phase.LOST,
    (Phase.RUNNING, Event.CLOSED): Phase.CLOSED,
    (Phase.REBUILDING, Event.REBUILT): Phase.RUNNING,
    (Phase.REBUILDING, Event.FAILED): Phase.EVICTED,
    (Phase.REBUILDING, Event.LOST): Phase.LOST,
    (Phase.REBUILDING, Event.CLOSED): Phase.CLOSED,
    (Phase.TRAILING, Event.FINISHED): Phase.IDLE,
    (Phase.TRAILING, Event.LOST): Phase.LOST,
    (Phase.TRAILING, Event.CLOSED): Phase.CLOSED,
    (Phase.EVICTED, Event.STARTED): Phase.REBUILDING,
    (Phase.EVICTED, Event.REBUILT): Phase.IDLE,
    (Phase.EVICTED, Event.RESET): Phase.IDLE,
    (Phase.EVICTED, Event.REWOUND): Phase.IDLE,
    (Phase.EVICTED, Event.LOST): Phase.LOST,
    (Phase.EVICTED, Event.CLOSED): Phase.CLOSED,
    (Phase.LOST, Event.CLOSED): Phase.CLOSED,
}


@dataclass(frozen=True, slots=True)
class Position:
    """Where a session stands: ``step`` now (maybe imagined), ``observed`` the last real one (-1: none yet in this
    epoch), ``origin`` the first one committed (-1: none)."""

    step: int = 0
    observed: int = -1
    origin: int = -1


@dataclass(slots=True)
class SessionMachine:
    """All methods either apply completely or raise and change nothing."""

    max_waiting: int = 4  # ticks accepted and not finished, beyond the running one
    phase: Phase = Phase.NEW
    epoch: int = 0
    tick: int = 0  # of the next tick, within the epoch
    position: Position = Position()
    answered: int = 0  # seq whose reply is cached; 0: none in this epoch
    accepted: int = 0  # highest seq ever accepted
    failed: int = 0  # the highest seq, when it may be sent again
    running: int = 0  # seq whose tick runs; 0: none, or it is over and only being undone
    pending: list[int] = field(default_factory=list)  # accepted and not over, oldest first

    @property
    def usable(self) -> bool:
        return self.phase not in (Phase.NEW, Phase.LOST, Phase.CLOSED)

    def opened(self) -> None:
        self.phase = self._next(Event.OPENED)

    def judge(self, seq: int) -> Verdict:
        """What to do with ``seq``; changes nothing.

        Raises:
            InvalidInput: below 1. StateError: stale, or the session is closed or lost. Exhausted: too many wait.
        """
        self.check_usable()
        if seq < 1:
            raise InvalidInput(f"seq is {seq}; a session's first is 1")
        if seq in self.pending:
            return Verdict.JOIN
        if seq == self.answered:
            return Verdict.REPEAT
        if seq <= self.accepted and seq != self.failed:
            raise StateError(f"seq {seq} is stale: the session is at seq {self.accepted}", reason=Reason.STALE_SEQ)
        if len(self.pending) > self.max_waiting:
            raise Exhausted(f"{len(self.pending)} ticks of this session wait already", reason=Reason.BUSY)
        return Verdict.NEW

    def accept(self, seq: int) -> None:
        """A seq judged NEW is pending from now on. Anything else raises, as :meth:`judge` does or as stale."""
        verdict = self.judge(seq)
        if verdict is not Verdict.NEW:
            raise StateError(f"seq {seq} was accepted before ({verdict})", reason=Reason.STALE_SEQ)
        self.pending.append(seq)
        self.accepted = seq
        self.failed = 0

    def dropped(self, seq: int) -> None:
        """A pending seq is over with nothing committed; the highest one may be sent again. One that is not
        pending: nothing happens. The phase stays: a running tick is still being undone."""
        if seq in self.pending and not (self.phase is Phase.TRAILING and seq == self.running):
            self.pending.remove(seq)
            self.failed = seq if seq == self.accepted else self.failed
            self.running = 0 if seq == self.running else self.running

    def started(self, seq: int) -> None:
        """The turn of ``seq`` has come: the oldest pending one."""
        phase = self._next(Event.STARTED)
        if self.pending[:1] != [seq]:
            raise StateError(f"seq {seq} is not the oldest one waiting", reason=Reason.STALE_SEQ)
        self.phase = phase
        self.running = seq

    def committed(self, seq: int, position: Position, past: bool = False) -> None:
        """The answer of ``seq`` is committed. ``past``: it replaced committed steps and begins a new epoch."""
        phase = self._next(Event.COMMITTED)
        if seq != self.running:
            raise StateError(f"seq {seq} does not run", reason=Reason.STALE_SEQ)
        self.phase = phase
        self.answered = seq
        self.position = position
        self.epoch, self.tick = (self.epoch + 1, 0) if past else (self.epoch, self.tick + 1)

    def replied(self, seq: int) -> None:
        """``seq`` is answered and nothing of it is committed: position, epoch and tick stay."""
        phase = self._next(Event.ANSWERED)
        if seq != self.running:
            raise StateError(f"seq {seq} does not run", reason=Reason.STALE_SEQ)
        self.phase = phase
        self.answered = seq

    def finished(self) -> None:
        """What ran besides the answer is over too."""
        self.phase = self._next(Event.FINISHED)
        self.pending.remove(self.running)
        self.running = 0

    def undone(self) -> None:
        """The running tick failed and is undone: everything is as before it."""
        self.phase = self._next(Event.FAILED)
        self.dropped(self.running)

    def reset(self) -> int:
        """A new epoch; replies of the old one are never given again. Returns the epoch."""
        self.phase = self._next(Event.RESET)
        self.epoch += 1
        self.tick = 0
        self.position = Position()
        self.answered = self.failed = 0
        return self.epoch

    def rewound(self, position: Position) -> int:
        """A new epoch that begins at an earlier ``position``; replies of the old one are never given again."""
        self.phase = self._next(Event.REWOUND)
        self.epoch += 1
        self.tick = 0
        self.position = position
        self.answered = self.failed = 0
        return self.epoch

    def evicted(self) -> None:
        """A runner has given the session's state to others; the tick that found out waits until it is made anew."""
        self.phase = self._next(Event.EVICTED)

    def rebuilt(self) -> None:
        """The runners' state is as after the last commit again."""
        self.phase = self._next(Event.REBUILT)

    def forked(self) -> SessionMachine:
        """A NEW machine that stands where this one does; its seqs follow the last one that is over here."""
        over = self.pending[0] - 1 if self.pending else self.accepted
        return SessionMachine(self.max_waiting, epoch=self.epoch, tick=self.tick, position=self.position, accepted=over)

    def lost(self) -> None:
        """State of the session is gone or doubtful; only closing is left."""
        self.phase = self._next(Event.LOST)
        self.pending.clear()
        self.running = 0

    def closed(self) -> None:
        self.phase = self._next(Event.CLOSED)
        self.pending.clear()
        self.running = 0

    def check_usable(self) -> None:
        """Raise StateError when the session is not open, lost or closed."""
        if not self.usable:
            raise self.refusal(Event.STARTED)

    def _next(self, event: Event) -> Phase:
        phase = TABLE.get((self.phase, event))
        if phase is None:
            raise self.refusal(event)
        return phase

    def refusal(self, event: Event = Event.STARTED) -> OmniLoopError:
        """Why ``event`` is not possible now."""
        if self.phase is Phase.LOST:
            step = self.position.step
            return StateError(
                f"the session's state was lost; its last committed step is {step}", reason=Reason.SESSION_LOST
            )
        if self.phase is Phase.CLOSED:
            return StateError("the session is closed", reason=Reason.CLOSED)
        return StateError(f"a session that is {self.phase} cannot be {event}", reason=Reason.BUSY)
