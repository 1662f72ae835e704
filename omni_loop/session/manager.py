"""Who may use which session and how long it is kept: ids, resume tokens, the bound, leases. No IO.

A session's memory here is bounded: its place, its last chunk, its last replies, receipts for the next tick, and its
log.
"""

from __future__ import annotations

import hmac
import secrets
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..clock import Clock
from ..errors import Exhausted, Reason, UnknownSession
from ..messages import Receipt, Scalar
from ..types import ActionChunk, TickResult
from .log import Room, SessionLog
from .machine import Phase, SessionMachine
from .replies import Replies

_NOBODY = secrets.token_urlsafe(32)  # compared against when the id is unknown, so that both cases cost the same


@dataclass(slots=True)
class Session:
    """One session. ``feedback`` maps names of feedback edges to receipts of the tick before. ``owner``: the principal
    that opened it; "" where nobody has to say who they are. ``fence`` tells the stream that is attached that a newer
    one has come; ``detached``: the last one was lost, and nobody has called since."""

    id: str
    token: str
    pipeline: str
    seed: int
    prompt: str
    keys: tuple[str, ...]
    options: Mapping[str, Scalar]
    machine: SessionMachine
    log: SessionLog[Any]
    replies: Replies
    owner: str = ""
    chunk: ActionChunk | None = None
    feedback: dict[str, Receipt] = field(default_factory=dict)
    busy: int = 0  # calls under way; the lease is suspended meanwhile
    fence: Callable[[], None] | None = None
    detached: bool = False
    doubtful: bool = False  # it came back from an earlier server, which may have answered more than it kept
    kept_at: tuple[int, int] = (0, 0)  # epoch and tick when it was written last, to outlive the server

    def remember(self, reply: TickResult) -> None:
        """``reply`` is given to whoever asks for its seq again."""
        if gone := self.replies.keep(reply):
            self.machine.forgot(gone)

    def forget(self) -> None:
        """Drop what belongs to the state before a reset. The receipts must have been released."""
        self.chunk = None
        self.doubtful = False
        self.replies.clear()
        self.feedback = {}
        self.log.clear()


