"""The pickles of LeRobot's clients, read without unpickling them.

``pickle.loads`` does whatever the bytes say (LeRobot's own server has a published hole of that kind, CVE-2026-25874),
and Python's unpickler, restricted in what it may look up, still allocates whatever they say. This is a reader of its
own for the few opcodes and the few names that those clients need: it imports nothing, looks nothing up, calls nothing
that a message names, and compares every length with the bytes that are left. An array is a view into the message.

Opcodes: https://github.com/python/cpython/blob/main/Lib/pickletools.py, protocols 2 to 5.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...errors import SHOWN, InvalidInput, TensorError
from ...types import Array
from ...wire.codec import Limits
from .bounds import ITEMS, Budget, dtype_of, view

_HELPERS = "lerobot.async_inference.helpers"
SETUP, OBSERVATION = "RemotePolicyConfig", "TimedObservation"
_NDARRAY, _DTYPE, _RECONSTRUCT, _SCALAR, _FROM_BUFFER = "ndarray", "dtype", "_reconstruct", "scalar", "_frombuffer"
# All names that a message may hold; numpy 1 writes ``numpy.core``.
_KNOWN: dict[tuple[str, str], str] = {
    (_HELPERS, SETUP): SETUP,
    (_HELPERS, OBSERVATION): OBSERVATION,
    ("numpy", _NDARRAY): _NDARRAY,
    ("numpy", _DTYPE): _DTYPE,
} | {
    (f"numpy.{core}.{module}", name): name
    for core in ("core", "_core")
    for module, name in (("multiarray", _RECONSTRUCT), ("multiarray", _SCALAR), ("numeric", _FROM_BUFFER))
}
_PROTOCOLS = range(2, 6)
_LONGEST_INT = 16  # bytes
_MARK = object()


@dataclass(frozen=True, slots=True)
class _Name:
    name: str


@dataclass(slots=True)
class Record:
    """An instance of a class of LeRobot's: its name, and its fields."""

    kind: str
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class _Dtype:
    """As it stands in the stream: the byte order comes after the rest."""

    text: str
    order: str = "|"

    def made(self) -> np.dtype[np.generic]:
        return dtype_of("array", self.order + self.text)


class _Map(dict[str, Any]):
    """A map of the stream; its values are finished by :func:`entries`."""


@dataclass(slots=True)
class _Shell:
    """An array whose shape and bytes have not come yet, and then it."""

    array: Array | None = None


def read(data: bytes, kind: str, limits: Limits) -> dict[str, Any]:
    """The fields of the instance of LeRobot's class ``kind`` that ``data`` pickles: plain values, arrays (read-only)
    and numpy scalars; of a field that is a map see :func:`entries`.

    Raises:
        InvalidInput: no pickle, one of other things, or more than the limits allow. TensorError: an array is none.
    """
    limits.check_message(len(data))
    made = _Machine(data, limits).run()
    if not isinstance(made, Record) or made.kind != kind:
        raise InvalidInput(f"the message must pickle a {kind}, not a {getattr(made, 'kind', type(made).__name__)}")
    return entries(made.fields)


def entries(value: Any) -> dict[str, Any]:
    """A map with finished values, one level of it: a pickle may hold itself, and so often as to never end. Raises
    :class:`InvalidInput` for what is no map."""
    if not isinstance(value, dict):
        raise InvalidInput(f"the pickle has a {type(value).__name__} where a map must be")
    return {key: _finished(each) for key, each in value.items()}


def _finished(value: Any) -> Any:
    if isinstance(value, _Shell):
        if value.array is None:
            raise TensorError("an array in the pickle has no data")
        return value.array
    if isinstance(value, _Name | _Dtype):
        raise InvalidInput("the pickle holds a name where a value must be")
    return value


