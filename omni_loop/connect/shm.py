"""The connector between processes of one host: one shared-memory segment per payload, written once.

A segment is ``magic, crc32, bytes of the header, bytes in all``, then a msgpack header (key, kind, schema, meta, arrays
with dtype, shape and offset), then the arrays at multiples of 64 bytes. Readers map it copy-on-write, so
arrays already got outlive the segment's name.

Who puts a payload owns its name: ``cleanup`` and ``close`` unlink it, :func:`sweep` unlinks those of a process that
was killed, and multiprocessing's resource tracker those of a whole family of processes that was. Segments are
written with ``write`` and not through a mapping, because a full /dev/shm is then an error and no SIGBUS.
"""

from __future__ import annotations

import _posixshmem  # type: ignore[import-not-found]  # what multiprocessing.shared_memory itself stands on
import errno
import itertools
import mmap
import os
import secrets
import struct
import threading
import weakref
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import resource_tracker
from typing import Any

import msgspec
import numpy as np

from ..errors import Exhausted, Reason, TensorError
from ..messages import PayloadKey, PayloadKind, Receipt, Scalar
from ..stage import Payload
from .base import Health, Ledger, Outcome, as_numpy, payload_error, round_trip

_PREAMBLE = struct.Struct("<4sI")  # magic, crc32 of all that follows
_SIZES = struct.Struct("<QQ")  # bytes of the header, bytes of the segment
_BEGIN = _PREAMBLE.size + _SIZES.size
_MAGIC = b"OLP1"
_ALIGN = 64
_DIRECTORY = "/dev/shm"  # where Linux shows the names; elsewhere they cannot be listed


class _Header(msgspec.Struct, array_like=True, frozen=True):
    key: PayloadKey
    kind: str
    schema: int
    meta: dict[str, Scalar]
    arrays: tuple[tuple[str, str, tuple[int, ...], int], ...]  # name, dtype, shape, offset behind the header


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    nbytes: int
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
        self._count = itertools.count(1)
        self._ledger: Ledger[_Entry] = Ledger()
        self._names = _Names()
        self._finalizer = weakref.finalize(self, self._names.unlink_all)  # also at exit of the interpreter

    def backend(self, edge: str) -> str:
        return self.name

    def put(self, key: PayloadKey, payload: Payload) -> Receipt:
        arrays = {name: _plain(key, name, value) for name, value in payload.arrays.items()}
        name = f"{self.prefix}{next(self._count):x}"
        total = self._names.write(name, _segment(key, payload, arrays))
        entry = _Entry(name, total, Payload(payload.kind, arrays, payload.meta, payload.schema))
        try:
            before = self._ledger.add(key, name, entry)
        except BaseException:
            self._names.unlink(name)
            raise
        if before is not None:
            self._names.unlink(before.name)
        return Receipt(key, payload.kind, self.name, name, sum(a.nbytes for a in arrays.values()))

    def get(self, receipt: Receipt, deadline_s: float = 0.0) -> Payload:
        entry = self._ledger.find(receipt, deadline_s)
        if entry is not None:
            return entry.payload
        if receipt.connector != self.name:
            raise payload_error(Outcome.GONE, receipt.key, f"it lies in another connector ({receipt.connector})")
        return _read(receipt)

    def cleanup(self, key: PayloadKey) -> None:
        if (entry := self._ledger.remove(key)) is not None:
            self._names.unlink(entry.name)

    def cleanup_session(self, session: str) -> int:
        entries = self._ledger.remove_session(session)
        for entry in entries:
            self._names.unlink(entry.name)
        return len(entries)

    def health(self) -> Health:
        token = secrets.token_hex(4)
        seconds = round_trip(self, token)
        key = PayloadKey("health", f"health-{token}", 0, 1)
        receipt = self.put(key, Payload(PayloadKind.TOKENS, {"probe": np.zeros(1, np.uint8)}))
        try:
            _read(receipt)  # the way another process goes
        finally:
            self.cleanup(key)
        held = self._ledger.entries()
        return Health(self.name, len(held), sum(e.nbytes for e in held), seconds)

    def close(self) -> None:
        self._ledger.close()
        self._finalizer()


def new_prefix() -> str:
    """A prefix for segment names that no other connector has. Short: macOS allows 31 characters in all."""
    return f"/olp-{secrets.token_hex(6)}-"


def sweep(prefix: str) -> int:
    """Unlink every segment whose name starts with ``prefix``: for a process that died. Returns how many."""
    try:
        found = [f"/{name}" for name in os.listdir(_DIRECTORY) if f"/{name}".startswith(prefix)]
    except FileNotFoundError:  # no Linux: the resource tracker unlinks them when the family of processes ends
        return 0
    for name in found:
        # It may have died between creating and registering; registering twice is the same as once.
        resource_tracker.register(name, "shared_memory")
        _unlink(name)
    return len(found)


