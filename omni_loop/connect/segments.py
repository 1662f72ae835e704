"""Shared memory as a pool of named segments: written once per payload, used again when the payload is forgotten.

Fresh shared memory costs more than copying into it: the kernel finds and zeroes every page. So a segment that is free
again is kept, marked as such, and the next payload that fits is written over it. A reader copies a segment out and
checks what it has copied; it never maps it. That is what makes using it again safe: whoever reads too late finds
another serial number, the mark, or a checksum that does not fit, and never another payload's numbers.

A segment is ``magic, crc32c of all that follows, serial number, bytes of the header, bytes in all``, the header, and
the arrays at multiples of 64 bytes; behind that it may be longer. Its magic is written last. All is written with
``write`` and not through a mapping, because a full /dev/shm is then an error and no SIGBUS.
"""

from __future__ import annotations

import _posixshmem  # type: ignore[import-not-found]  # what multiprocessing.shared_memory itself stands on
import errno
import itertools
import os
import secrets
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import resource_tracker
from typing import Any

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from ..errors import Exhausted, Reason

ALIGN = 64
MAX_IDLE, MAX_IDLE_BYTES = 32, 64 << 20  # segments kept for the next payloads
_PREAMBLE = struct.Struct("<4sIQQQ")  # magic, crc, serial, bytes of the header, bytes in all
_REST = struct.Struct("<QQQ")
BEGIN = _PREAMBLE.size
_MAGIC, _FREE = b"OLP2", b"FREE"
_DIRECTORY = "/dev/shm"  # where Linux shows the names; elsewhere they cannot be listed
_SCARCE = (errno.ENOSPC, errno.ENOMEM)


@dataclass(slots=True)
class Segment:
    """One that holds a payload, or is free. ``location`` names this use of it."""

    name: str
    nbytes: int  # that it takes
    serial: int = 0

    @property
    def location(self) -> str:
        return f"{self.name}:{self.serial}"


class Gone(Exception):
    """What was put there is there no more."""


class Corrupt(Exception):
    """It is not what was put there."""


