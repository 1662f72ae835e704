"""Rows of one array, gathered until they fill a chunk and then written once."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .features import is_image
from .layout import chunk_rows

if TYPE_CHECKING:
    import zarr

_GROW = 64  # chunks by which an array's length grows: its metadata is rewritten each time


class Column:
    """``[rows, *shape]`` at ``place`` of a group. ``lost``: ranges of rows that could not be written."""

    def __init__(self, folder: Path, place: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.place, self._folder, self._shape, self._dtype = place, folder, shape, dtype
        self.chunk = chunk_rows(shape, dtype.itemsize)
        self.rows = 0  # heard of
        self.lost: list[range] = []
        self._buffer: list[NDArray[Any]] = []
        self.waiting = 0  # of them, not written
        self._array: zarr.Array[Any] | None = None

    def append(self, rows: NDArray[Any]) -> None:
        """Take over ``rows [n, *shape]``, which are not written yet."""
        if len(rows):
            self._buffer.append(rows)
            self.waiting += len(rows)
            self.rows += len(rows)

    def check(self, rows: NDArray[Any]) -> None:
        """Raises ValueError when ``rows`` are of another dtype or shape."""
        if rows.shape[1:] != self._shape or rows.dtype != self._dtype:
            raise ValueError(f"{self.place}: {rows.dtype}{list(rows.shape)} beside {self._dtype}{[-1, *self._shape]}")

    @property
    def due(self) -> bool:
        """Whether a chunk is full."""
        return self.waiting >= self.chunk

    @property
    def next_bytes(self) -> int:
        """Of the rows that the next :meth:`write` takes, uncompressed."""
        return min(self.waiting, self.chunk) * math.prod(self._shape) * self._dtype.itemsize

    def write(self, group: zarr.Group) -> int:
        """Write one chunk, or what there is of one; bytes on disk. Raises OSError: then its rows are lost."""
        if not self.waiting:
            return 0
        first, block = self._take()
        try:
            array = self._opened(group, first + len(block))
            if not block.size:  # its rows are empty: zarr writes no chunk of them
                return 0
            array[first : first + len(block)] = block
            return (self._folder / self.place / self._file(first)).stat().st_size
        except BaseException:
            self.lost.append(range(first, first + len(block)))
            raise

    def drop(self) -> None:
        """Lose what the next :meth:`write` would take."""
        first, block = self._take()
        self.lost.append(range(first, first + len(block)))

    def finish(self, group: zarr.Group) -> None:
        """Cut the array to its length. What a failed write has left is removed: it may be half a chunk."""
        array = self._opened(group, self.rows)
        for rows in self.lost:
            (self._folder / self.place / self._file(rows.start)).unlink(missing_ok=True)
        array.resize((self.rows, *self._shape))

    def _opened(self, group: zarr.Group, rows: int) -> zarr.Array[Any]:
        if self._array is None:
            self._array = _create(group, self.place, self._shape, self._dtype, self.chunk)
        if self._array.shape[0] < rows:
            self._array.resize((-(-rows // (self.chunk * _GROW)) * self.chunk * _GROW, *self._shape))
        return self._array

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

    def _file(self, row: int) -> str:
        return "/".join(["c", str(row // self.chunk), *("0" for _ in self._shape)])


def _create(group: zarr.Group, place: str, shape: tuple[int, ...], dtype: np.dtype[Any], chunk: int) -> zarr.Array[Any]:
    from zarr.codecs import BloscCodec, ZstdCodec

    # Camera images are noise to a byte shuffle; floats are not.
    codec: Any = (
        ZstdCodec(level=1) if is_image(dtype.name, shape) else BloscCodec(cname="zstd", clevel=1, shuffle="shuffle")
    )
    return group.create_array(
        place,
        shape=(0, *shape),
        dtype=dtype,
        chunks=(chunk, *(max(n, 1) for n in shape)),
        compressors=[codec],
        config={"write_empty_chunks": True},  # so that a chunk that is not there is one that was lost
        overwrite=True,
    )
