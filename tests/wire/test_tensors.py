"""Tensors: what is sent is what arrives."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from omni_loop.errors import InvalidInput, TensorError
from omni_loop.testing.bad_inputs import LIMITS
from omni_loop.testing.toy_core import SPEC
from omni_loop.types import Array
from omni_loop.wire import codec
from omni_loop.wire import loop_pb2 as pb

DTYPES = ("uint8", "int32", "int64", "float32", "float64", "bool")
arrays = st.sampled_from(DTYPES).flatmap(
    lambda dtype: hnp.arrays(
        dtype,
        hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5),
        elements={"allow_nan": False, "allow_infinity": False} if "float" in dtype else None,
    )
)


@given(arrays)
def test_raw_round_trip(array: Array) -> None:
    wire = pb.Tensor.FromString(codec.encode_tensor(array).SerializeToString())
    back = codec.decode_tensor("x", wire, LIMITS)
    np.testing.assert_array_equal(back, array)
    assert (back.dtype, back.shape) == (array.dtype, array.shape)


def test_a_raw_array_is_a_view_of_the_message() -> None:
    array = codec.decode_tensor("x", codec.encode_tensor(np.arange(6, dtype=np.float32)), LIMITS)
    assert not array.flags.owndata
    assert not array.flags.writeable


def test_order_and_byte_order_do_not_matter_to_the_sender() -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    for sent in (np.asfortranarray(array), array.astype(">f4"), array[::1, ::1].T.T):
        np.testing.assert_array_equal(codec.decode_tensor("x", codec.encode_tensor(sent), LIMITS), array)
    strided = np.arange(24, dtype=np.int64).reshape(4, 6)[::2, ::3]
    np.testing.assert_array_equal(codec.decode_tensor("x", codec.encode_tensor(strided), LIMITS), strided)


@pytest.mark.parametrize("dtype", ["float16", "complex64", "uint16", "<U3", "datetime64[s]"])
def test_dtypes_that_do_not_travel_are_refused_with_those_that_do(dtype: str) -> None:
    with pytest.raises(TensorError, match="does not travel"):
        codec.encode_tensor(np.zeros(2, dtype))


def test_png_is_lossless_and_jpeg_close() -> None:
    ramp = np.linspace(0, 255, 16 * 16 * 3).reshape(16, 16, 3).astype(np.uint8)
    png = codec.decode_tensor("image", codec.encode_tensor(ramp, "png"), LIMITS)
    np.testing.assert_array_equal(png, ramp)
    assert not png.flags.writeable
    jpeg = codec.decode_tensor("image", codec.encode_tensor(ramp, "jpeg"), LIMITS)
    assert np.abs(jpeg.astype(int) - ramp).mean() < 8


@pytest.mark.parametrize("shape", [(8, 8), (8, 8, 4), (0, 8, 3)])
def test_only_colour_images_are_encoded(shape: tuple[int, ...]) -> None:
    with pytest.raises(TensorError, match="PNG takes uint8"):
        codec.encode_tensor(np.zeros(shape, np.uint8), "png")


def test_an_unknown_encoding_names_the_nearest() -> None:
    with pytest.raises(TensorError, match="Did you mean 'jpeg'"):
        codec.encode_tensor(np.zeros((8, 8, 3), np.uint8), "jpg")


@given(st.binary(max_size=300))
def test_any_bytes_are_an_observation_or_a_typed_refusal(raw: bytes) -> None:
    try:
        message = codec.parse(pb.Observation, raw, LIMITS)
        codec.decode_observation(message, SPEC, ("image", "agent_pos"), LIMITS)
    except InvalidInput:
        pass


@given(
    dtype=st.integers(-5, 10),
    shape=st.lists(st.integers(-(1 << 63), (1 << 63) - 1) | st.integers(-1, 9), max_size=12),
    data=st.binary(max_size=64),
    encoding=st.integers(-1, 4),
)
def test_any_tensor_is_an_array_or_a_typed_refusal(dtype: int, shape: list[int], data: bytes, encoding: int) -> None:
    tensor = pb.Tensor(dtype=dtype, shape=shape, data=data, encoding=encoding)  # type: ignore[arg-type]
    try:
        array = codec.decode_tensor("x", tensor, LIMITS)
    except TensorError:
        return
    assert array.nbytes == len(data)