class _Machine:
    """The stack machine. Every opcode takes from the budget, so that its work is bounded."""

    def __init__(self, data: bytes, limits: Limits) -> None:
        self._data, self._view, self._at = data, memoryview(data), 0
        self._limits, self._budget = limits, Budget(4 * ITEMS)
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def run(self) -> Any:
        if self._byte() != 0x80 or self._byte() not in _PROTOCOLS:
            raise InvalidInput("the message is no pickle of protocol 2 to 5")
        while True:
            self._budget.take()
            code = self._byte()
            if code == 0x2E:  # STOP
                break
            act = _OPCODES.get(code)
            if act is None:
                raise InvalidInput(f"the pickle holds an opcode that LeRobot's messages do not (0x{code:02x})")
            act(self)
        if len(self._stack) != 1 or self._at != len(self._data):
            raise InvalidInput("the pickle does not end with one value")
        return self._stack[0]

    # Bytes --------------------------------------------------------------------------------------------------

    def _byte(self) -> int:
        return self._data[self._skip(1)]

    def _skip(self, count: int) -> int:
        at = self._at
        if count > len(self._data) - at:
            raise InvalidInput("the pickle ends in the middle of a value")
        self._at = at + count
        return at

    def _length(self, size: int) -> int:
        at = self._skip(size)
        return int.from_bytes(self._data[at : at + size], "little")

    def take_bytes(self, size: int) -> None:
        count = self._length(size)
        at = self._skip(count)
        self._stack.append(self._view[at : at + count])

    def _text(self, count: int) -> str:
        at = self._skip(count)
        try:
            return self._data[at : at + count].decode()
        except UnicodeDecodeError:
            raise InvalidInput("text in the pickle is not UTF-8") from None

    def _line(self) -> str:
        end = self._data.find(b"\n", self._at, self._at + 256)
        if end < 0:
            raise InvalidInput("the pickle ends in the middle of a name")
        text = self._text(end - self._at)
        self._skip(1)
        return text

    def text(self, size: int) -> None:
        self._stack.append(self._text(self._length(size)))

    def number(self, form: struct.Struct) -> None:
        self._stack.append(form.unpack_from(self._data, self._skip(form.size))[0])

    def long(self) -> None:
        count = self._byte()
        if count > _LONGEST_INT:
            raise InvalidInput("an integer in the pickle has more than 16 bytes")
        at = self._skip(count)
        self._stack.append(int.from_bytes(self._data[at : at + count], "little", signed=True))

    def frame(self) -> None:
        self._length(8)  # says how much to read at once; all is here

    # Stack and memo -----------------------------------------------------------------------------------------

    def push(self, value: Any) -> None:
        self._stack.append(value)

    def _pop(self) -> Any:
        if not self._stack or self._stack[-1] is _MARK:
            raise InvalidInput("the pickle takes more from its stack than is there")
        return self._stack.pop()

    def _since_mark(self) -> list[Any]:
        taken: list[Any] = []
        while self._stack:
            value = self._stack.pop()
            if value is _MARK:
                taken.reverse()
                return taken
            taken.append(value)
        raise InvalidInput("the pickle takes more from its stack than is there")

    def _top(self, kind: type[Any]) -> Any:
        if not self._stack or type(self._stack[-1]) is not kind:
            raise InvalidInput(f"the pickle fills what is no {kind.__name__}")
        return self._stack[-1]

    def memoize(self, index: int | None = None) -> None:
        value = self._pop()
        self._stack.append(value)
        self._memo[len(self._memo) if index is None else index] = value

    def put(self, size: int) -> None:
        self.memoize(self._length(size))

    def get(self, size: int) -> None:
        index = self._length(size)
        if index not in self._memo:
            raise InvalidInput("the pickle refers to what it does not hold")
        self._stack.append(self._memo[index])

    def pop(self) -> None:
        self._pop()

    # Containers ---------------------------------------------------------------------------------------------

    def tuple_of(self, count: int) -> None:
        values = [self._pop() for _ in range(count)]
        self._stack.append(tuple(reversed(values)))

    def tuple_since(self) -> None:
        self._stack.append(tuple(self._since_mark()))

    def append(self) -> None:
        value = self._pop()
        self._top(list).append(value)

    def appends(self) -> None:
        values = self._since_mark()
        self._top(list).extend(values)

    def setitem(self) -> None:
        value, key = self._pop(), self._pop()
        self._set(self._top(_Map), [key, value])

    def setitems(self) -> None:
        values = self._since_mark()
        self._set(self._top(_Map), values)

    def _set(self, into: dict[str, Any], values: list[Any]) -> None:
        if len(values) % 2:
            raise InvalidInput("a map in the pickle has a key without a value")
        for key, value in zip(values[::2], values[1::2], strict=True):
            if type(key) is not str:
                raise InvalidInput("a map in the pickle has a key that is no text")
            into[key] = value

    # Names --------------------------------------------------------------------------------------------------

    def global_line(self) -> None:
        self._name(self._line(), self._line())

    def global_stack(self) -> None:
        name, module = self._pop(), self._pop()
        if type(name) is not str or type(module) is not str:
            raise InvalidInput("a name in the pickle is no text")
        self._name(module, name)

    def _name(self, module: str, name: str) -> None:
        known = _KNOWN.get((module, name))
        if known is None:
            shown = f"{module[:SHOWN]}.{name[:SHOWN]}"
            raise InvalidInput(f"the pickle names {shown!r}; only LeRobot's requests and numpy's arrays are taken")
        self._stack.append(_Name(known))

    def new(self) -> None:
        arguments, kind = self._pop(), self._pop()
        if not (isinstance(kind, _Name) and kind.name in (SETUP, OBSERVATION)) or arguments != ():
            raise InvalidInput("the pickle makes what is no request of LeRobot's")
        self._stack.append(Record(kind.name))

    def reduce(self) -> None:
        arguments, called = self._pop(), self._pop()
        if not (isinstance(called, _Name) and type(arguments) is tuple):
            raise InvalidInput("the pickle calls what is no name")
        self._stack.append(self._made(called.name, arguments))

    def _made(self, name: str, arguments: Any) -> Any:
        match name, arguments:
            case "dtype", (str() as text, _, _):
                return _Dtype(text[:SHOWN])
            case "_reconstruct", (_Name("ndarray"), (0,), _):
                return _Shell()
            case "scalar", (_Dtype() as dtype, memoryview() as data):
                return view("number", dtype.made(), (), data, self._limits)[()]
            case "_frombuffer", (memoryview() as data, _Dtype() as dtype, shape, str() as order):
                return _Shell(self._array(shape, dtype, order == "F", data))
            case _:
                raise InvalidInput(f"the pickle calls {name!r} with arguments that it does not take")

    def build(self) -> None:
        state = self._pop()
        made = self._pop()
        self._stack.append(made)
        match made, state:
            case Record(), _Map():
                made.fields.update(state)
            case _Dtype(), (int(), str() as order, None, None, None, *_) if order in ("<", ">", "|", "="):
                made.order = "<" if order == "=" else order
            case _Shell(), (int(), shape, _Dtype() as dtype, bool() as fortran, memoryview() as data):
                made.array = self._array(shape, dtype, fortran, data)
            case _:
                raise InvalidInput("the pickle fills something with a state that is not its own")

    def _array(self, shape: Any, dtype: _Dtype, fortran: bool, data: memoryview) -> Array:
        if type(shape) is not tuple or not all(type(dim) is int for dim in shape):
            raise TensorError("an array in the pickle has a shape that does not consist of integers")
        return view("array", dtype.made(), shape, data, self._limits, "F" if fortran else "C")


