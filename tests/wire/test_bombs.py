"""Sizes are checked before memory is taken."""

import io
import struct
import tracemalloc
import zlib

import pytest
from PIL import Image

from omni_loop.errors import TensorError
from omni_loop.testing.bad_inputs import LIMITS
from omni_loop.types import Array
from omni_loop.wire import codec
from omni_loop.wire import loop_pb2 as pb

MIB = 1 << 20


def refused_within(tensor: pb.Tensor, limits: codec.Limits, mib: float) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(TensorError):
            codec.decode_tensor("x", tensor, limits)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < mib * MIB


@pytest.mark.parametrize("shape", [(1 << 62, 4), (1 << 40,), (1 << 20, 1 << 20, 0)])
def test_a_huge_shape(shape: tuple[int, ...]) -> None:
    refused_within(pb.Tensor(dtype=pb.DTYPE_FLOAT64, shape=shape, data=b"\0" * 8), LIMITS, 1)


@pytest.mark.parametrize("claim", [(7000, 7000, 3), (8, 8, 3)])
def test_a_png_of_49_million_pixels(claim: tuple[int, ...]) -> None:
    file = io.BytesIO()
    Image.new("RGB", (7000, 7000)).save(file, "PNG")
    assert file.tell() < MIB
    refused_within(
        pb.Tensor(dtype=pb.DTYPE_UINT8, shape=claim, data=file.getvalue(), encoding=pb.ENCODING_PNG), codec.Limits(), 2
    )


def chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def picture(form: str, **options: bool) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (8, 8), (1, 2, 3)).save(file, form, **options)
    return file.getvalue()


def decoded(data: bytes, encoding: pb.Encoding = pb.ENCODING_PNG) -> Array:
    return codec.decode_tensor(
        "x", pb.Tensor(dtype=pb.DTYPE_UINT8, shape=(8, 8, 3), data=data, encoding=encoding), LIMITS
    )


def test_texts_beside_the_pixels_of_a_png_are_never_unpacked() -> None:
    good = picture("PNG")
    texts = b"".join(chunk(b"zTXt", b"k%d\0\0" % n + zlib.compress(bytes(MIB - 100))) for n in range(60))
    tracemalloc.start()
    try:
        array = decoded(good[:33] + texts + good[33:])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (array == decoded(good)).all()
    assert peak < MIB


def test_a_png_of_a_million_chunks() -> None:
    good = picture("PNG")
    with pytest.raises(TensorError, match="more than 4096 chunks"):
        decoded(good[:33] + chunk(b"tEXt", b"") * 1_000_000 + good[33:])


def test_a_jpeg_of_thousands_of_scans() -> None:
    good = picture("JPEG", progressive=True)
    assert decoded(good, pb.ENCODING_JPEG).shape == (8, 8, 3)
    scan = good[good.rfind(b"\xff\xda") : -2]
    with pytest.raises(TensorError, match="more than 64 scans"):
        decoded(good[:-2] + scan * 5000 + good[-2:], pb.ENCODING_JPEG)
