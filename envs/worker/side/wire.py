"""Messages between an env and its worker: a JSON object, and named arrays as raw bytes. No IO here.

A frame is ``b"OLEW"``, the protocol's version (u16), the length of the header (u32) and of the body (u64), big-endian;
the header, JSON in UTF-8: ``{"fields": {..}, "arrays": [[name, dtype, shape], ..]}``; the body, the arrays' bytes one
after the other, each C-contiguous. Nothing that arrives becomes code.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

PROTOCOL = 1
HEAD = struct.Struct(">4sHIQ")
MAGIC = b"OLEW"
MAX_HEADER, MAX_BODY = 1 << 20, 1 << 28  # bytes
_KINDS = "biuf"

Array = NDArray[Any]
Read = Callable[[int], bytearray]  # exactly so many bytes


class WireError(Exception):
    """What arrived is no message of this protocol."""


class VersionError(WireError):
    """It is a message of another version of this protocol."""


@dataclass(frozen=True)
class Message:
    """``fields``: what JSON holds. ``arrays``: of numbers or booleans."""

    fields: Mapping[str, Any]
    arrays: Mapping[str, Array] = field(default_factory=dict)


def pack(message: Message) -> bytes:
    """The frame of ``message``. Raises :class:`WireError` for what does not travel."""
    listed, parts = [], []
    for name, value in message.arrays.items():
        array = np.ascontiguousarray(value)
        if array.dtype.kind not in _KINDS:
            raise WireError(f"array {name!r} is of {array.dtype}: only numbers and booleans travel")
        little = array.astype(array.dtype.newbyteorder("<"), copy=False)
        listed.append([name, little.dtype.str, list(np.shape(value))])
        parts.append(little.tobytes())
    try:
        header = json.dumps({"fields": dict(message.fields), "arrays": listed}).encode()
    except (TypeError, ValueError) as e:
        raise WireError(f"what does not fit into JSON does not travel: {e}") from None
    body = b"".join(parts)
    if len(header) > MAX_HEADER or len(body) > MAX_BODY:
        raise WireError(f"a message of {len(header)} + {len(body)} bytes is too large")
    return HEAD.pack(MAGIC, PROTOCOL, len(header), len(body)) + header + body


def read(take: Read) -> Message:
    """The next message of the bytes that ``take`` gives; its arrays are writable and nobody else's.

    Raises:
        VersionError: of another version. WireError: of no version. Whatever ``take`` raises.
    """
    magic, version, header, body = HEAD.unpack(take(HEAD.size))
    if magic != MAGIC:
        raise WireError(f"it begins with {magic!r}")
    if version != PROTOCOL:
        raise VersionError(f"it speaks version {version} of the protocol, this side version {PROTOCOL}")
    if header > MAX_HEADER or body > MAX_BODY:
        raise WireError(f"it announces {header} + {body} bytes")
    return _message(bytes(take(header)), take(body))


def _message(header: bytes, body: bytearray) -> Message:
    try:
        content = json.loads(header)
    except (ValueError, RecursionError):  # of which UnicodeDecodeError is one
        raise WireError("its header is no JSON") from None
    if not isinstance(content, dict):
        raise WireError("its header is no object")
    fields, listed = content.get("fields"), content.get("arrays")
    if not isinstance(fields, dict) or not isinstance(listed, list):
        raise WireError("its header lacks fields or arrays")
    arrays: dict[str, Array] = {}
    at = 0
    for entry in listed:
        name, dtype, shape = _entry(entry)
        size = dtype.itemsize * prod(shape)
        if dtype.itemsize * prod(filter(None, shape)) > MAX_BODY:  # numpy overflows, also where one length is zero
            raise WireError(f"array {name[:64]!r} has a shape that is none")
        if size > len(body) - at or name in arrays:
            raise WireError(f"array {name[:64]!r} is there twice, or longer than its bytes")
        count = size // dtype.itemsize
        arrays[name] = np.frombuffer(body, dtype, count, at).reshape(shape).copy() if count else np.zeros(shape, dtype)
        at += size
    if at != len(body):
        raise WireError(f"{len(body) - at} bytes belong to no array")
    return Message(fields, arrays)


def _entry(entry: Any) -> tuple[str, np.dtype[Any], tuple[int, ...]]:
    if not (isinstance(entry, list) and len(entry) == 3):
        raise WireError("an array needs name, dtype and shape")
    name, text, shape = entry
    if not (isinstance(name, str) and isinstance(text, str) and isinstance(shape, list) and len(shape) <= 8):
        raise WireError("an array needs name, dtype and shape")
    if not all(type(length) is int and 0 <= length <= MAX_BODY for length in shape):
        raise WireError(f"array {name[:64]!r} has a shape that is none")
    try:
        dtype = np.dtype(text)
    except (TypeError, ValueError, SyntaxError):
        raise WireError(f"array {name[:64]!r} has a dtype that is none") from None
    if dtype.kind not in _KINDS or dtype.subdtype is not None or not dtype.itemsize:
        raise WireError(f"array {name[:64]!r} is of no numbers")
    return name, dtype, tuple(shape)
