"""Who may use which session and how long it is kept: ids, resume tokens, the bound, leases. No IO.

A session's memory here is bounded: its place, its last chunk, its last reply, receipts for the next tick, and its log.
"""

from __future__ import annotations

import hmac
import secrets
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..clock import Clock
from ..errors import Exhausted, Reason, UnknownSession
from ..messages import Receipt, Scalar
from ..types import ActionChunk, TickResult
from .log import SessionLog
from .machine import Phase, SessionMachine

_NOBODY = secrets.token_urlsafe(32)  # compared against when the id is unknown, so that both cases cost the same


@dataclass(slots=True)
class Session:
    """One session. ``feedback`` maps names of feedback edges to receipts of the tick before."""

    id: str
    token: str
    pipeline: str
    seed: int
    prompt: str
    keys: tuple[str, ...]
    options: Mapping[str, Scalar]
    machine: SessionMachine
    log: SessionLog[Any]
    chunk: ActionChunk | None = None
    reply: TickResult | None = None
    feedback: dict[str, Receipt] = field(default_factory=dict)
    busy: int = 0  # calls under way; the lease is suspended meanwhile

    def forget(self) -> None:
        """Drop what belongs to the state before a reset. The receipts must have been released."""
        self.chunk = self.reply = None
        self.feedback = {}
        self.log.clear()


class SessionManager:
    """The table of sessions. A silent session is due ``idle_ttl_s`` after its last call ended."""

    def __init__(
        self,
        clock: Clock,
        max_sessions: int,
        idle_ttl_s: float,
        max_waiting: int = 4,
        log_bytes: int = 32 << 20,
        rewind_ticks: int = 8,
    ) -> None:
        self._clock = clock
        self._max_sessions = max_sessions
        self._ttl = idle_ttl_s
        self._max_waiting = max_waiting
        self._log_bytes, self._rewind_ticks = log_bytes, rewind_ticks
        self._sessions: dict[str, Session] = {}
        self._due: OrderedDict[str, float] = OrderedDict()  # one ttl for all, so insertion order is due order

    def __len__(self) -> int:
        return len(self._sessions)

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
    ) -> Session:
        """A new session in phase NEW, busy until the first :meth:`release`; ``machine`` and ``log`` of one that
        continues another. Exhausted when the table is full."""
        if len(self._sessions) >= self._max_sessions:
            raise Exhausted(
                f"all {self._max_sessions} sessions are taken; close one, or try again later: "
                f"a session ends by itself after {self._ttl:g} s without a call",
                reason=Reason.TOO_MANY_SESSIONS,
                retry_after_ms=0.0 if (due := self.next_due()) is None else max(1e3 * (due - self._clock.now()), 1.0),
            )
        machine = machine or SessionMachine()
        machine.max_waiting = self._max_waiting
        session = Session(
            id=secrets.token_hex(8),
            token=secrets.token_urlsafe(32),
            pipeline=pipeline,
            seed=seed,
            prompt=prompt,
            keys=keys,
            options=options,
            machine=machine,
            log=self.log() if log is None else log,
            busy=1,
        )
        self._sessions[session.id] = session
        return session

    def log(self) -> SessionLog[Any]:
        """An empty log of the configured size."""
        return SessionLog(self._log_bytes, self._rewind_ticks)

    def find(self, id: str, token: str) -> Session:
        """The session, for whoever holds its token. An unknown id and a wrong token give the same error."""
        session = self._sessions.get(id)
        expected = _NOBODY if session is None else session.token
        fits = hmac.compare_digest(expected.encode(), token.encode("utf-8", "surrogatepass"))
        if session is None or not fits or session.machine.phase in (Phase.NEW, Phase.CLOSED):
            raise UnknownSession("no such session: never opened, closed, expired, or the resume token is wrong")
        return session

    def hold(self, session: Session) -> None:
        """A call on the session begins: its lease is suspended."""
        session.busy += 1
        self._due.pop(session.id, None)

    def release(self, session: Session) -> None:
        """A call ended; with the last one the lease starts anew."""
        session.busy -= 1
        if session.busy == 0 and session.id in self._sessions and session.machine.phase is not Phase.CLOSED:
            self._due[session.id] = self._clock.now() + self._ttl

    def remove(self, session: Session) -> None:
        """Free the session's place."""
        self._sessions.pop(session.id, None)
        self._due.pop(session.id, None)

    def next_due(self) -> float | None:
        """When the next lease ends, on the clock; None: nobody is idle."""
        return next(iter(self._due.values()), None)

    def expired(self) -> list[Session]:
        """Sessions whose lease has ended; they stay in the table until :meth:`remove`."""
        now, over = self._clock.now(), []
        while self._due and next(iter(self._due.values())) <= now:
            over.append(self._sessions[self._due.popitem(last=False)[0]])
        return over
