"""Zarr v3 arrays and groups as files, written by one thread with no more than it takes: one write per chunk.

The format's metadata is small, and a chunk is its bytes, compressed. zarr itself, which reads all of this, keeps a
loop and threads of its own to write, and takes several milliseconds of Python for each array that is made: more than
the tick whose recording it is.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import MissingExtra

NODE = "zarr.json"
_LEVEL = 1  # of zstd: a recorder must keep up


class Files:
    """Where a recorder writes: the local disk. A test's double fails when it is told to."""

    def write(self, path: Path, data: bytes) -> int:
        """Write a whole file, making its folder; its bytes. Raises OSError."""
        try:
            path.write_bytes(data)
        except FileNotFoundError:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        return len(data)


def group(attributes: Mapping[str, Any]) -> bytes:
    """``zarr.json`` of a group."""
    return json.dumps({"attributes": dict(attributes), "zarr_format": 3, "node_type": "group"}).encode()


class Layout:
    """How the chunks of an array ``[rows, *shape]`` lie, ``chunk`` rows each. ``plain``: without a shuffle
    of bytes, which helps numbers and not images."""

    def __init__(self, shape: Sequence[int], dtype: np.dtype[Any], chunk: int, plain: bool = False) -> None:
        self.shape, self.dtype, self.chunk = tuple(shape), dtype.newbyteorder("<"), chunk
        self._codec = _codec(self.dtype.itemsize, plain)
        self._plain = plain

    def file(self, first: int) -> str:
        """Of the chunk that begins with row ``first``, below the array's folder."""
        return "/".join(["c", str(first // self.chunk), *("0" for _ in self.shape)])

    def encode(self, block: NDArray[Any]) -> bytes:
        """A chunk's file, filled up with zeros to its whole length."""
        whole = block
        if len(block) < self.chunk:
            whole = np.zeros((self.chunk, *self.shape), self.dtype)
            whole[: len(block)] = block
        return bytes(self._codec.encode(np.ascontiguousarray(whole, self.dtype)))

    def node(self, rows: int) -> bytes:
        """``zarr.json`` of the array when it has ``rows``."""
        size = self.dtype.itemsize
        endian = {} if size == 1 else {"configuration": {"endian": "little"}}
        zstd = {"name": "zstd", "configuration": {"level": _LEVEL, "checksum": False}}
        blosc = {"typesize": size, "cname": "zstd", "clevel": _LEVEL, "shuffle": "shuffle", "blocksize": 0}
        about = {
            "shape": [rows, *self.shape],
            "data_type": self.dtype.name,
            "chunk_grid": {
                "name": "regular",
                "configuration": {"chunk_shape": [self.chunk, *(max(n, 1) for n in self.shape)]},
            },
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
            "fill_value": False if self.dtype.kind == "b" else 0,
            "codecs": [{"name": "bytes", **endian}, zstd if self._plain else {"name": "blosc", "configuration": blosc}],
            "attributes": {},
            "zarr_format": 3,
            "node_type": "array",
            "storage_transformers": [],
        }
        return json.dumps(about).encode()


def store(files: Files, folder: Path, array: NDArray[Any]) -> int:
    """Write a whole array as one chunk; bytes on disk."""
    layout = Layout(array.shape[1:], array.dtype, max(len(array), 1))
    nbytes = files.write(folder / NODE, layout.node(len(array)))
    return nbytes + (files.write(folder / layout.file(0), layout.encode(array)) if array.size else 0)


def exists(folder: Path) -> bool:
    """Whether a group lies in ``folder``."""
    return os.path.exists(folder / NODE)


def _codec(itemsize: int, plain: bool) -> Any:
    try:
        from numcodecs import Blosc, Zstd
    except ImportError as error:
        raise MissingExtra("recordings need zarr: install omni-loop[serve]") from error
    return Zstd(_LEVEL) if plain else Blosc("zstd", _LEVEL, Blosc.SHUFFLE, typesize=itemsize)
