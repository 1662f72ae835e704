"""The connector inside one process: it hands over references and copies nothing."""

from __future__ import annotations

import itertools
import secrets

from ..messages import PayloadKey, Receipt
from ..stage import Payload
from .base import Health, Ledger, Outcome, as_numpy, payload_error, round_trip


class LocalConnector:
    """Payloads by reference. See :class:`~omni_loop.connect.base.Connector`."""

    name = "local"
    backends = (name,)

    def __init__(self) -> None:
        self._token = secrets.token_hex(4)
        self._count = itertools.count(1)
        self._ledger: Ledger[Payload] = Ledger()

    def backend(self, edge: str) -> str:
        return self.name

    def put(self, key: PayloadKey, payload: Payload) -> Receipt:
        location = f"{self._token}-{next(self._count)}"
        self._ledger.add(key, location, payload)
        return Receipt(key, payload.kind, self.name, location, nbytes(payload))

    def get(self, receipt: Receipt, deadline_s: float = 0.0) -> Payload:
        payload = self._ledger.find(receipt, deadline_s)
        if payload is None:
            mine = receipt.connector == self.name and receipt.location.startswith(self._token)
            why = "it was cleaned up" if mine else f"it lies in another connector ({receipt.connector})"
            raise payload_error(Outcome.GONE, receipt.key, why)
        return payload

    def cleanup(self, key: PayloadKey) -> None:
        self._ledger.remove(key)

    def cleanup_session(self, session: str) -> int:
        return len(self._ledger.remove_session(session))

    def health(self) -> Health:
        seconds = round_trip(self, self._token)
        held = self._ledger.entries()
        return Health(self.name, len(held), sum(map(nbytes, held)), seconds)

    def close(self) -> None:
        self._ledger.close()


def nbytes(payload: Payload) -> int:
    """Bytes of a payload's arrays."""
    return sum(a.nbytes if hasattr(a, "nbytes") else as_numpy(a).nbytes for a in payload.arrays.values())
