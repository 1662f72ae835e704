"""PNG and JPEG <-> ``uint8[h, w, 3]``, RGB. Pillow is imported when the first image comes."""

from __future__ import annotations

import io
from typing import Any

import numpy as np

from ..errors import MissingExtra, TensorError, nearest
from ..types import Array
from . import loop_pb2 as pb
from .limits import Limits, shown

_FORMATS = {pb.ENCODING_PNG: "PNG", pb.ENCODING_JPEG: "JPEG"}
_PNG_DEPTH = 24  # offset of the bit depth in the header chunk
_PNG_END = b"IEND\xaeB`\x82"  # without it Pillow takes a file that was cut short
# Texts, profiles and the like unpack to many times their size; pixels need none of them.
_PNG_PARTS = (b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND")
_PNG_CHUNKS = 4096
_JPEG_SCAN, _JPEG_SCANS = b"\xff\xda", 64  # each scan goes through all pixels; encoders make about ten


def kind_of(encoding: str) -> pb.Encoding:
    """The wire's number for png or jpeg; raises :class:`TensorError` naming the nearest."""
    for kind, name in _FORMATS.items():
        if encoding == name.lower():
            return kind
    raise TensorError(f"unknown encoding {encoding!r}.{nearest(encoding, ['raw', 'png', 'jpeg'])}")


def encode(array: Array, kind: pb.Encoding, quality: int = 95) -> bytes:
    """``array uint8[h, w, 3]`` as the bytes of a file."""
    if array.dtype != np.uint8 or array.ndim != 3 or array.shape[2] != 3 or 0 in array.shape:
        raise TensorError(f"{_FORMATS[kind]} takes uint8 [h,w,3], not {array.dtype.name} {shown(array.shape)}")
    target = io.BytesIO()
    _pillow().fromarray(np.ascontiguousarray(array)).save(target, _FORMATS[kind], quality=quality)
    return target.getvalue()


def decode(name: str, tensor: pb.Tensor, shape: tuple[int, ...], limits: Limits) -> Array:
    """The tensor's ``uint8[h, w, 3]``, whose claimed ``shape`` is within the byte limit already.

    The claimed shape is held to the pixel cap and the file's header to the claimed shape, both before a
    single pixel is decoded. Raises :class:`TensorError`; :class:`MissingExtra` without Pillow.
    """
    form = _FORMATS.get(tensor.encoding)
    if form is None:
        raise TensorError(f"{name!r} has the unknown encoding number {tensor.encoding}. Known: raw, png, jpeg.")
    if tensor.dtype != pb.DTYPE_UINT8 or len(shape) != 3 or shape[2] != 3:
        raise TensorError(f"{name!r} is {form}, which is always uint8 [h,w,3], but claims {shown(shape)}")
    height, width = shape[:2]
    if not 0 < height * width <= limits.max_image_pixels:
        raise TensorError(f"{name!r} has {height} x {width} pixels; between 1 and {limits.max_image_pixels} are taken")
    image = _decoded(name, form, tensor.data, (width, height))
    array = np.asarray(image, np.uint8)
    array.flags.writeable = False
    return array


def _decoded(name: str, form: str, data: bytes, size: tuple[int, int]) -> Any:
    pillow = _pillow()
    if form == "JPEG" and data.count(_JPEG_SCAN) > _JPEG_SCANS:
        raise TensorError(f"{name!r} is a JPEG of more than {_JPEG_SCANS} scans")
    try:
        file = _parts(name, data) if form == "PNG" else data
        image = pillow.open(io.BytesIO(file), formats=(form,))  # reads the header only
        if image.size != size:
            wide, high = image.size
            raise TensorError(f"{name!r} claims {shown((size[1], size[0], 3))} but its {form} is {high} x {wide}")
        if image.mode != "RGB" or (form == "PNG" and data[_PNG_DEPTH] != 8):
            raise TensorError(f"{name!r} must be {form} with three channels of 8 bits, not mode {image.mode}")
        if form == "PNG" and not data.endswith(_PNG_END):
            raise TensorError(f"{name!r} is not a readable PNG image: its end is missing")
        image.load()
    except TensorError:
        raise
    except Exception:
        raise TensorError(f"{name!r} is not a readable {form} image") from None
    return image


def _parts(name: str, data: bytes) -> bytes:
    """The PNG ``data`` without what its pixels do not need."""
    kept, at, whole = [data[:8]], 8, True
    for _ in range(_PNG_CHUNKS):
        if at >= len(data):
            return data if whole else b"".join(kept)
        end = at + 12 + int.from_bytes(data[at : at + 4], "big")
        if data[at + 4 : at + 8] in _PNG_PARTS:
            kept.append(data[at:end])
        else:
            whole = False
        at = end
    raise TensorError(f"{name!r} is a PNG of more than {_PNG_CHUNKS} chunks")


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError:
        raise MissingExtra("PNG and JPEG need Pillow (pip install pillow); send raw tensors without it") from None
    return Image
