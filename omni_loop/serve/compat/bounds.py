"""What a message of another protocol may hold, counted in integers before anything is allocated."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from ...errors import SHOWN, InvalidInput, Reason, TensorError
from ...types import Array
from ...wire.codec import Limits
from ...wire.limits import shown

ITEMS = 16_384  # values in one message: a few dozen arrays and what describes them need far fewer
DEPTH = 16  # of maps and lists in each other
# What a robot sends. No objects, no structures, no complex numbers, no text, no dates.
_DTYPE = re.compile(r"[<>=|]?(b1|[iu][1248]|f[248])")


class Budget:
    """Counts one message's values; raises :class:`InvalidInput` (too large) at the first too many."""

    def __init__(self, items: int = ITEMS) -> None:
        self._left = self._most = items

    def take(self, count: int = 1) -> None:
        self._left -= count
        if self._left < 0:
            raise InvalidInput(f"the message holds more than {self._most} values", reason=Reason.TOO_LARGE)


def dtype_of(name: str, text: str) -> np.dtype[np.generic]:
    """The dtype numpy calls ``text``, such as ``<f4`` or ``|u1``; raises :class:`TensorError` for one that holds
    anything but numbers."""
    # Numpy parses other texts as Python, and into structures of any size: it never sees them.
    if not _DTYPE.fullmatch(text):
        raise TensorError(f"{name!r} has the dtype {text[:SHOWN]!r}; numbers and booleans travel, as '<f4' or '|u1'")
    try:
        return np.dtype(text)
    except TypeError:  # such as b8
        raise TensorError(f"{name!r} has the dtype {text!r}, which there is not") from None


def view(
    name: str, dtype: np.dtype[np.generic], shape: Sequence[int], data: memoryview, limits: Limits, order: str = "C"
) -> Array:
    """``data`` as an array of that shape, without a copy and read-only.

    Raises:
        TensorError: more or fewer bytes than the shape says, a shape that is too large, or bools that are none.
    """
    nbytes = limits.check_shape(name, shape, dtype.itemsize)
    if len(data) != nbytes:
        raise TensorError(f"{name!r} of {dtype.name} {shown(shape)} needs {nbytes} bytes of data, but {len(data)} came")
    flat = np.frombuffer(data, dtype)
    if dtype.kind == "b" and flat.view(np.uint8).max(initial=0) > 1:
        raise TensorError(f"{name!r} is bool but holds bytes other than 0 and 1")
    array: Array = flat.reshape(tuple(shape)) if order == "C" else flat.reshape(tuple(shape)[::-1]).transpose()
    array.flags.writeable = False
    return array
