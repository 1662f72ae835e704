from __future__ import annotations

import numpy as np
import torch

from omni_loop.connect.base import Connector, Outcome
from omni_loop.connect.local import LocalConnector
from omni_loop.messages import PayloadKind
from omni_loop.stage import Payload
from omni_loop.testing.connector_contract import ConnectorContract, payload_key, refused


class TestLocal(ConnectorContract):
    def make(self) -> Connector:
        return LocalConnector()

    def test_it_copies_nothing(self) -> None:
        connector = LocalConnector()
        payload = Payload(PayloadKind.LATENTS, {"a": torch.zeros(3)})
        assert connector.get(connector.put(payload_key(), payload)) is payload

    def test_a_receipt_of_another_one_is_gone(self) -> None:
        receipt = LocalConnector().put(payload_key(), Payload(PayloadKind.TOKENS, {"t": np.zeros(1)}))
        assert refused(lambda: LocalConnector().get(receipt)) is Outcome.GONE
