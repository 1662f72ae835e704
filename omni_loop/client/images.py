"""Camera images as a pipeline takes them: clipped, never wrapped around, and of the spec's size.

numpy alone; with pillow resizing is faster, and JPEG is possible.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import InvalidInput, TensorError
from ..types import Array, ArraySpec, SessionSpec
from ..wire import images

Image = NDArray[np.uint8]
_SLACK = 2.0  # more than so many times the range is another range, not an overshoot


def to_uint8(image: ArrayLike, high: float | None = None, name: str = "image") -> Image:
    """``image`` as uint8 in 0..255: values are clipped to ``0..high`` and rounded; a uint8 array stays as it is.

    ``high`` is what stands for white: None is 1 for floats and 255 for integers.

    Raises:
        TensorError: NaN or infinity, a bool, or values so far outside ``0..high`` that they must be of another range.
    """
    array: Array = np.asarray(image)
    if array.dtype == np.uint8 and high is None:
        return array
    if array.dtype.kind not in "iuf":
        raise TensorError(f"{name!r} holds {array.dtype.name}; an image is uint8, or numbers in 0..high")
    top = float(high) if high is not None else (1.0 if array.dtype.kind == "f" else 255.0)
    if not (np.isfinite(top) and top > 0):
        raise InvalidInput(f"high is {high}; it must be above 0 and finite")
    if not array.size:
        return array.astype(np.uint8)
    least, most = float(array.min()), float(array.max())  # NaN when any value is
    if not (np.isfinite(least) and np.isfinite(most)):
        raise TensorError(f"{name!r} holds values that are not finite")
    if least < -_SLACK * top or most > _SLACK * top:
        raise TensorError(f"{name!r} goes from {least:g} to {most:g}, but 0..{top:g} was expected: say high=...")
    wide: Array = array.astype(np.float64 if array.dtype.itemsize > 4 else np.float32)
    rounded: Image = np.rint(np.clip(wide, 0, top) * (255 / top)).astype(np.uint8)
    return rounded


def resize(image: Image, height: int, width: int, pad: bool = False) -> Image:
    """``uint8[h, w, 3]`` to ``uint8[height, width, 3]``, antialiased (triangle filter). ``pad``: the shape of what is
    seen is kept, centred between black bars; else it is stretched."""
    image = _checked(image)
    if height < 1 or width < 1:
        raise InvalidInput(f"cannot resize an image to {height} x {width}")
    if not pad:
        return _scaled(image, height, width)
    h, w = image.shape[:2]
    scale = min(height / h, width / w)
    inner = (max(1, min(height, round(h * scale))), max(1, min(width, round(w * scale))))
    padded = np.zeros((height, width, 3), np.uint8)
    top, left = (height - inner[0]) // 2, (width - inner[1]) // 2
    padded[top : top + inner[0], left : left + inner[1]] = _scaled(image, *inner)
    return padded


def to_jpeg(image: Image) -> bytes:
    """``uint8[h, w, 3]`` as the JPEG that a session with ``image_encoding="jpeg"`` sends; lossy.

    Raises:
        MissingExtra: pillow is not installed.
    """
    return images.encode(_checked(image), images.kind_of("jpeg"))


def fit(spec: SessionSpec, arrays: Mapping[str, ArrayLike], pad: bool = False) -> dict[str, Array]:
    """``arrays`` by observation key, images of them as the spec says: clipped to uint8, resized. Others stay as they
    are, and are checked when they are sent."""
    return {name: _fitted(spec.observation(name), name, value, pad) for name, value in arrays.items()}


def _fitted(spec: ArraySpec | None, name: str, value: ArrayLike, pad: bool) -> Any:
    if spec is None or not is_image(spec):
        return value
    array = np.asarray(value)
    if array.ndim != 3 or array.shape[2] != 3:
        raise TensorError(f"{name!r} has shape {list(array.shape)}; an image is [h, w, 3], RGB")
    image = to_uint8(array, name=name)
    height, width = (have if want < 0 else want for want, have in zip(spec.shape, image.shape[:2]))  # noqa: B905  3.10
    return image if image.shape[:2] == (height, width) else resize(image, height, width, pad)


def is_image(spec: ArraySpec) -> bool:
    return spec.dtype == "uint8" and len(spec.shape) == 3 and spec.shape[2] == 3


def _checked(image: Image) -> Image:
    array = np.asarray(image)
    if array.dtype != np.uint8 or array.ndim != 3 or array.shape[2] != 3 or not array.size:
        raise TensorError(f"an image is {array.dtype.name}{list(array.shape)}; it must be uint8[h, w, 3]")
    return array


def _scaled(image: Image, height: int, width: int) -> Image:
    if image.shape[:2] == (height, width):
        return image
    if importlib.util.find_spec("PIL") is None:
        return scaled_by_numpy(image, height, width)
    from PIL import Image as pillow

    scaled = pillow.fromarray(np.ascontiguousarray(image)).resize((width, height), pillow.Resampling.BILINEAR)
    return np.array(scaled)


def scaled_by_numpy(image: Image, height: int, width: int) -> Image:
    """As pillow's BILINEAR, but for rounding."""
    rows, columns = _triangle(image.shape[0], height), _triangle(image.shape[1], width)
    across = np.einsum("xw,hwc->hxc", columns, image.astype(np.float32))
    scaled: Image = np.clip(np.rint(np.einsum("yh,hxc->yxc", rows, across)), 0, 255).astype(np.uint8)
    return scaled


def _triangle(have: int, want: int) -> NDArray[np.float32]:
    """Weights ``[want, have]``: a triangle around each new pixel's centre, as wide as one pixel of the coarser side."""
    scale = have / want
    reach = max(scale, 1.0)
    centres = (np.arange(want) + 0.5) * scale
    weights = np.maximum(0, 1 - np.abs(np.arange(have) + 0.5 - centres[:, None]) / reach)
    shares: NDArray[np.float32] = (weights / weights.sum(1, keepdims=True)).astype(np.float32)
    return shares
