"""What a connector is: it carries typed payloads from where they are made to where they are read.

A connector knows no model. Five outcomes are distinct: a payload is ready, not ready yet, stale (an older epoch,
or put again since), corrupt, or gone. Everything but ready is a :class:`~omni_loop.errors.PayloadError`.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from .._compat import StrEnum
from ..errors import PayloadError, Reason
from ..messages import PayloadKey, PayloadKind, Receipt
from ..stage import Payload

E = TypeVar("E")


class Outcome(StrEnum):
    """What became of a ``get``."""

    READY = "ready"
    NOT_READY = "not_ready"
    STALE = "stale"
    CORRUPT = "corrupt"
    GONE = "gone"


_REASONS = {
    Outcome.NOT_READY: Reason.EXPIRED,
    Outcome.STALE: Reason.STALE_EPOCH,
    Outcome.CORRUPT: Reason.PAYLOAD_CORRUPT,
    Outcome.GONE: Reason.PAYLOAD_GONE,
}
_OUTCOMES = {reason: outcome for outcome, reason in _REASONS.items()}


def payload_error(outcome: Outcome, key: PayloadKey, why: str) -> PayloadError:
    """The error for ``outcome``; only *not ready* is worth a retry with the same receipt."""
    text = f"payload {key.edge!r} of tick {key.tick} (epoch {key.epoch}) is {outcome.replace('_', ' ')}: {why}"
    return PayloadError(text, reason=_REASONS[outcome], retryable=outcome is Outcome.NOT_READY)


def outcome_of(error: PayloadError) -> Outcome:
    """The outcome a :class:`PayloadError` of a connector stands for."""
    return _OUTCOMES.get(error.reason, Outcome.GONE)


def pending(key: PayloadKey, kind: str, connector: str) -> Receipt:
    """A placeholder for a payload that will be put under ``key``: ``get`` waits for it up to its deadline."""
    return Receipt(key, kind, connector, "", 0)


@dataclass(frozen=True, slots=True)
class Health:
    """What :meth:`Connector.health` found: payloads held, their bytes, and one round trip in seconds."""

    connector: str
    payloads: int
    nbytes: int
    round_trip_s: float


class Connector(Protocol):
    """Thread-safe. Payload arrays are read-only by agreement from ``put`` on."""

    @property
    def name(self) -> str:
        """The backend's name, as in a deployment and in receipts; of several, the default's."""

    @property
    def backends(self) -> tuple[str, ...]:
        """Every backend it puts payloads in and gets them from."""

    def backend(self, edge: str) -> str:
        """The backend that payloads with this edge in their key are put in."""

    def put(self, key: PayloadKey, payload: Payload) -> Receipt:
        """Publish ``payload``; a payload put before under the same key is replaced and its receipt stale.

        Raises:
            PayloadError: stale (the session has moved to a later epoch) or gone (the connector is closed).
            Exhausted: the backend has no room.
        """

    def get(self, receipt: Receipt, deadline_s: float = 0.0) -> Payload:
        """The payload. Waits up to ``deadline_s`` seconds for one that is :func:`pending`; may be called again.

        Raises:
            PayloadError: not ready, stale, corrupt or gone; see :func:`outcome_of`.
        """

    def cleanup(self, key: PayloadKey) -> None:
        """Forget what was put under ``key``; arrays already got stay valid. Nothing there: nothing happens."""

    def cleanup_session(self, session: str) -> int:
        """Forget everything put for ``session``; returns how many payloads that were."""

    def health(self) -> Health:
        """Carry a small payload through the backend and say what is held.

        Raises:
            PayloadError: the backend does not work.
        """

    def close(self) -> None:
        """Forget everything; later calls answer gone."""


def as_numpy(value: Any) -> np.ndarray[Any, np.dtype[Any]]:
    """A numpy array of the host: itself, or a tensor's memory when that lies on the host."""
    if isinstance(value, np.ndarray):
        return value
    if hasattr(value, "detach"):  # a torch tensor; this package does not import torch
        return np.asarray(value.detach().cpu())
    return np.asarray(value)


@dataclass(slots=True)
class _Session(Generic[E]):
    epoch: int
    entries: dict[PayloadKey, tuple[str, E]] = field(default_factory=dict)


class Ledger(Generic[E]):
    """What a connector of this process has put: entries by key, the newest epoch per session, and waiting.

    A session without entries is forgotten, so nothing grows with sessions that came and went.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._sessions: dict[str, _Session[E]] = {}
        self._closed = False

    def add(self, key: PayloadKey, location: str, entry: E) -> E | None:
        """Publish; returns the entry this one replaces. Raises stale or gone."""
        with self._changed:
            if self._closed:
                raise payload_error(Outcome.GONE, key, "the connector is closed")
            session = self._sessions.setdefault(key.session, _Session(key.epoch))
            if key.epoch < session.epoch:
                raise payload_error(Outcome.STALE, key, f"the session is in epoch {session.epoch}")
            session.epoch = key.epoch
            before = session.entries.get(key)
            session.entries[key] = (location, entry)
            self._changed.notify_all()
            return before[1] if before else None

    def find(self, receipt: Receipt, deadline_s: float) -> E | None:
        """The entry of ``receipt``; None when this process never put it. Raises not ready, stale or gone."""
        key, end = receipt.key, time.monotonic() + deadline_s
        with self._changed:
            while True:
                session = self._sessions.get(key.session)
                if self._closed:
                    raise payload_error(Outcome.GONE, key, "the connector is closed")
                if session and key.epoch < session.epoch:
                    raise payload_error(Outcome.STALE, key, f"the session is in epoch {session.epoch}")
                found = session.entries.get(key) if session else None
                if found and receipt.location in ("", found[0]):
                    return found[1]
                if found:
                    raise payload_error(Outcome.STALE, key, "it was put again since")
                if receipt.location:
                    return None
                left = end - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    raise payload_error(Outcome.NOT_READY, key, "nothing was put under this key")

    def remove(self, key: PayloadKey) -> E | None:
        with self._changed:
            session = self._sessions.get(key.session)
            found = session.entries.pop(key, None) if session else None
            if session and not session.entries:
                del self._sessions[key.session]
            return found[1] if found else None

    def remove_session(self, session: str) -> list[E]:
        with self._changed:
            gone = self._sessions.pop(session, None)
            return [entry for _, entry in gone.entries.values()] if gone else []

    def entries(self) -> list[E]:
        with self._changed:
            return [entry for session in self._sessions.values() for _, entry in session.entries.values()]

    def close(self) -> list[E]:
        with self._changed:
            left = [entry for session in self._sessions.values() for _, entry in session.entries.values()]
            self._sessions.clear()
            self._closed = True
            self._changed.notify_all()
            return left


def round_trip(connector: Connector, token: str) -> float:
    """Seconds one small payload takes through ``connector``; for :meth:`Connector.health`.

    Raises:
        PayloadError: what came back is not what was put.
    """
    key = PayloadKey("health", f"health-{token}", 0, 0)
    begin = time.perf_counter()
    receipt = connector.put(key, Payload(PayloadKind.TOKENS, {"tokens": np.arange(16, dtype=np.uint8)}))
    try:
        probe = as_numpy(connector.get(receipt).arrays["tokens"])
        if not np.array_equal(probe, np.arange(16, dtype=np.uint8)):
            raise payload_error(Outcome.CORRUPT, key, "the health probe came back changed")
    finally:
        connector.cleanup(key)
    return time.perf_counter() - begin