class Segments:
    """Those of one process, each known to the resource tracker. Every name starts with ``prefix``."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._names = itertools.count(1)
        self._serials = itertools.count(1)
        self._lock = threading.Lock()
        self._all: dict[str, Segment] = {}
        self._idle: list[Segment] = []  # the longest idle first

    def write(self, header: bytes, arrays: Sequence[NDArray[np.uint8]]) -> Segment:
        """A segment with these, the header behind the preamble. Raises Exhausted when there is no room."""
        data = aligned(BEGIN + len(header))
        total = data + sum(aligned(array.nbytes) for array in arrays)
        segment, serial = self._take(total), next(self._serials)
        try:
            self._fill(segment, serial, header, arrays, total)
        except OSError as e:
            self.unlink(segment)
            if e.errno not in _SCARCE:
                raise
            if not self._drop_idle():
                text = f"no room in shared memory for a payload of {total} bytes"
                raise Exhausted(text, reason=Reason.OUT_OF_BYTES) from None
            return self.write(header, arrays)
        except BaseException:
            self.unlink(segment)
            raise
        segment.serial, segment.nbytes = serial, max(segment.nbytes, total)
        return segment

    def free(self, segment: Segment) -> None:
        """Its payload is forgotten; the segment waits for another one."""
        try:
            fd = _posixshmem.shm_open(segment.name, os.O_WRONLY, mode=0)
        except FileNotFoundError:  # someone swept it
            self.unlink(segment)
            return
        try:
            os.pwrite(fd, _FREE, 0)
        finally:
            os.close(fd)
        with self._lock:
            if segment.name not in self._all:
                return  # unlinked meanwhile, with all others
            self._idle.append(segment)
            over: list[Segment] = []
            while len(self._idle) > MAX_IDLE or sum(s.nbytes for s in self._idle) > MAX_IDLE_BYTES:
                over.append(self._idle.pop(0))
        for one in over:
            self.unlink(one)

    def unlink(self, segment: Segment) -> None:
        with self._lock:
            self._all.pop(segment.name, None)
        _unlink(segment.name)

    def unlink_all(self) -> None:
        with self._lock:
            left = list(self._all.values())
            self._idle.clear()
        for segment in left:
            self.unlink(segment)

    def _take(self, total: int) -> Segment:
        """A free segment that is not much too large, else a new one."""
        with self._lock:
            fits = [s for s in self._idle if total <= s.nbytes <= 4 * total + 4096]
            if fits:
                segment = min(fits, key=lambda s: s.nbytes)
                self._idle.remove(segment)
                return segment
            segment = Segment(f"{self._prefix}{next(self._names):x}", total)
            self._all[segment.name] = segment
        return segment

    def _fill(
        self, segment: Segment, serial: int, header: bytes, arrays: Sequence[NDArray[np.uint8]], total: int
    ) -> None:
        rest = _REST.pack(serial, len(header), total)
        parts: list[Any] = [rest, header, bytes(aligned(BEGIN + len(header)) - BEGIN - len(header))]
        for array in arrays:
            parts += [array, bytes(aligned(array.nbytes) - array.nbytes)]
        crc = 0
        for part in parts:
            crc = google_crc32c.extend(crc, part)
        fresh = segment.serial == 0
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY if fresh else os.O_WRONLY
        fd = _posixshmem.shm_open(segment.name, flags, mode=0o600)
        try:
            if fresh:
                resource_tracker.register(segment.name, "shared_memory")
            at = len(_MAGIC)
            for part in (crc.to_bytes(4, "little"), *parts):
                at = _write(fd, part, at)
            os.pwrite(fd, _MAGIC, 0)
        finally:
            os.close(fd)

    def _drop_idle(self) -> bool:
        """Give the memory of free segments back; whether there were any."""
        with self._lock:
            idle, self._idle = self._idle, []
        for segment in idle:
            self.unlink(segment)
        return bool(idle)


def read(location: str) -> tuple[NDArray[np.uint8], int]:
    """A copy of the segment that was written at ``location``, bytes ``[total]``, and the length of its header.

    Raises:
        Gone, Corrupt: it is not there any more; it is there and was damaged.
    """
    name, _, serial = location.rpartition(":")
    try:
        fd = _posixshmem.shm_open(name, os.O_RDONLY, mode=0)
    except FileNotFoundError:
        raise Gone("it was cleaned up, or its process died") from None
    try:
        head = os.pread(fd, BEGIN, 0)
        if len(head) < BEGIN:
            raise Corrupt("it is truncated")
        magic, crc, number, header_bytes, total = _PREAMBLE.unpack(head)
        if magic == _FREE:
            raise Gone("it was cleaned up")
        copy = None
        if magic == _MAGIC and BEGIN + header_bytes <= total <= os.fstat(fd).st_size:
            copy = _copy(fd, total)
        if copy is None or google_crc32c.value(copy[8:]) != crc:
            if os.pread(fd, BEGIN, 0) != head:
                raise Gone("it was cleaned up, and its segment used again")
            raise Corrupt("its checksum does not fit, or it is truncated")
    finally:
        os.close(fd)
    if str(number) != serial:
        raise Gone("it was cleaned up, and its segment used again")
    return copy, header_bytes


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


def new_prefix() -> str:
    """A prefix for segment names that nobody else has. Short: macOS allows 31 characters in all."""
    return f"/olp-{secrets.token_hex(6)}-"


def aligned(n: int) -> int:
    return n + -n % ALIGN


def _copy(fd: int, total: int) -> NDArray[np.uint8]:
    room = np.empty(total + ALIGN, np.uint8)
    begin = -room.ctypes.data % ALIGN
    copy, at = room[begin : begin + total], 0
    while at < total:
        n = os.preadv(fd, [copy[at:]], at)
        if n == 0:
            raise Corrupt("it is truncated")
        at += n
    return copy


def _write(fd: int, part: Any, at: int) -> int:
    view = memoryview(part)
    while view.nbytes:
        n = os.pwrite(fd, view, at)
        at += n
        view = view[n:]
    return at


def _unlink(name: str) -> None:
    try:
        _posixshmem.shm_unlink(name)
    except FileNotFoundError:
        pass  # someone swept it
    else:
        resource_tracker.unregister(name, "shared_memory")
