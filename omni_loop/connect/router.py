"""Several connectors as one: which backend a payload goes by is chosen by its edge."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..messages import PayloadKey, Receipt
from ..stage import Payload
from .base import Connector, Health, Outcome, payload_error


class Router:
    """See :class:`~omni_loop.connect.base.Connector`. ``connectors`` by backend, the first of them the default;
    ``edges``: the backend of keys with that edge."""

    def __init__(self, connectors: Mapping[str, Connector], edges: Mapping[str, str]) -> None:
        self.name = next(iter(connectors))
        self._connectors, self._edges = dict(connectors), dict(edges)

    @property
    def backends(self) -> tuple[str, ...]:
        return tuple(self._connectors)

    def backend(self, edge: str) -> str:
        return self._edges.get(edge, self.name)

    def put(self, key: PayloadKey, payload: Payload) -> Receipt:
        return self._of(key).put(key, payload)

    def get(self, receipt: Receipt, deadline_s: float = 0.0) -> Payload:
        connector = self._connectors.get(receipt.connector)
        if connector is None:
            why = f"it lies in another connector ({receipt.connector})"
            raise payload_error(Outcome.GONE, receipt.key, why)
        return connector.get(receipt, deadline_s)

    def cleanup(self, key: PayloadKey) -> None:
        self._of(key).cleanup(key)

    def cleanup_session(self, session: str) -> int:
        return sum(connector.cleanup_session(session) for connector in self._connectors.values())

    def health(self) -> Health:
        """Of all backends together; the slowest round trip."""
        found = [connector.health() for connector in self._connectors.values()]
        return replace(
            found[0],
            payloads=sum(h.payloads for h in found),
            nbytes=sum(h.nbytes for h in found),
            round_trip_s=max(h.round_trip_s for h in found),
        )

    def close(self) -> None:
        for connector in self._connectors.values():
            connector.close()

    def _of(self, key: PayloadKey) -> Connector:
        return self._connectors[self.backend(key.edge)]