class _Names:
    """The names this process must unlink, each known to the resource tracker."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._names: set[str] = set()

    def write(self, name: str, parts: Sequence[Any]) -> int:
        """Create segment ``name`` from ``parts`` and return its bytes; nothing stays when there is no room."""
        fd = _posixshmem.shm_open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode=0o600)
        try:
            resource_tracker.register(name, "shared_memory")
            with self._lock:
                self._names.add(name)
            return _write_all(fd, parts)
        except BaseException as e:
            self.unlink(name)
            if isinstance(e, OSError) and e.errno in (errno.ENOSPC, errno.ENOMEM):
                size = sum(memoryview(p).nbytes for p in parts)
                text = f"no room in shared memory for a payload of {size} bytes"
                raise Exhausted(text, reason=Reason.OUT_OF_BYTES) from None
            raise
        finally:
            os.close(fd)

    def unlink(self, name: str) -> None:
        with self._lock:
            self._names.discard(name)
        _unlink(name)

    def unlink_all(self) -> None:
        with self._lock:
            names = list(self._names)
        for name in names:
            self.unlink(name)


def _unlink(name: str) -> None:
    try:
        _posixshmem.shm_unlink(name)
    except FileNotFoundError:
        pass  # someone swept it
    else:
        resource_tracker.unregister(name, "shared_memory")


def _write_all(fd: int, parts: Sequence[Any]) -> int:
    total = 0
    for part in parts:
        view = memoryview(part)
        while view.nbytes:
            n = os.write(fd, view)
            total += n
            view = view[n:]
    return total


def _plain(key: PayloadKey, name: str, value: Any) -> np.ndarray[Any, np.dtype[Any]]:
    try:
        array = np.asarray(as_numpy(value), order="C")
    except TypeError as e:  # bfloat16 and its kin have no numpy type
        raise TensorError(f"array {name!r} of {key.edge!r} has no numpy dtype: {e}") from None
    if array.dtype.kind not in "biufc":
        raise TensorError(f"array {name!r} of {key.edge!r} has dtype {array.dtype}; only numbers and bool can travel")
    return array


def _segment(key: PayloadKey, payload: Payload, arrays: Mapping[str, np.ndarray[Any, Any]]) -> list[Any]:
    """The parts of a segment, in order: preamble, header, then arrays each behind its padding."""
    offset, layout, body = 0, [], []
    for name, array in arrays.items():
        layout.append((name, array.dtype.str, array.shape, offset))
        flat = array.reshape(-1).view(np.uint8)
        body += [flat, bytes(_aligned(flat.nbytes) - flat.nbytes)]
        offset += _aligned(flat.nbytes)
    header = _ENCODER.encode(_Header(key, payload.kind, payload.schema, dict(payload.meta), tuple(layout)))
    begin = _aligned(_BEGIN + len(header))
    rest: list[Any] = [_SIZES.pack(len(header), begin + offset), header, bytes(begin - _BEGIN - len(header)), *body]
    crc = 0
    for part in rest:
        crc = zlib.crc32(part, crc)
    return [_PREAMBLE.pack(_MAGIC, crc), *rest]


def _aligned(n: int) -> int:
    return n + -n % _ALIGN


def _read(receipt: Receipt) -> Payload:
    """Map, check and take apart a segment."""
    key = receipt.key
    try:
        fd = _posixshmem.shm_open(receipt.location, os.O_RDONLY, mode=0)
    except FileNotFoundError:
        raise payload_error(Outcome.GONE, key, "it was cleaned up, or its process died") from None
    try:
        if os.fstat(fd).st_size < _BEGIN:
            raise payload_error(Outcome.CORRUPT, key, "it is truncated")
        memory = mmap.mmap(fd, 0, access=mmap.ACCESS_COPY)
    finally:
        os.close(fd)
    magic, crc = _PREAMBLE.unpack_from(memory)
    view = memoryview(memory)
    if magic != _MAGIC or zlib.crc32(view[_PREAMBLE.size :]) != crc:
        raise payload_error(Outcome.CORRUPT, key, "its checksum does not fit")
    header_bytes, total = _SIZES.unpack_from(memory, _PREAMBLE.size)
    if total != len(memory):
        raise payload_error(Outcome.CORRUPT, key, "it is truncated")
    header = _DECODER.decode(view[_BEGIN : _BEGIN + header_bytes])
    if header.key != key:
        raise payload_error(Outcome.CORRUPT, key, "it holds the payload of another key")
    data = _aligned(_BEGIN + header_bytes)
    arrays: dict[str, np.ndarray[Any, Any]] = {
        name: np.ndarray(shape, np.dtype(dtype), memory, data + offset) for name, dtype, shape, offset in header.arrays
    }
    return Payload(header.kind, arrays, header.meta, header.schema)
