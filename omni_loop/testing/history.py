"""What clients of one session saw, and a sequential model of a session that says whether it can have been so.

Clients log in the order things happened (one event loop, one :class:`History` per session); :meth:`History.check`
replays the log. Held: no answer that nobody asked for, one terminal answer per request, one computation per seq, a
total order of commits without lost, doubled or swapped state, epochs and attachments that never go back, never two
writers, and no accepted request without an answer. After Kingsbury's Jepsen and Herlihy & Wing (1990): histories of
calls and answers, checked against a sequential specification.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from ..client import stream as client
from ..errors import Reason
from ..types import TickResult
from ..wire import replies
from .board import expect

Kind = Literal["tick", "skipped", "error"]
State = Callable[[TickResult], "int | None"]

# A seq that was answered by a tick may be refused when it is asked for again, but not as if it had been run again.
_RUN_AGAIN = {Reason.EXPIRED, Reason.CANCELLED, Reason.STAGE_FAILED, Reason.BAD_OUTPUT}
_DUPLICATE = "duplicate_in_flight"


def toy_state(seed: int) -> State:
    """Reads chunks of :class:`~omni_loop.testing.toy_core.ToyCore`: ticks committed in the epoch, this one included.
    Raises :class:`~.board.Broken` for a chunk of another seq. Seeds far apart show a chunk of another session."""

    def read(result: TickResult) -> int | None:
        if result.chunk is None or result.plan is not None:
            return None
        told = round(float(result.chunk.actions[0, 1]) / 100)
        expect(told == result.seq, f"the answer of seq {result.seq} holds a chunk of seq {told}")
        return int(result.chunk.actions[0, 0]) - seed

    return read


@dataclass(frozen=True, slots=True)
class Sent:
    connection: int
    seq: int


@dataclass(frozen=True, slots=True)
class Attached:
    connection: int
    epoch: int
    attachment: int
    accepted: int
    answered: int
    pending: tuple[int, ...] = ()
    last_received: int | None = None  # what the client said


@dataclass(frozen=True, slots=True)
class Answered:
    """``digest``: of all that was answered; ``state``: ticks committed as the answer itself tells it."""

    connection: int
    seq: int
    kind: Kind
    epoch: int = 0  # 0: unknown
    reason: str = ""
    digest: bytes = b""
    state: int | None = None


@dataclass(frozen=True, slots=True)
class Turned:
    """A reset or rewind was answered: ``epoch`` begins."""

    connection: int
    epoch: int
    fresh: bool = True  # by a reset


@dataclass(frozen=True, slots=True)
class Ended:
    """``whole``: the client had no more requests and read to the end; else it was cut or fenced."""

    connection: int
    whole: bool
    fenced: bool = False


Event = Sent | Attached | Answered | Turned | Ended


@dataclass
class History:
    """Log of one session. ``state`` reads the ticks committed from an answer, where answers tell them. ``bytewise``:
    the same seq has the same answer to its last bit; else but for timings (a server that came back computes anew)."""

    state: State | None = None
    bytewise: bool = True
    events: list[Event] = field(default_factory=list)
    _connections: int = 0

    def connect(self) -> int:
        """A number for a new connection: a stream, or one for all unary calls of a client."""
        self._connections += 1
        return self._connections

    def sent(self, connection: int, seq: int) -> None:
        """Just before a request with ``seq`` is sent."""
        self.events.append(Sent(connection, seq))

    def attached(self, event: Attached) -> None:
        self.events.append(event)

    def got(self, connection: int, event: client.Event) -> None:
        """Something a stream yielded; parts of frames, lost frames and drains are no answers."""
        if isinstance(event, TickResult):
            self.tick(connection, event)
        elif isinstance(event, client.Skipped):
            self.events.append(Answered(connection, event.seq, "skipped", reason=event.reason))
        elif isinstance(event, client.Refused) and event.seq:
            self.events.append(Answered(connection, event.seq, "error", event.error.epoch, str(event.error.reason)))
        elif isinstance(event, client.WasReset | client.WasRewound):
            self.events.append(Turned(connection, event.epoch, isinstance(event, client.WasReset)))

    def tick(self, connection: int, result: TickResult) -> None:
        told = None if self.state is None else self.state(result)
        digest = digest_of(result, self.bytewise)
        self.events.append(Answered(connection, result.seq, "tick", result.epoch, digest=digest, state=told))

    def refused(self, connection: int, seq: int, reason: Reason, epoch: int = 0) -> None:
        """A unary call failed."""
        self.events.append(Answered(connection, seq, "error", epoch, str(reason)))

    def ended(self, connection: int, *, whole: bool, fenced: bool = False) -> None:
        self.events.append(Ended(connection, whole, fenced))

    def check(self, complete: bool = True) -> None:
        """Raise :class:`~.board.Broken` with what cannot be. ``complete``: every seq that was sent must have been
        answered by the end, but those only an older, fenced stream sent."""
        model = _Model()
        for event in self.events:
            model.take(event)
        model.check_order()
        if complete:
            model.check_all_answered()


@dataclass
class _Connection:
    sent: Counter[int] = field(default_factory=Counter)
    answered: Counter[int] = field(default_factory=Counter)
    attached: Attached | None = None
    epoch: int = 0  # newest seen on it
    fenced: bool = False  # a newer stream had attached before what it sends now
    ended: bool = False


class _Model:
    """A session as the log lets it be."""

    def __init__(self) -> None:
        self.connections: dict[int, _Connection] = defaultdict(_Connection)
        self.sent: Counter[int] = Counter()
        self.late: set[int] = set()  # seqs sent by fenced streams alone
        self.ticks: dict[int, Answered] = {}  # first tick of a seq
        self.answers: dict[int, list[Answered]] = defaultdict(list)
        self.epoch = 0
        self.epochs: dict[int, bool] = {}  # began by a reset: with nothing committed
        self.attachment = 0
        self.newest = 0  # connection of the newest attachment; 0: none yet

    def take(self, event: Event) -> None:
        connection = self.connections[event.connection]
        expect(not connection.ended, f"connection {event.connection} goes on after its end: {event}")
        if isinstance(event, Sent):
            self._sent(connection, event.seq)
        elif isinstance(event, Attached):
            self._attached(connection, event)
        elif isinstance(event, Answered):
            self._answered(connection, event)
        elif isinstance(event, Turned):
            self._turned(connection, event)
        else:
            connection.ended = True
            connection.fenced |= event.fenced
            if event.whole:
                self._whole(connection)

    def _sent(self, connection: _Connection, seq: int) -> None:
        if connection.fenced and not self.sent[seq]:
            self.late.add(seq)
        elif not connection.fenced:
            self.late.discard(seq)
        connection.sent[seq] += 1
        self.sent[seq] += 1

    def _attached(self, connection: _Connection, event: Attached) -> None:
        expect(connection.attached is None, f"connection {event.connection} attached twice")
        expect(
            event.attachment > self.attachment,
            f"attachment {event.attachment} came after attachment {self.attachment}",
        )
        self._epoch(event.epoch, f"attachment {event.attachment}")
        for seq in event.pending:
            expect(self.sent[seq] > 0, f"seq {seq} is pending, and nobody sent it")
        last = max((s for s, tick in self.ticks.items() if tick.epoch == event.epoch), default=0)
        known = max(last, event.answered)
        expect(event.accepted >= known, f"seq {known} was answered, and the session accepted up to {event.accepted}")
        if self.newest:
            self.connections[self.newest].fenced = True
        self.attachment, self.newest = event.attachment, event.connection
        connection.attached, connection.epoch = event, event.epoch

    def _answered(self, connection: _Connection, event: Answered) -> None:
        seq = event.seq
        expect(self.sent[seq] > 0, f"seq {seq} was answered ({event.kind}), and nobody sent it")
        if event.reason != Reason.FENCED:
            expect(seq not in self.late or event.kind != "tick", f"seq {seq} of a fenced stream was computed")
        connection.answered[seq] += 1
        allowed = connection.sent[seq] + self._replayed(connection, seq)
        count = connection.answered[seq]
        expect(count <= allowed, f"seq {seq} was sent {allowed} times on a connection and answered {count} times")
        if event.kind == "tick":
            self._ticked(connection, event)
        elif seq in self.ticks:
            expect(event.reason not in _RUN_AGAIN, f"seq {seq} was answered, and then refused: {event.reason}")
        self.answers[seq].append(event)

    def _ticked(self, connection: _Connection, event: Answered) -> None:
        first = self.ticks.setdefault(event.seq, event)
        expect(first.digest == event.digest, f"seq {event.seq} was answered in two ways")
        expect(first.epoch == event.epoch, f"seq {event.seq} was answered in epochs {first.epoch} and {event.epoch}")
        told = f"seq {event.seq} was answered in epoch {event.epoch} on a connection at epoch {connection.epoch}"
        expect(event.epoch >= connection.epoch, told)
        connection.epoch = event.epoch
        self.epoch = max(self.epoch, event.epoch)  # another connection may have been told of a reset earlier

    def _turned(self, connection: _Connection, event: Turned) -> None:
        expect(event.epoch > self.epoch, f"epoch {event.epoch} began after epoch {self.epoch}")
        self._epoch(event.epoch, "a reset or rewind")
        self.epochs[event.epoch] = event.fresh
        connection.epoch = event.epoch

    def _epoch(self, epoch: int, where: str) -> None:
        expect(epoch >= self.epoch, f"{where} is of epoch {epoch}, after epoch {self.epoch}")
        self.epoch = epoch

    @staticmethod
    def _replayed(connection: _Connection, seq: int) -> int:
        """Answers that may come without being asked for on this connection: 0 or 1."""
        told = connection.attached
        if told is None:
            return 0
        after = told.last_received is not None and told.last_received < seq <= told.accepted
        return int(after or seq in told.pending)

    def _whole(self, connection: _Connection) -> None:
        for seq, count in connection.sent.items():
            got = connection.answered[seq]
            expect(got >= count, f"seq {seq} was sent {count} times on a whole connection and answered {got} times")
        for seq in connection.attached.pending if connection.attached else ():
            expect(connection.answered[seq] > 0, f"seq {seq} was pending at attach and never answered")

    def check_order(self) -> None:
        """Commits of an epoch are in the order of seq, each one more than the one before; those nobody was told of
        lie between them."""
        by_epoch: dict[int, list[Answered]] = defaultdict(list)
        for tick in self.ticks.values():
            if tick.state is not None:
                by_epoch[tick.epoch].append(tick)
        for epoch, ticks in by_epoch.items():
            ticks.sort(key=lambda tick: tick.seq)
            if self.epochs.get(epoch, epoch == min(by_epoch)):
                self._check_step(0, 0, ticks[0])
            for before, after in pairwise(ticks):
                assert before.state is not None
                self._check_step(before.seq, before.state, after)

    def _check_step(self, seq: int, state: int, after: Answered) -> None:
        assert after.state is not None
        unknown = sum(self._may_be_committed(s) for s in self.sent if seq < s < after.seq)
        made = after.state - state
        expect(
            1 <= made <= 1 + unknown,
            f"from seq {seq} to {after.seq} of epoch {after.epoch} {made} ticks were committed, of 1 to {1 + unknown}",
        )

    def _may_be_committed(self, seq: int) -> bool:
        """Of a seq without a tick: nobody was told, or it was told that a newer answer took its place."""
        if seq in self.ticks:
            return False
        told = [a.reason for a in self.answers[seq] if a.reason != _DUPLICATE]
        return not told or Reason.SUPERSEDED in told or Reason.FENCED in told

    def check_all_answered(self) -> None:
        fenced = {seq for c in self.connections.values() if c.fenced for seq in c.sent}
        for seq in sorted(self.sent):
            told = [a for a in self.answers[seq] if a.reason != _DUPLICATE]
            expect(bool(told) or seq in fenced, f"seq {seq} was sent and never answered")


def digest_of(result: TickResult, bytewise: bool = True) -> bytes:
    """SHA-256 of all that was answered; not ``bytewise``: but for its timings."""
    message = replies.encode_result(result)
    if not bytewise:
        message.ClearField("timings")
    return hashlib.sha256(message.SerializeToString(deterministic=True)).digest()


def check_all(histories: Iterable[History], complete: bool = True) -> None:
    """Each of ``histories`` by itself: sessions share nothing."""
    for history in histories:
        history.check(complete)


__all__: Sequence[str] = (
    "Answered",
    "Attached",
    "Ended",
    "Event",
    "History",
    "Sent",
    "Turned",
    "check_all",
    "digest_of",
    "toy_state",
)
