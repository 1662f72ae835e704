"""Rows of one array, gathered until they fill a chunk and then written once."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .features import is_image
from .files import NODE, Files, Layout
from .layout import chunk_rows


class Column:
    """``[rows, *shape]`` in ``folder``. ``lost``: ranges of rows that could not be written."""

    def __init__(self, files: Files, folder: Path, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self._files, self._folder, self._shape, self._dtype = files, folder, shape, dtype
        self.chunk = chunk_rows(shape, dtype.itemsize)
        self.rows = 0  # heard of
        self.waiting = 0  # of them, not written
        self.lost: list[range] = []
        self._buffer: list[NDArray[Any]] = []
        self._layout = Layout(shape, dtype, self.chunk, plain=is_image(dtype.name, shape))

    def append(self, rows: NDArray[Any]) -> None:
        """Take over ``rows [n, *shape]``, which are not written yet."""
        if len(rows):
            self._buffer.append(rows)
            self.waiting += len(rows)
            self.rows += len(rows)

    def check(self, rows: NDArray[Any]) -> None:
        """Raises ValueError when ``rows`` are of another dtype or shape."""
        if rows.shape[1:] != self._shape or rows.dtype != self._dtype:
            raise ValueError(f"{rows.dtype}{list(rows.shape)} beside {self._dtype}{[-1, *self._shape]}")

    @property
    def due(self) -> bool:
        """Whether a chunk is full."""
        return self.waiting >= self.chunk

    @property
    def next_bytes(self) -> int:
        """Of the rows that the next :meth:`write` takes, uncompressed."""
        return min(self.waiting, self.chunk) * math.prod(self._shape) * self._dtype.itemsize

    def write(self) -> int:
        """Write one chunk, or what there is of one; bytes on disk. Raises OSError: then its rows are lost."""
        first, block = self._take()
        if not block.size:  # its rows are empty
            return 0
        try:
            return self._files.write(self._folder / self._layout.file(first), self._layout.encode(block))
        except BaseException:
            self.lost.append(range(first, first + len(block)))
            raise

    def drop(self) -> None:
        """Lose what the next :meth:`write` would take."""
        first, block = self._take()
        self.lost.append(range(first, first + len(block)))

    def finish(self) -> int:
        """Say how long the array is; bytes on disk. What a failed write has left is removed: it may be half a chunk."""
        for rows in self.lost:
            (self._folder / self._layout.file(rows.start)).unlink(missing_ok=True)
        return self._files.write(self._folder / NODE, self._layout.node(self.rows))

    def _take(self) -> tuple[int, NDArray[Any]]:
        """The first row and the rows of the next chunk, out of the buffer."""
        first, count = self.rows - self.waiting, min(self.waiting, self.chunk)
        taken: list[NDArray[Any]] = []
        left = count
        while left:
            head = self._buffer[0]
            if len(head) <= left:
                taken.append(self._buffer.pop(0))
            else:
                taken.append(head[:left])
                self._buffer[0] = head[left:]
            left -= len(taken[-1])
        self.waiting -= count
        return first, taken[0] if len(taken) == 1 else np.concatenate(taken)
