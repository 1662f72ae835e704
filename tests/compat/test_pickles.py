"""The reader of LeRobot's pickles: what it reads, and that nothing else can make it do anything."""

import os
import pickle
import random
import sys
import tracemalloc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from omni_loop.errors import InvalidInput
from omni_loop.serve.compat import pickles
from omni_loop.wire.codec import Limits

LIMITS = Limits()
MODULE = b"lerobot.async_inference.helpers"
HEAD = b"\x80\x04\x8c\x1f" + MODULE + b"\x8c\x10TimedObservation\x93)\x81}(\x8c\x05value"
TAIL = b"ub."


def whole(value: Any) -> bytes:
    """A TimedObservation with ``value``, which is pickled as Python does it."""
    return HEAD + pickle.dumps(value, protocol=4)[2:-1].replace(b"\x94", b"") + TAIL


def read(data: bytes) -> Any:
    return pickles.read(data, pickles.OBSERVATION, LIMITS)["value"]


@pytest.mark.parametrize("value", [0, -1, 255, 65536, 1 << 40, 1.5, True, None, "é" * 300, (1, 2, 3, 4), []])
def test_plain_values_are_read(value: Any) -> None:
    assert read(whole(value)) == value


def _array(array: np.ndarray[Any, Any], protocol: int = 4) -> bytes:
    return b"\x80" + bytes([protocol]) + HEAD[2:] + pickle.dumps(array, protocol=protocol)[2:-1] + TAIL


@pytest.mark.parametrize("protocol", [4, 5])
@pytest.mark.parametrize(
    "array",
    [
        np.arange(12, dtype=np.float32).reshape(3, 4),
        np.asfortranarray(np.arange(12, dtype="<i8").reshape(3, 4)),
        np.zeros((0, 3)),
        np.full((64, 64, 3), 9, np.uint8),
        np.array([True, False]),
        np.arange(4, dtype=">f8"),
    ],
)
def test_arrays_are_read_without_a_copy(array: np.ndarray[Any, Any], protocol: int) -> None:
    found = read(_array(array, protocol))
    np.testing.assert_array_equal(found, array)
    assert found.dtype == array.dtype
    assert not found.flags.writeable


class _Runs:
    def __reduce__(self) -> Any:
        return os.system, ("touch /tmp/never",)


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps(_Runs(), protocol=4),
        pickle.dumps(_Runs(), protocol=2),
        b"cos\nsystem\n(S'id'\ntR.",
        whole(print),
        b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93\x8c\x011\x85R.",
        b"\x80\x04\x8c\rtorch.storage\x8c\x10_load_from_bytes\x93C\x01x\x85R.",
        b"\x80\x04cnumpy\nload\n\x8c\x01x\x85R.",
        b"\x80\x04\x8c\x05numpy\x8c\x07ndarray\x93J\xff\xff\xff\x7f\x85R.",
        b"\x80\x04}r\xff\xff\xff\xff.",
        b"\x80\x04B\xff\xff\xff\x7f.",
        b"\x80\x04\x95" + b"\xff" * 8 + b"N.",
        b"\x80\x04\x8a\xff" + b"\xff" * 255 + b".",
        b"\x80\x04h\x00.",
        b"\x80\x04(((.",
        b"\x80\x04b.",
        b"\x80\x04u.",
        b"\x80\x04N",
        b"\x80\x04" + b"N0" * 70_000 + b"N.",
        b"\x80\x04}\x94\x8c\x01ah\x00s.",
        b"",
        b"\x80\x00N.",
    ],
)
def test_anything_else_is_refused_in_little_memory(data: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(InvalidInput):
            pickles.read(data, pickles.OBSERVATION, LIMITS)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 22


_heard: list[str] | None = None
_CODE = (
    "import",
    "exec",
    "compile",
    "open",
    "os.",
    "subprocess.",
    "socket.",
    "pickle.",
    "ctypes.",
    "marshal.",
    "code.",
)


def _hook(event: str, _: tuple[Any, ...]) -> None:
    if _heard is not None and event.startswith(_CODE):
        _heard.append(event)


@pytest.fixture
def heard() -> Iterator[list[str]]:
    """What Python's own auditing hears of imports, files, processes and code; hooks cannot be taken away again."""
    global _heard
    if not getattr(sys, "_compat_hook", False):
        sys.addaudithook(_hook)
        sys._compat_hook = True  # type: ignore[attr-defined]
    _heard = []
    yield _heard
    _heard = None


def test_mutated_pickles_are_read_or_refused_and_run_nothing(heard: list[str]) -> None:
    base = [
        _array(np.arange(12, dtype=np.float32).reshape(3, 4)),
        _array(np.arange(3, dtype=np.int16), 5),
        whole({"a": 1.0, "b": (1, "x"), "c": [1, 2]}),
        pickle.dumps(_Runs(), protocol=4),
    ]
    read(base[0])  # what is loaded at first use is loaded
    heard.clear()
    rng = random.Random(3)
    refused = 0
    for _ in range(10_000):
        data = bytearray(rng.choice(base))
        for _ in range(rng.randrange(1, 5)):
            at = rng.randrange(len(data))
            if rng.random() < 0.2:
                del data[at : at + rng.randrange(1, 9)]
            elif rng.random() < 0.3:
                other = rng.choice(base)
                start = rng.randrange(len(other))
                data[at:at] = other[start : start + rng.randrange(1, 40)]
            else:
                data[at] = rng.randrange(256)
            if not data:
                data = bytearray(b".")
        try:
            pickles.read(bytes(data), pickles.OBSERVATION, LIMITS)
        except InvalidInput:
            refused += 1
    assert 0 < refused < 10_000
    assert not heard