_FLOAT, _INT = struct.Struct(">d"), struct.Struct("<i")
_OPCODES: dict[int, Callable[[_Machine], None]] = {
    ord("("): lambda m: m.push(_MARK),
    ord(")"): lambda m: m.push(()),
    ord("]"): lambda m: m.push([]),
    ord("}"): lambda m: m.push(_Map()),
    ord("N"): lambda m: m.push(None),
    0x88: lambda m: m.push(True),
    0x89: lambda m: m.push(False),
    ord("G"): lambda m: m.number(_FLOAT),
    ord("J"): lambda m: m.number(_INT),
    ord("K"): lambda m: m.push(m._length(1)),
    ord("M"): lambda m: m.push(m._length(2)),
    0x8A: _Machine.long,
    0x8C: lambda m: m.text(1),
    ord("X"): lambda m: m.text(4),
    0x8D: lambda m: m.text(8),
    ord("C"): lambda m: m.take_bytes(1),
    ord("B"): lambda m: m.take_bytes(4),
    0x8E: lambda m: m.take_bytes(8),
    0x96: lambda m: m.take_bytes(8),  # a bytearray, of protocol 5
    0x95: _Machine.frame,
    0x94: lambda m: m.memoize(),
    ord("q"): lambda m: m.put(1),
    ord("r"): lambda m: m.put(4),
    ord("h"): lambda m: m.get(1),
    ord("j"): lambda m: m.get(4),
    ord("0"): _Machine.pop,
    0x85: lambda m: m.tuple_of(1),
    0x86: lambda m: m.tuple_of(2),
    0x87: lambda m: m.tuple_of(3),
    ord("t"): _Machine.tuple_since,
    ord("a"): _Machine.append,
    ord("e"): _Machine.appends,
    ord("s"): _Machine.setitem,
    ord("u"): _Machine.setitems,
    ord("c"): _Machine.global_line,
    0x93: _Machine.global_stack,
    0x81: _Machine.new,
    ord("R"): _Machine.reduce,
    ord("b"): _Machine.build,
}