class SessionManager:
    """The table of sessions. A silent session is due ``idle_ttl_s`` after its last call ended, and one whose stream was
    lost ``grace_s`` after it; while a call is under way neither runs."""

    def __init__(
        self,
        clock: Clock,
        max_sessions: int,
        idle_ttl_s: float,
        max_waiting: int = 4,
        log_bytes: int = 32 << 20,
        rewind_ticks: int = 8,
        grace_s: float = 60.0,
        replies: int = 8,
        logs_bytes: int = 1 << 30,
    ) -> None:
        self._clock = clock
        self._max_sessions = max_sessions
        self._ttl, self._grace, self._replies = idle_ttl_s, grace_s, replies
        self._max_waiting = max_waiting
        self._log_bytes, self._rewind_ticks, self._room = log_bytes, rewind_ticks, Room(logs_bytes)
        self._sessions: dict[str, Session] = {}
        # Of each kind of lease one length for all, so that insertion order is due order.
        self._idle: OrderedDict[str, float] = OrderedDict()
        self._lost: OrderedDict[str, float] = OrderedDict()
        self._owned: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._sessions)

    def __contains__(self, id: str) -> bool:
        return id in self._sessions

    def __iter__(self) -> Iterator[Session]:
        return iter(tuple(self._sessions.values()))

    def open(
        self,
        pipeline: str,
        seed: int,
        prompt: str,
        keys: tuple[str, ...],
        options: Mapping[str, Scalar],
        machine: SessionMachine | None = None,
        log: SessionLog[Any] | None = None,
        owner: str = "",
        *,
        id: str = "",
        token: str = "",
    ) -> Session:
        """A new session in phase NEW, busy until the first :meth:`release`; ``machine`` and ``log`` of one that
        continues another, ``id`` and ``token`` of one that comes back. Exhausted when the table is full."""
        if len(self._sessions) >= self._max_sessions:
            if log is not None:
                log.clear()  # a child's past takes no more room
            raise Exhausted(
                f"all {self._max_sessions} sessions are taken; close one, or try again later: "
                f"a session ends by itself after {self._ttl:g} s without a call",
                reason=Reason.TOO_MANY_SESSIONS,
                retry_after_ms=0.0 if (due := self.next_due()) is None else max(1e3 * (due - self._clock.now()), 1.0),
            )
        machine = machine or SessionMachine()
        machine.max_waiting = self._max_waiting
        session = Session(
            id=id or secrets.token_hex(8),
            token=token or secrets.token_urlsafe(32),
            pipeline=pipeline,
            seed=seed,
            prompt=prompt,
            keys=keys,
            options=options,
            machine=machine,
            log=self.log() if log is None else log,
            replies=Replies(self._replies),
            owner=owner,
            busy=1,
        )
        self._sessions[session.id] = session
        self._owned[owner] += 1
        return session

    def count(self, owner: str) -> int:
        """Sessions of ``owner``."""
        return self._owned[owner]

    def log(self) -> SessionLog[Any]:
        """An empty log of the configured size."""
        return SessionLog(self._log_bytes, self._rewind_ticks, self._room)

    def find(self, id: str, token: str, owner: str | None = None) -> Session:
        """The session, for whoever holds its token and, where ``owner`` is given, opened it. An unknown id, a wrong
        token and another owner give the same error, after the same work."""
        session = self._sessions.get(id)
        expected, owned = (_NOBODY, "") if session is None else (session.token, session.owner)
        fits = hmac.compare_digest(expected.encode(), token.encode("utf-8", "surrogatepass"))
        theirs = owned if owner is None else owner
        fits &= hmac.compare_digest(owned.encode(), theirs.encode("utf-8", "surrogatepass"))
        if session is None or not fits or session.machine.phase in (Phase.NEW, Phase.CLOSED):
            raise UnknownSession("no such session: never opened, closed, expired, or the resume token is wrong")
        return session

    def hold(self, session: Session) -> None:
        """A call on the session begins: its lease is suspended."""
        session.busy += 1
        session.detached = False
        self._forget_due(session)

    def release(self, session: Session) -> None:
        """A call ended; with the last one the lease starts anew."""
        session.busy -= 1
        self._renew(session)

    def attach(self, session: Session, fence: Callable[[], None]) -> int:
        """A stream attaches; its number. The one before it is fenced."""
        number, older = session.machine.attached(), session.fence
        session.fence, session.detached = fence, False
        self._renew(session)
        if older is not None:
            older()
        return number

    def detach(self, session: Session, number: int) -> bool:
        """The stream ``number`` was lost; False: it was not the newest. Else its session is kept for the grace."""
        if number != session.machine.attachment or session.fence is None:
            return False
        session.fence, session.detached = None, True
        self._renew(session)
        return True

    def _renew(self, session: Session) -> None:
        """The lease starts anew, unless a call is under way."""
        self._forget_due(session)
        if session.busy == 0 and session.id in self._sessions and session.machine.phase is not Phase.CLOSED:
            if session.detached:
                self._lost[session.id] = self._clock.now() + self._grace
            else:
                self._idle[session.id] = self._clock.now() + self._ttl

    def _forget_due(self, session: Session) -> None:
        self._idle.pop(session.id, None)
        self._lost.pop(session.id, None)

    def remove(self, session: Session) -> None:
        """Free the session's place, and the room of its log."""
        session.log.clear()
        if self._sessions.pop(session.id, None) is not None:
            self._owned[session.owner] -= 1
            if not self._owned[session.owner]:
                del self._owned[session.owner]
        self._forget_due(session)

    def next_due(self) -> float | None:
        """When the next lease ends, on the clock; None: nobody is idle."""
        firsts = [next(iter(due.values())) for due in (self._idle, self._lost) if due]
        return min(firsts, default=None)

    def expired(self) -> list[Session]:
        """Sessions whose lease has ended; they stay in the table until :meth:`remove`."""
        now, over = self._clock.now(), []
        for due in (self._idle, self._lost):
            while due and next(iter(due.values())) <= now:
                over.append(self._sessions[due.popitem(last=False)[0]])
        return over
