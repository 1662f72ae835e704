"""msgpack with numpy arrays, as openpi's clients write and read it.

An array is a map of four keys that are *bin*: ``{b"__ndarray__": True, b"data": bytes, b"dtype": "<f4", b"shape":
[..]}``; a numpy scalar ``{b"__npgeneric__": True, b"data": item, b"dtype": "<f4"}``. Bytes are those of the msgpack
specification's shortest forms, in the order of the map (https://github.com/msgpack/msgpack/blob/master/spec.md).

Own code and no library: those allocate a list of as many entries as its header says, within the bytes of the message
but again at every depth, and copy each array's bytes. Here every length is compared with the bytes that are left, the
values of a message are counted, and an array is a view into the message.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ...errors import SHOWN, InvalidInput, TensorError
from ...types import Array
from ...wire.codec import Limits
from .bounds import DEPTH, Budget, dtype_of, view

_ARRAY, _SCALAR = b"__ndarray__", b"__npgeneric__"
_BIN = {0xC4: 1, 0xC5: 2, 0xC6: 4}
_STR = {0xD9: 1, 0xDA: 2, 0xDB: 4}
_LIST = {0xDC: 2, 0xDD: 4}
_MAP = {0xDE: 2, 0xDF: 4}
_CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}
_NUMBERS: dict[int, struct.Struct] = {
    code: struct.Struct(f">{form}") for code, form in zip((0xCA, 0xCB, *range(0xCC, 0xD4)), "fdBHIQbhiq", strict=True)
}


def unpack(data: bytes, limits: Limits) -> Any:
    """The one value in ``data``: maps, lists, text, numbers, ``bytes``, arrays (read-only views of ``data``) and numpy
    scalars.

    Raises:
        InvalidInput: not msgpack, more than one value, or too many or too deep. TensorError: an array that is none.
    """
    limits.check_message(len(data))
    reader = _Reader(data, limits)
    value = reader.value("message", 0)
    reader.end()
    return value


class _Reader:
    def __init__(self, data: bytes, limits: Limits) -> None:
        self._data, self._view, self._at = data, memoryview(data), 0
        self._limits, self._budget = limits, Budget()

    def end(self) -> None:
        if self._at != len(self._data):
            raise InvalidInput(f"{len(self._data) - self._at} bytes follow the message's one value")

    def value(self, name: str, depth: int) -> Any:
        """``name`` is the key it stands under, for texts."""
        self._budget.take()
        code = self._data[self._skip(1)]
        if code <= 0x7F:
            return code
        if code >= 0xE0:
            return code - 256
        if code <= 0x8F:
            return self._map(code & 0x0F, name, depth)
        if code <= 0x9F:
            return self._list(code & 0x0F, name, depth)
        if code <= 0xBF:
            return self._text(code & 0x1F)
        if code in _CONSTANTS:
            return _CONSTANTS[code]
        if code in _NUMBERS:
            number = _NUMBERS[code]
            return number.unpack_from(self._data, self._skip(number.size))[0]
        return self._sized(code, name, depth)

    def _sized(self, code: int, name: str, depth: int) -> Any:
        if code in _BIN:
            return self._bytes(self._length(_BIN[code]))
        if code in _STR:
            return self._text(self._length(_STR[code]))
        if code in _LIST:
            return self._list(self._length(_LIST[code]), name, depth)
        if code in _MAP:
            return self._map(self._length(_MAP[code]), name, depth)
        raise InvalidInput(f"the message is no msgpack, or of types that do not travel (byte 0x{code:02x})")

    def _skip(self, count: int) -> int:
        """Where ``count`` bytes begin that are there; the reader stands after them."""
        at = self._at
        if count > len(self._data) - at:
            raise InvalidInput("the message ends in the middle of a value")
        self._at = at + count
        return at

    def _length(self, size: int) -> int:
        at = self._skip(size)
        return int.from_bytes(self._data[at : at + size], "big")

    def _bytes(self, count: int) -> memoryview:
        at = self._skip(count)
        return self._view[at : at + count]

    def _text(self, count: int) -> str:
        at = self._skip(count)
        try:
            return self._data[at : at + count].decode()
        except UnicodeDecodeError:
            raise InvalidInput("text in the message is not UTF-8") from None

    def _list(self, count: int, name: str, depth: int) -> list[Any]:
        self._enter(count, depth)
        return [_plain(self.value(name, depth + 1)) for _ in range(count)]

    def _map(self, count: int, name: str, depth: int) -> Any:
        self._enter(2 * count, depth)
        found: dict[Any, Any] = {}
        for _ in range(count):
            key = _plain(self.value(name, depth + 1))
            if not isinstance(key, str | bytes | int | float | None):
                raise InvalidInput("a map in the message has a key that is a list, a map or an array")
            if key in found:
                raise InvalidInput(f"a map in the message has the key {str(key)[:SHOWN]!r} twice")
            found[key] = self.value(key[:SHOWN] if isinstance(key, str) else name, depth + 1)
        if _ARRAY in found:
            return self._array(found, name)
        if _SCALAR in found:
            return self._scalar(found, name)
        return {key: _plain(value) for key, value in found.items()}

    def _enter(self, values: int, depth: int) -> None:
        if depth >= DEPTH:
            raise InvalidInput(f"maps and lists lie more than {DEPTH} deep in each other")
        if values > len(self._data) - self._at:  # each is a byte at least
            raise InvalidInput("the message ends in the middle of a map or list")

    def _array(self, found: Mapping[Any, Any], name: str) -> Array:
        data, text, shape = found.get(b"data"), found.get(b"dtype"), found.get(b"shape")
        if not (isinstance(data, memoryview) and isinstance(text, str) and isinstance(shape, list)):
            raise TensorError(f"{name!r} is no array: its map needs bin 'data', text 'dtype' and a list 'shape'")
        if not all(type(dim) is int for dim in shape):
            raise TensorError(f"{name!r} has a shape that does not consist of integers")
        return view(name, dtype_of(name, text), shape, data, self._limits)

    def _scalar(self, found: Mapping[Any, Any], name: str) -> np.generic:
        data, text = found.get(b"data"), found.get(b"dtype")
        if not (isinstance(data, bool | int | float) and isinstance(text, str)):
            raise TensorError(f"{name!r} is no number: its map needs a number 'data' and text 'dtype'")
        dtype = dtype_of(name, text)
        if dtype.kind == "f":
            with np.errstate(over="ignore"):  # infinite then, and refused where it must be finite
                return dtype.type(data)
        low, high = (0, 1) if dtype.kind == "b" else (int(np.iinfo(dtype.name).min), int(np.iinfo(dtype.name).max))
        if not (isinstance(data, int) and low <= data <= high):
            raise TensorError(f"{name!r} is {data!r}, which is no {dtype.name}")
        return dtype.type(data)


def _plain(value: Any) -> Any:
    """Bytes outside arrays are copied: they are short, and may be keys."""
    return bytes(value) if isinstance(value, memoryview) else value


def pack(value: Any) -> bytes:
    """``value`` as openpi's client reads it. Raises :class:`TensorError` for an array of anything but numbers, and
    :class:`TypeError` for what msgpack has no form for: what is packed is this server's own."""
    out: list[Any] = []
    _write(value, out.append)
    return b"".join(out)


