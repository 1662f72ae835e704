from __future__ import annotations

import numpy as np

from omni_loop.connect.base import Connector, Outcome
from omni_loop.connect.local import LocalConnector
from omni_loop.connect.router import Router
from omni_loop.connect.shm import ShmConnector
from omni_loop.messages import PayloadKind, Receipt
from omni_loop.stage import Payload
from omni_loop.testing.connector_contract import ConnectorContract, payload_key, refused

from .test_shm import flip_last_byte

EDGE = payload_key().edge


def router() -> Router:
    return Router({"local": LocalConnector(), "shm": ShmConnector()}, {EDGE: "shm"})


class TestDefault(ConnectorContract):
    """An edge that nobody chose a backend for."""

    def make(self) -> Connector:
        return Router({"local": LocalConnector(), "shm": ShmConnector()}, {"another": "shm"})


class TestChosen(ConnectorContract):
    """An edge that goes by shared memory, read through another router."""

    shared = True

    def make(self) -> Connector:
        return router()

    def damage(self, receipt: Receipt) -> None:
        flip_last_byte(receipt)


def test_each_edge_goes_its_way() -> None:
    one = router()
    payload = Payload(PayloadKind.TOKENS, {"t": np.arange(3)})
    chosen, other = one.put(payload_key(), payload), one.put(payload_key(edge="x"), payload)
    assert (chosen.connector, other.connector) == ("shm", "local")
    assert one.get(other) is payload
    assert one.health().payloads == 2
    plain = ShmConnector()
    np.testing.assert_array_equal(plain.get(chosen).arrays["t"], np.arange(3))  # by its name, as a process would
    assert refused(lambda: plain.get(other)) is Outcome.GONE
    one.close()
