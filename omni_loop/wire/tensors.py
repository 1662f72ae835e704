"""Tensor <-> numpy. Raw tensors are decoded without a copy of their own: the array is a read-only view."""

from __future__ import annotations

import numpy as np

from ..errors import TensorError, nearest
from ..types import Array
from . import images
from . import loop_pb2 as pb
from .limits import Limits, shown

# Little-endian on the wire.
DTYPES: dict[pb.DType, np.dtype[np.generic]] = {
    pb.DTYPE_UINT8: np.dtype("u1"),
    pb.DTYPE_INT32: np.dtype("<i4"),
    pb.DTYPE_INT64: np.dtype("<i8"),
    pb.DTYPE_FLOAT32: np.dtype("<f4"),
    pb.DTYPE_FLOAT64: np.dtype("<f8"),
    pb.DTYPE_BOOL: np.dtype("?"),
}
_CODES = {dtype.name: code for code, dtype in DTYPES.items()}


def dtype_code(name: str) -> pb.DType:
    """The wire's dtype for a numpy name; raises :class:`TensorError` naming those that travel."""
    if name not in _CODES:
        raise TensorError(f"dtype {name!r} does not travel.{nearest(name, _CODES)}")
    return _CODES[name]


def dtype_name(code: pb.DType) -> str:
    """numpy name of the wire's dtype; raises :class:`TensorError` for an unknown number."""
    if code not in DTYPES:
        raise TensorError(f"unknown dtype number {code}.{nearest('', _CODES)}")
    return DTYPES[code].name


def encode_tensor(array: Array, encoding: str = "raw") -> pb.Tensor:
    """``encoding`` is raw, png (lossless) or jpeg (lossy); the latter two take ``uint8[h, w, 3]``."""
    array = np.asarray(array)
    code = dtype_code(array.dtype.name)
    if encoding == "raw":
        data = array.astype(DTYPES[code], order="C", copy=False).tobytes()
        return pb.Tensor(dtype=code, shape=array.shape, data=data)
    kind = images.kind_of(encoding)
    return pb.Tensor(dtype=code, shape=array.shape, data=images.encode(array, kind), encoding=kind)


def decode_tensor(name: str, tensor: pb.Tensor, limits: Limits) -> Array:
    """A finite array, read-only. ``name`` is for the text of the :class:`TensorError` that anything else raises."""
    if tensor.dtype not in DTYPES:
        raise TensorError(f"{name!r} has the unknown dtype number {tensor.dtype}.{nearest('', _CODES)}")
    dtype = DTYPES[tensor.dtype]
    shape = tuple(tensor.shape)
    nbytes = limits.check_shape(name, shape, dtype.itemsize)
    if tensor.encoding != pb.ENCODING_RAW:
        return images.decode(name, tensor, shape, limits)
    data = tensor.data
    if len(data) != nbytes:
        raise TensorError(f"{name!r} of {dtype.name} {shown(shape)} needs {nbytes} bytes of data, but {len(data)} came")
    array = np.frombuffer(data, dtype).reshape(shape)
    if dtype.kind == "b" and array.view(np.uint8).max(initial=0) > 1:
        raise TensorError(f"{name!r} is bool but holds bytes other than 0 and 1")
    check_finite(name, array)
    return array


def check_finite(name: str, array: Array) -> None:
    """Raises :class:`TensorError` that says where the first NaN or infinity is."""
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        where = np.unravel_index(int(np.argmin(np.isfinite(array))), array.shape)
        value = array[where]
        raise TensorError(f"{name!r} is not finite: {value} at [{', '.join(str(int(i)) for i in where)}]")
