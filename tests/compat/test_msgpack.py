"""openpi's msgpack: its bytes, and every length checked before anything is allocated."""

import random
import struct
import tracemalloc
from typing import Any

import numpy as np
import pytest

from omni_loop.errors import InvalidInput, TensorError
from omni_loop.serve.compat import msgpack
from omni_loop.wire.codec import Limits

LIMITS = Limits()
ALL: dict[str, Any] = {
    "integers": [0, 1, -1, -32, -33, 127, 128, 255, 256, 65535, 65536, 1 << 32, (1 << 64) - 1, -128, -129, -32769],
    "constants": [None, True, False, 1.5],
    "text": ["", "x" * 31, "é" * 40, "y" * 300, "z" * 70_000],
    "bytes": b"q" * 300,
    "array": np.arange(12, dtype=np.float32).reshape(3, 4),
    "transposed": np.arange(12, dtype="<i8").reshape(3, 4).T,
    "empty": np.zeros((0, 3)),
    "image": np.full((8, 8, 3), 200, np.uint8),
    "scalar": np.float32(2.5),
    "count": np.int16(-3),
    "map": {f"k{i}": i for i in range(20)},
}


def test_an_array_has_the_bytes_that_openpi_writes() -> None:
    expected = bytes.fromhex("81a161" + "84c40b") + b"__ndarray__" + bytes.fromhex("c3c404") + b"data"
    expected += bytes.fromhex("c4020102c405") + b"dtype" + b"\xa3|u1" + b"\xc4\x05shape" + b"\x91\x02"
    assert msgpack.pack({"a": np.array([1, 2], np.uint8)}) == expected


def test_all_it_packs_comes_back() -> None:
    back = msgpack.unpack(msgpack.pack(ALL), LIMITS)
    assert back.keys() == ALL.keys()
    for name, value in ALL.items():
        np.testing.assert_array_equal(back[name], value)
        if isinstance(value, np.ndarray | np.generic):
            assert back[name].dtype == value.dtype
    assert not back["image"].flags.writeable


def test_bytes_are_those_of_the_library() -> None:
    library = pytest.importorskip("msgpack")
    plain = {name: value for name, value in ALL.items() if not isinstance(value, np.ndarray | np.generic)}
    assert msgpack.pack(plain) == library.packb(plain)


def test_an_array_is_a_view_of_the_message() -> None:
    message = msgpack.pack({"image": np.zeros((256, 256, 3), np.uint8)})
    tracemalloc.start()
    try:
        image = msgpack.unpack(message, LIMITS)["image"]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert image.shape == (256, 256, 3)
    assert peak < image.nbytes / 2


def test_integer_map_keys_are_read() -> None:
    assert msgpack.unpack(msgpack.pack({1: {2: "x"}}), LIMITS) == {1: {2: "x"}}


def _array(dtype: bytes, shape: bytes, data: bytes) -> bytes:
    text = bytes([0xA0 | len(dtype)]) + dtype
    return (
        b"\x84\xc4\x0b__ndarray__\xc3\xc4\x04data\xc4"
        + bytes([len(data)])
        + data
        + b"\xc4\x05dtype"
        + text
        + (b"\xc4\x05shape" + shape)
    )


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (b"", "middle of a value"),
        (b"\xdd\xff\xff\xff\xff", "middle of a map or list"),
        (b"\xdf\xff\xff\xff\xff", "middle of a map or list"),
        (b"\xc6\xff\xff\xff\xff", "middle of a value"),
        (b"\xdb\xff\xff\xff\xff", "middle of a value"),
        (b"\x91" * 100 + b"\x00", "deep"),
        (b"\xc1", "0xc1"),
        (b"\xd4\x01\x00", "0xd4"),
        (b"\x01\x02", "follow"),
        (b"\xa1\xff", "UTF-8"),
        (b"\x82\xa1a\x01\xa1a\x02", "twice"),
        (b"\x81\x90\x01", "key"),
        (b"\xdc\xff\xff" + b"\x00" * 65535, "more than 16384 values"),
    ],
)
def test_what_is_no_message_is_refused(message: bytes, says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        msgpack.unpack(message, LIMITS)


@pytest.mark.parametrize(
    ("dtype", "shape", "data"),
    [
        (b"|O", b"\x91\x01", b"\0" * 8),
        (b"<c8", b"\x91\x01", b"\0" * 8),
        (b"|V8", b"\x91\x01", b"\0" * 8),
        (b"<U2", b"\x91\x01", b"\0" * 8),
        (b"<M8", b"\x91\x01", b"\0" * 8),
        (b"<f4", b"\x91\x03", b"\0" * 8),
        (b"<f4", b"\x91\xff", b"\0" * 8),
        (b"<f4", b"\x92\x00\xcf" + struct.pack(">Q", 1 << 62), b""),
        (b"<f4", b"\x92\xce\x80\x00\x00\x00\xce\x80\x00\x00\x00", b""),
        (b"<f4", b"\x91\xc3", b"\0" * 4),
        (b"|b1", b"\x91\x01", b"\x02"),
        (b"u1,u1", b"\x91\x01", b"\0\0"),
    ],
)
def test_an_array_that_is_none_is_refused(dtype: bytes, shape: bytes, data: bytes) -> None:
    with pytest.raises(TensorError):
        msgpack.unpack(b"\x81\xa1a" + _array(dtype, shape, data), LIMITS)


def test_mutated_messages_are_read_or_refused() -> None:
    whole = msgpack.pack({key: value for key, value in ALL.items() if key != "text"})
    rng = random.Random(5)
    refused = 0
    for _ in range(5000):
        message = bytearray(whole[: rng.randrange(1, len(whole) + 1)] if rng.random() < 0.3 else whole)
        for _ in range(rng.randrange(1, 6)):
            message[rng.randrange(len(message))] = rng.randrange(256)
        try:
            msgpack.unpack(bytes(message), LIMITS)
        except InvalidInput:
            refused += 1
    assert 0 < refused < 5000