def _write(value: Any, put: Callable[[Any], None]) -> None:
    if value is None or value is True or value is False:
        put({None: b"\xc0", False: b"\xc2", True: b"\xc3"}[value])
    elif isinstance(value, np.ndarray):
        _check_kind(value.dtype)
        flat = value if value.flags.c_contiguous else np.ascontiguousarray(value)
        data = flat.reshape(-1).view(np.uint8).data if value.size else b""
        _write_map({_ARRAY: True, b"data": data, b"dtype": value.dtype.str, b"shape": value.shape}, put)
    elif isinstance(value, float):  # np.float64 is one
        put(b"\xcb" + _NUMBERS[0xCB].pack(value))
    elif isinstance(value, np.generic):
        _check_kind(value.dtype)
        _write_map({_SCALAR: True, b"data": value.item(), b"dtype": value.dtype.str}, put)
    elif isinstance(value, int):
        put(_integer(value))
    elif isinstance(value, str):
        data = value.encode()
        put(bytes([0xA0 | len(data)]) if len(data) < 32 else _header(len(data), _STR))
        put(data)
    elif isinstance(value, bytes | memoryview):
        put(_header(len(value), _BIN))
        put(value)
    elif isinstance(value, Mapping):
        _write_map(value, put)
    elif isinstance(value, list | tuple):
        put(bytes([0x90 | len(value)]) if len(value) < 16 else _header(len(value), _LIST))
        for each in value:
            _write(each, put)
    else:
        raise TypeError(f"msgpack has no form for {type(value).__name__}")


def _write_map(value: Mapping[Any, Any], put: Callable[[Any], None]) -> None:
    put(bytes([0x80 | len(value)]) if len(value) < 16 else _header(len(value), _MAP))
    for key, each in value.items():
        _write(key, put)
        _write(each, put)


def _header(length: int, sizes: Mapping[int, int]) -> bytes:
    for code, size in sizes.items():
        if length < 1 << (8 * size):
            return bytes([code]) + length.to_bytes(size, "big")
    raise TensorError(f"{length} bytes or entries are more than msgpack has a form for")


def _integer(value: int) -> bytes:
    if -32 <= value <= 127:
        return bytes([value & 0xFF])
    codes = range(0xCC, 0xD0) if value > 0 else range(0xD0, 0xD4)
    for code, bits in zip(codes, (8, 16, 32, 64), strict=True):
        if value < 1 << bits if value > 0 else value >= -(1 << (bits - 1)):
            return bytes([code]) + _NUMBERS[code].pack(value)
    raise TensorError(f"{value} does not fit into 64 bits")


def _check_kind(dtype: np.dtype[Any]) -> None:
    if dtype.kind not in "biufSU":
        raise TensorError(f"an array of {dtype} does not travel: numbers, booleans and text do")
