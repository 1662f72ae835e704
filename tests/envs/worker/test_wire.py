"""Messages of the worker protocol: what goes in comes out to the bit, and anything else is one error type."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest

from omni_loop_envs.worker.side.wire import HEAD, MAGIC, PROTOCOL, Message, Read, VersionError, WireError, pack, read

SOME = {
    "flags": np.array([True, False]),
    "image": np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3),
    "state": np.array([1.5, np.nan, np.inf, -0.0], np.float32),
    "one": np.array(7, np.int64),
    "none": np.zeros((0, 4), np.float64),
}


def reading(data: bytes) -> Read:
    left = bytearray(data)

    def take(count: int) -> bytearray:
        if count > len(left):
            raise EOFError
        taken = left[:count]
        del left[:count]
        return taken

    return take


def frame(header: object, body: bytes = b"", version: int = PROTOCOL, magic: bytes = MAGIC) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return HEAD.pack(magic, version, len(text), len(body)) + text + body


def test_arrays_arrive_to_the_bit_and_belong_to_who_reads() -> None:
    got = read(reading(pack(Message({"id": 3, "seed": 2**53, "rate": 0.1, "text": "Ü"}, SOME))))
    assert got.fields == {"id": 3, "seed": 2**53, "rate": 0.1, "text": "Ü"}
    assert list(got.arrays) == list(SOME)
    for name, sent in SOME.items():
        array = got.arrays[name]
        assert (array.dtype, array.shape) == (sent.dtype, sent.shape)
        assert array.tobytes() == sent.tobytes()
        array[...] = 0  # writable


def test_messages_follow_each_other() -> None:
    take = reading(pack(Message({"id": 1}, SOME)) + pack(Message({"id": 2})))
    assert read(take).fields == {"id": 1}
    assert read(take).fields == {"id": 2}
    with pytest.raises(EOFError):
        read(take)


def test_parts_of_arrays_and_other_byte_orders_travel_as_what_they_mean() -> None:
    whole = np.arange(12, dtype=">f4").reshape(3, 4)
    got = read(reading(pack(Message({}, {"part": whole[:, ::2]})))).arrays["part"]
    assert got.dtype == np.dtype("<f4")
    assert (got == whole[:, ::2]).all()


@pytest.mark.parametrize("value", [np.array(["a"]), np.array([{}], object), np.array([1j])])
def test_only_numbers_travel(value: np.ndarray) -> None:  # type: ignore[type-arg]
    with pytest.raises(WireError, match="only numbers"):
        pack(Message({}, {"x": value}))


def test_what_json_does_not_hold_is_refused_where_it_is_sent() -> None:
    with pytest.raises(WireError, match="JSON"):
        pack(Message({"options": {"path": object()}}))


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (frame({"fields": {}, "arrays": []}, magic=b"HTTP"), "begins with"),
        (HEAD.pack(MAGIC, PROTOCOL, 1 << 30, 0), "announces"),
        (HEAD.pack(MAGIC, PROTOCOL, 2, 1 << 40), "announces"),
        (frame(b"\xff\xfe"), "no JSON"),
        (frame(b"[" * 100_000), "no JSON"),
        (frame([]), "no object"),
        (frame({"fields": {}}), "lacks"),
        (frame({"fields": {}, "arrays": [["x", "<f4"]]}), "needs name, dtype and shape"),
        (frame({"fields": {}, "arrays": [["x", "<f4", [-1]]]}), "shape"),
        (frame({"fields": {}, "arrays": [["x", "<f4", [True]]]}), "shape"),
        (frame({"fields": {}, "arrays": [["x", "<f4", [2**40, 2**40]]]}), "shape"),
        (frame({"fields": {}, "arrays": [["x", "<f4", [1 << 27, 1 << 27, 1 << 27]]]}), "shape"),
        (frame({"fields": {}, "arrays": [["x", "<f4", [0, 1 << 28, 1 << 28, 1 << 28]]]}), "shape"),
        (frame({"fields": {}, "arrays": [["x", "<f4", [3]]]}, b"12345678"), "longer than its bytes"),
        (frame({"fields": {}, "arrays": [["x", "O", [1]]]}, b"12345678"), "no numbers"),
        (frame({"fields": {}, "arrays": [["x", "f4,f4", [1]]]}, b"12345678"), "no numbers"),
        (frame({"fields": {}, "arrays": [["x", "no dtype", [1]]]}, b"12345678"), "dtype"),
        (frame({"fields": {}, "arrays": [["x", "<f4", [1]], ["x", "<f4", [1]]]}, b"12345678"), "twice"),
        (frame({"fields": {}, "arrays": [["x", "<f4", [1]]]}, b"12345678"), "belong to no array"),
    ],
)
def test_what_is_no_message_is_said(data: bytes, what: str) -> None:
    with pytest.raises(WireError, match=what):
        read(reading(data))


def test_another_version_is_told_from_garbage() -> None:
    with pytest.raises(VersionError, match=f"version {PROTOCOL + 1}.*version {PROTOCOL}"):
        read(reading(frame({"another": "form"}, version=PROTOCOL + 1)))


def test_changed_bytes_are_a_message_or_a_wire_error() -> None:
    good, rng = pack(Message({"id": 1, "keys": ["image"]}, SOME)), np.random.default_rng(6)
    refused = 0
    for _ in range(3000):
        data = bytearray(good)
        for at in rng.integers(0, len(good), rng.integers(1, 4)):
            data[at] = rng.integers(256)
        try:
            read(reading(bytes(data[: rng.integers(1, len(data) + 1)])))
        except (WireError, EOFError):
            refused += 1
    assert 1000 < refused < 3000


def test_the_head_is_18_bytes() -> None:
    assert HEAD.size == struct.calcsize(">4sHIQ") == 18
