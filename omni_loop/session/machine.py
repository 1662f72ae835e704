"""A session's life as a transition table, without any IO: what is accepted, repeated, stale or refused.

Rules of ``seq``: it starts at 1 and grows; gaps are allowed and counted, since newer observations may replace ones
that were never sent. One whose answer is kept is answered again from what is kept; one that is waiting or running is
joined; one that failed (nothing was committed) may be sent again until a later one came; everything else is stale.

Rules of ``attachment``: +1 at every attach of a stream; whoever holds an older one is fenced. It is not the epoch:
noise is a function of the epoch, and a resumed stream answers what an uncut one would have.

Rules of ``epoch``: +1 at a reset, at a rewind, and when a recondition replaces steps that were already committed. The
tick number counts commits within the epoch, so a retried tick draws the same noise, and a plan, which commits nothing,
leaves the noise of the ticks after it as it was.

Eviction is seen when a runner refuses: the state is made anew (REBUILDING) before the tick goes on, and when that fails
the session stays EVICTED, to be rebuilt by whoever calls next.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from .._compat import StrEnum
from ..errors import Code, Exhausted, InvalidInput, OmniLoopError, Reason, ServerUnavailable, StateError


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


class Standing(StrEnum):
    """What the session is to a seq that arrives."""

    OPEN = "open"
    DRAINING = "draining"  # the server is about to stop
    LOST = "lost"
    CLOSED = "closed"  # or not open yet


class Arrival(StrEnum):
    """What a seq that arrives is to its session."""

    NEXT = "next"  # one above the highest accepted
    AHEAD = "ahead"  # more than one above it: those between were never sent, or got lost
    WAITING = "waiting"  # accepted, and not over
    ANSWERED = "answered"  # its answer is kept
    FAILED = "failed"  # ended with nothing committed, and none after it was accepted
    OLD = "old"  # everything else: answered and forgotten, superseded, of an earlier epoch, or never sent in time


class Verdict(StrEnum):
    """What to do with a seq that arrived."""

    NEW = "new"  # accept: run it when its turn comes
    GAPPED = "gapped"  # accept, and count what is missing before it
    REPEAT = "repeat"  # a duplicate: give the kept answer again
    JOIN = "join"  # a duplicate: wait for the one that is under way
    STALE = "stale"
    DRAINING = "draining"
    LOST = "lost"
    CLOSED = "closed"


ACCEPTED = (Verdict.NEW, Verdict.GAPPED)

VERDICTS: dict[tuple[Standing, Arrival], Verdict] = {
    (Standing.OPEN, Arrival.NEXT): Verdict.NEW,
    (Standing.OPEN, Arrival.AHEAD): Verdict.GAPPED,
    (Standing.OPEN, Arrival.WAITING): Verdict.JOIN,
    (Standing.OPEN, Arrival.ANSWERED): Verdict.REPEAT,
    (Standing.OPEN, Arrival.FAILED): Verdict.NEW,
    (Standing.OPEN, Arrival.OLD): Verdict.STALE,
    # Who asks for what is under way or answered still gets it; nothing new begins.
    (Standing.DRAINING, Arrival.NEXT): Verdict.DRAINING,
    (Standing.DRAINING, Arrival.AHEAD): Verdict.DRAINING,
    (Standing.DRAINING, Arrival.WAITING): Verdict.JOIN,
    (Standing.DRAINING, Arrival.ANSWERED): Verdict.REPEAT,
    (Standing.DRAINING, Arrival.FAILED): Verdict.DRAINING,
    (Standing.DRAINING, Arrival.OLD): Verdict.STALE,
    **{(Standing.LOST, arrival): Verdict.LOST for arrival in Arrival},
    **{(Standing.CLOSED, arrival): Verdict.CLOSED for arrival in Arrival},
}


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
    answered: int = 0  # the highest seq answered with a result; 0: none in this epoch
    accepted: int = 0  # highest seq ever accepted
    failed: list[int] = field(default_factory=list)  # those that may be sent again, ascending
    kept: list[int] = field(default_factory=list)  # those whose answers are kept, ascending
    forgotten: int = 0  # the highest one answered in this epoch whose answer is kept no longer
    attachment: int = 0  # of the newest stream
    draining: bool = False
    running: int = 0  # seq whose tick runs; 0: none, or it is over and only being undone
    pending: list[int] = field(default_factory=list)  # accepted and not over, oldest first

    @property
    def usable(self) -> bool:
        return self.phase not in (Phase.NEW, Phase.LOST, Phase.CLOSED)

    def opened(self) -> None:
        self.phase = self._next(Event.OPENED)

    @property
    def standing(self) -> Standing:
        if self.phase is Phase.LOST:
            return Standing.LOST
        if not self.usable:
            return Standing.CLOSED
        return Standing.DRAINING if self.draining else Standing.OPEN

    def arrival(self, seq: int) -> Arrival:
        """What ``seq``, 1 or more, is to the session."""
        if seq in self.pending:
            return Arrival.WAITING
        if seq in self.kept:
            return Arrival.ANSWERED
        if seq in self.failed and seq > max(self.pending, default=0):
            return Arrival.FAILED
        if seq <= self.accepted:
            return Arrival.OLD
        return Arrival.NEXT if seq == self.accepted + 1 else Arrival.AHEAD

    def judge(self, seq: int, freeing: int = 0) -> Verdict:
        """What to do with ``seq``; changes nothing. ``freeing``: how many that wait would be superseded by it.

        Raises:
            InvalidInput: below 1. StateError: stale, or the session is closed or lost. Exhausted: too many wait.
            ServerUnavailable: draining.
        """
        self.check_usable()
        if seq < 1:
            raise InvalidInput(f"seq is {seq}; a session's first is 1")
        verdict = VERDICTS[self.standing, self.arrival(seq)]
        if verdict is Verdict.STALE:
            raise StateError(f"seq {seq} is stale: the session is at seq {self.accepted}", reason=Reason.STALE_SEQ)
        if verdict is Verdict.DRAINING:
            raise ServerUnavailable("the server is about to stop", reason=Reason.DRAINING)
        if verdict in ACCEPTED and len(self.pending) - freeing > self.max_waiting:
            raise Exhausted(f"{len(self.pending)} ticks of this session wait already", reason=Reason.BUSY)
        return verdict

    def accept(self, seq: int) -> None:
        """A seq judged NEW or GAPPED is pending from now on. Else it raises, as :meth:`judge` does or as stale."""
        verdict = self.judge(seq)
        if verdict not in ACCEPTED:
            raise StateError(f"seq {seq} was accepted before ({verdict})", reason=Reason.STALE_SEQ)
        self.pending.append(seq)
        self.accepted = max(self.accepted, seq)
        self.failed = [other for other in self.failed if other > seq]

    def superseded(self, seq: int) -> None:
        """A pending seq that has not begun is replaced by a newer one, for good: it cannot be sent again."""
        if seq not in self.pending or seq == self.running:
            raise StateError(f"seq {seq} does not wait", reason=Reason.STALE_SEQ)
        self.pending.remove(seq)

    def attached(self) -> int:
        """A stream attaches; its number. Older ones are fenced."""
        self.check_usable()
        self.attachment += 1
        return self.attachment

    def check_attachment(self, number: int) -> None:
        """Raises StateError (aborted, fenced) for any attachment but the newest."""
        if number != self.attachment:
            raise StateError("a newer stream has attached to this session", code=Code.ABORTED, reason=Reason.FENCED)

    def forgot(self, seqs: Collection[int]) -> None:
        """Answers of ``seqs`` are kept no longer."""
        self.kept = [seq for seq in self.kept if seq not in seqs]
        self.forgotten = max(self.forgotten, *seqs) if seqs else self.forgotten

    def dropped(self, seq: int) -> None:
        """A pending seq is over with nothing committed; it may be sent again until a later one comes. One that is not
        pending: nothing happens. The phase stays: a running tick is still being undone."""
        if seq in self.pending and not (self.phase is Phase.TRAILING and seq == self.running):
            self.pending.remove(seq)
            self.failed = sorted({*self.failed, seq})
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
        self._answered(seq)
        self.position = position
        self.epoch, self.tick = (self.epoch + 1, 0) if past else (self.epoch, self.tick + 1)

    def replied(self, seq: int) -> None:
        """``seq`` is answered and nothing of it is committed: position, epoch and tick stay."""
        phase = self._next(Event.ANSWERED)
        if seq != self.running:
            raise StateError(f"seq {seq} does not run", reason=Reason.STALE_SEQ)
        self.phase = phase
        self._answered(seq)

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
        self._forget()
        return self.epoch

    def rewound(self, position: Position) -> int:
        """A new epoch that begins at an earlier ``position``; replies of the old one are never given again."""
        self.phase = self._next(Event.REWOUND)
        self.epoch += 1
        self.tick = 0
        self.position = position
        self._forget()
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

    def _answered(self, seq: int) -> None:
        self.answered = seq
        self.kept.append(seq)
        self.failed = [other for other in self.failed if other > seq]

    def _forget(self) -> None:
        """Answers of the epoch before are never given again, and what failed in it is not sent again."""
        self.answered = self.forgotten = 0
        self.kept, self.failed = [], []

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
