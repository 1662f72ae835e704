"""How many bytes a folder of recordings may still take."""

from __future__ import annotations

import errno
import time
from pathlib import Path

from . import sealed

_AGAIN_S = 5.0  # a folder that is full is looked at again after this: somebody may have made room


class Room:
    """``max_bytes`` for all of ``folder``. Counts what it is told of, and looks for itself when that is too much."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder, self._max = folder, max_bytes
        self._used, self._looked = sealed.size(folder), time.monotonic()

    def reserve(self, nbytes: int) -> None:
        """Raises OSError (ENOSPC) when ``nbytes`` more do not fit."""
        if self._used + nbytes > self._max and time.monotonic() - self._looked >= _AGAIN_S:
            self._used, self._looked = sealed.size(self._folder), time.monotonic()
        if self._used + nbytes > self._max:
            text = f"{self._used} bytes of recordings are there, and max_bytes is {self._max}"
            raise OSError(errno.ENOSPC, text)

    def add(self, nbytes: int) -> None:
        """So many bytes were written."""
        self._used += nbytes
