"""The contract every connector must pass: derive from :class:`ConnectorContract` and say how to make one.

class TestShm(ConnectorContract):
    def make(self): return ShmConnector()
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from ..connect.base import Connector, Outcome, as_numpy, outcome_of, pending
from ..errors import PayloadError
from ..messages import PayloadKey, PayloadKind, Receipt, Scalar
from ..stage import Payload

DTYPES = ("bool", "uint8", "int16", "int32", "int64", "float16", "float32", "float64")
SHAPES = ((), (0,), (3,), (2, 0, 4), (2, 3, 4), (7, 5, 3, 2))


def payload_key(tick: int = 1, epoch: int = 0, session: str = "s", edge: str = "a.out>b.in") -> PayloadKey:
    return PayloadKey(edge, session, epoch, tick)


def refused(call: Callable[[], object]) -> Outcome:
    """The outcome of a call that must be refused."""
    with pytest.raises(PayloadError) as caught:
        call()
    return outcome_of(caught.value)


class ConnectorContract:
    """``shared`` says whether a second connector made by ``make`` reads what the first has put."""

    shared = False

    def make(self) -> Connector:
        raise NotImplementedError

    def damage(self, receipt: Receipt) -> None:
        """Change a byte of what was put; asked for where payloads are ``shared``."""
        raise NotImplementedError

    @pytest.fixture
    def connector(self) -> Iterator[Connector]:
        connector = self.make()
        yield connector
        connector.close()

    @pytest.fixture
    def reader(self, connector: Connector) -> Iterator[Connector]:
        """What the consumer holds: another connector where payloads are shared."""
        if not self.shared:
            yield connector
            return
        reader = self.make()
        yield reader
        reader.close()

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_arrays_and_facts_arrive_as_they_were_put(
        self, connector: Connector, reader: Connector, dtype: str
    ) -> None:
        rng = np.random.default_rng(7)
        arrays = {f"a{i}": rng.integers(0, 2, shape).astype(dtype) for i, shape in enumerate(SHAPES)}
        arrays["strided"] = rng.integers(0, 2, (6, 4)).astype(dtype)[::2, ::-1]
        meta: dict[str, Scalar] = {"step": 3, "scale": 0.5, "name": "é", "flag": True}
        receipt = connector.put(payload_key(), Payload(PayloadKind.LATENTS, arrays, meta, schema=2))
        got = reader.get(receipt)
        assert (got.kind, dict(got.meta), got.schema) == (PayloadKind.LATENTS, meta, 2)
        assert list(got.arrays) == list(arrays)
        for name, array in arrays.items():
            there = as_numpy(got.arrays[name])
            assert (there.dtype, there.shape) == (array.dtype, array.shape), name
            np.testing.assert_array_equal(there, array)

    def test_receipt_says_key_kind_backend_and_bytes(self, connector: Connector) -> None:
        receipt = connector.put(payload_key(), Payload(PayloadKind.ACTIONS, {"a": np.zeros((4, 2), np.float32)}))
        assert (receipt.key, receipt.kind) == (payload_key(), PayloadKind.ACTIONS)
        assert (receipt.connector, receipt.nbytes) == (connector.backend(payload_key().edge), 32)
        assert receipt.connector in connector.backends

    def test_a_payload_can_be_got_again(self, connector: Connector, reader: Connector) -> None:
        receipt = connector.put(payload_key(), Payload(PayloadKind.TOKENS, {"t": np.arange(5)}))
        for _ in range(3):
            np.testing.assert_array_equal(as_numpy(reader.get(receipt).arrays["t"]), np.arange(5))

    def test_cleaned_up_is_gone_and_what_was_got_stays(self, connector: Connector, reader: Connector) -> None:
        receipt = connector.put(payload_key(), Payload(PayloadKind.TOKENS, {"t": np.arange(5)}))
        got = reader.get(receipt)
        connector.cleanup(payload_key())
        connector.cleanup(payload_key())
        assert refused(lambda: reader.get(receipt)) is Outcome.GONE
        np.testing.assert_array_equal(as_numpy(got.arrays["t"]), np.arange(5))

    def test_put_again_makes_the_older_receipt_stale(self, connector: Connector) -> None:
        old = connector.put(payload_key(), Payload(PayloadKind.TOKENS, {"t": np.array([1])}))
        new = connector.put(payload_key(), Payload(PayloadKind.TOKENS, {"t": np.array([2])}))
        assert refused(lambda: connector.get(old)) is Outcome.STALE
        assert as_numpy(connector.get(new).arrays["t"])[0] == 2

    def test_an_older_epoch_is_stale(self, connector: Connector) -> None:
        payload = Payload(PayloadKind.TOKENS, {"t": np.array([1])})
        old = connector.put(payload_key(epoch=3), payload)
        new = connector.put(payload_key(epoch=4, tick=0), payload)
        assert refused(lambda: connector.get(old)) is Outcome.STALE
        assert refused(lambda: connector.put(payload_key(epoch=3, tick=2), payload)) is Outcome.STALE
        connector.get(new)
        other = connector.put(payload_key(session="other", epoch=0), payload)
        connector.get(other)  # epochs are a session's own

    def test_what_was_never_put_is_not_ready(self, connector: Connector) -> None:
        receipt = pending(payload_key(), PayloadKind.TOKENS, connector.backend(payload_key().edge))
        assert refused(lambda: connector.get(receipt)) is Outcome.NOT_READY
        assert refused(lambda: connector.get(receipt, deadline_s=0.01)) is Outcome.NOT_READY

    def test_get_waits_for_a_pending_payload(self, connector: Connector) -> None:
        receipt = pending(payload_key(), PayloadKind.TOKENS, connector.backend(payload_key().edge))
        payload = Payload(PayloadKind.TOKENS, {"t": np.array([9])})
        thread = threading.Timer(0.02, connector.put, (payload_key(), payload))
        thread.start()
        assert as_numpy(connector.get(receipt, deadline_s=30).arrays["t"])[0] == 9
        thread.join()

    def test_a_receipt_of_another_backend_is_gone(self, connector: Connector) -> None:
        receipt = connector.put(payload_key(), Payload(PayloadKind.TOKENS, {"t": np.array([1])}))
        foreign = replace(receipt, connector="elsewhere", location="nowhere", key=payload_key(tick=2))
        assert refused(lambda: connector.get(foreign)) is Outcome.GONE

    def test_parts_and_the_whole_are_payloads_of_their_own(self, connector: Connector, reader: Connector) -> None:
        keys = [replace(payload_key(), part=part) for part in range(3)]
        receipts = [connector.put(k, Payload(PayloadKind.TOKENS, {"t": np.array([k.part])})) for k in keys]
        for key, receipt in zip(keys, receipts, strict=True):
            assert as_numpy(reader.get(receipt).arrays["t"])[0] == key.part
        connector.cleanup(keys[1])
        assert refused(lambda: reader.get(receipts[1])) is Outcome.GONE
        assert as_numpy(reader.get(receipts[0]).arrays["t"])[0] == 0
        assert as_numpy(reader.get(receipts[2]).arrays["t"])[0] == 2

    def test_a_kind_of_ones_own_arrives(self, connector: Connector, reader: Connector) -> None:
        receipt = connector.put(payload_key(), Payload("lidar", {"points": np.zeros((5, 3))}, schema=4))
        got = reader.get(receipt)
        assert (receipt.kind, got.kind, got.schema) == ("lidar", "lidar", 4)

    def test_what_was_damaged_on_its_way_is_corrupt(self, connector: Connector, reader: Connector) -> None:
        if not self.shared:
            pytest.skip("a reference has no way on which it could be damaged")
        receipt = connector.put(payload_key(), Payload(PayloadKind.TOKENS, {"t": np.arange(5)}))
        self.damage(receipt)
        assert refused(lambda: reader.get(receipt)) is Outcome.CORRUPT

    def test_a_session_is_cleaned_up_at_once(self, connector: Connector, reader: Connector) -> None:
        payload = Payload(PayloadKind.TOKENS, {"t": np.array([1])})
        gone = [connector.put(payload_key(tick=t), payload) for t in range(3)]
        kept = connector.put(payload_key(session="other"), payload)
        assert connector.cleanup_session("s") == 3
        assert connector.cleanup_session("s") == 0
        for receipt in gone:
            assert refused(lambda r=receipt: reader.get(r)) is Outcome.GONE  # type: ignore[misc]
        reader.get(kept)

    def test_health_counts_what_is_held_and_leaves_nothing(self, connector: Connector) -> None:
        before = connector.health()
        assert (before.connector, before.payloads, before.nbytes) == (connector.name, 0, 0)
        connector.put(payload_key(), Payload(PayloadKind.TOKENS, {"t": np.zeros(100, np.uint8)}))
        after = connector.health()
        assert after.payloads == 1
        assert after.nbytes >= 100
        assert after.round_trip_s > 0
        connector.cleanup(payload_key())
        assert connector.health().payloads == 0

    def test_closed_is_gone(self, connector: Connector) -> None:
        payload = Payload(PayloadKind.TOKENS, {"t": np.array([1])})
        receipt = connector.put(payload_key(), payload)
        connector.close()
        connector.close()
        assert refused(lambda: connector.get(receipt)) is Outcome.GONE
        assert refused(lambda: connector.put(payload_key(tick=2), payload)) is Outcome.GONE
