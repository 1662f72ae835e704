"""The connector between processes of one host: every payload in a segment of shared memory.

Its header is msgpack: key, kind, schema, meta, and of every array name, dtype, shape and offset. Who puts a payload
owns its segment: ``cleanup`` frees it for the next payload and ``close`` unlinks all; :func:`sweep` unlinks those of a
process that was killed, and multiprocessing's resource tracker those of a whole family of processes that was. Readers
copy, so arrays already got stay as they are.
"""

from __future__ import annotations

import secrets
import weakref
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from ..errors import TensorError
from ..messages import PayloadKey, PayloadKind, Receipt, Scalar
from ..stage import Payload
from .base import Health, Ledger, Outcome, as_numpy, payload_error, round_trip
from .segments import BEGIN, Corrupt, Gone, Segment, Segments, aligned, new_prefix, read, sweep

__all__ = ["ShmConnector", "new_prefix", "sweep"]


class _Header(msgspec.Struct, array_like=True, frozen=True):
    key: PayloadKey
    kind: str
    schema: int
    meta: dict[str, Scalar]
    arrays: tuple[tuple[str, str, tuple[int, ...], int], ...]  # name, dtype, shape, offset behind the header


@dataclass(frozen=True, slots=True)
class _Entry:
    segment: Segment
    payload: Payload  # the process that put it reads it from here


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(_Header)


class ShmConnector:
    """Payloads in shared memory. See :class:`~omni_loop.connect.base.Connector`.

    ``get`` returns numpy arrays whatever was put; in the process that put them they share its memory. Every name
    starts with ``prefix``, so that another process can :func:`sweep` them.
    """

    name = "shm"
    backends = (name,)

    def __init__(self, prefix: str | None = None) -> None:
        self.prefix = prefix or new_prefix()
        self._ledger: Ledger[_Entry] = Ledger()
        self._segments = Segments(self.prefix)
        self._finalizer = weakref.finalize(self, self._segments.unlink_all)  # also at exit of the interpreter

    def backend(self, edge: str) -> str:
        return self.name

    def put(self, key: PayloadKey, payload: Payload) -> Receipt:
        arrays = {name: _plain(key, name, value) for name, value in payload.arrays.items()}
        layout, offset = [], 0
        for name, array in arrays.items():
            layout.append((name, array.dtype.str, array.shape, offset))
            offset += aligned(array.nbytes)
        header = _ENCODER.encode(_Header(key, payload.kind, payload.schema, dict(payload.meta), tuple(layout)))
        segment = self._segments.write(header, [array.reshape(-1).view(np.uint8) for array in arrays.values()])
        entry = _Entry(segment, Payload(payload.kind, arrays, payload.meta, payload.schema))
        location = segment.location
        try:
            before = self._ledger.add(key, location, entry)
        except BaseException:
            self._segments.free(segment)
            raise
        if before is not None:
            self._segments.free(before.segment)
        return Receipt(key, payload.kind, self.name, location, sum(a.nbytes for a in arrays.values()))

    def get(self, receipt: Receipt, deadline_s: float = 0.0) -> Payload:
        entry = self._ledger.find(receipt, deadline_s)
        if entry is not None:
            return entry.payload
        if receipt.connector != self.name:
            raise payload_error(Outcome.GONE, receipt.key, f"it lies in another connector ({receipt.connector})")
        return _read(receipt)

    def cleanup(self, key: PayloadKey) -> None:
        if (entry := self._ledger.remove(key)) is not None:
            self._segments.free(entry.segment)

    def cleanup_session(self, session: str) -> int:
        entries = self._ledger.remove_session(session)
        for entry in entries:
            self._segments.free(entry.segment)
        return len(entries)

    def health(self) -> Health:
        token = secrets.token_hex(4)
        seconds = round_trip(self, token)
        key = PayloadKey("health", f"health-{token}", 0, 1)
        receipt = self.put(key, Payload(PayloadKind.TOKENS, {"tokens": np.zeros(1, np.uint8)}))
        try:
            _read(receipt)  # the way another process goes
        finally:
            self.cleanup(key)
        held = self._ledger.entries()
        return Health(self.name, len(held), sum(e.segment.nbytes for e in held), seconds)

    def close(self) -> None:
        self._ledger.close()
        self._finalizer()


def _plain(key: PayloadKey, name: str, value: Any) -> np.ndarray[Any, np.dtype[Any]]:
    try:
        array = np.asarray(as_numpy(value), order="C")
    except TypeError as e:  # bfloat16 and its kin have no numpy type
        raise TensorError(f"array {name!r} of {key.edge!r} has no numpy dtype: {e}") from None
    if array.dtype.kind not in "biufc":
        raise TensorError(f"array {name!r} of {key.edge!r} has dtype {array.dtype}; only numbers and bool can travel")
    return array


def _read(receipt: Receipt) -> Payload:
    key = receipt.key
    try:
        copy, header_bytes = read(receipt.location)
    except Gone as e:
        raise payload_error(Outcome.GONE, key, str(e)) from None
    except Corrupt as e:
        raise payload_error(Outcome.CORRUPT, key, str(e)) from None
    header = _DECODER.decode(copy[BEGIN : BEGIN + header_bytes].data)
    if header.key != key:
        raise payload_error(Outcome.CORRUPT, key, "it holds the payload of another key")
    data = aligned(BEGIN + header_bytes)
    arrays: dict[str, np.ndarray[Any, Any]] = {
        name: np.ndarray(shape, np.dtype(dtype), copy, data + offset) for name, dtype, shape, offset in header.arrays
    }
    return Payload(header.kind, arrays, header.meta, header.schema)
