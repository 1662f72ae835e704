"""Sizes are checked before memory is taken."""

import io
import tracemalloc

import pytest
from PIL import Image

from omni_loop.errors import TensorError
from omni_loop.testing.bad_inputs import LIMITS
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
