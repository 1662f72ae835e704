"""Snapshots of sessions on disk, as zarr groups that are whole or refused.

::

    <folder>/<name>/
        manifest         a BLAKE2 digest of the rest of this file; then, as JSON, every file's size and BLAKE2 digest
        data.zarr/       zarr v3: group attributes say what the session is, one array each for what it holds

A snapshot is written beside its place and renamed when it is complete. Reading believes nothing: the manifest must
agree with itself, the files with the manifest, in number, size and content; only then are the bytes that were checked
parsed. One server uses a folder at a time.
"""

from __future__ import annotations

import json
import math
import re
import secrets
import shutil
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..connect.base import as_numpy
from ..errors import Exhausted, InvalidInput, MissingExtra, Reason, SnapshotError, UnknownName
from ..messages import Scalar
from ..session.machine import Position
from ..session.snapshot import Saved, SnapshotData
from ..stage import Payload
from ..types import ActionChunk
from . import sealed

if TYPE_CHECKING:
    import zarr

VERSION = 1
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_DATA, _SESSION = "data.zarr", "session"
_OUTLIVES = ("token", "owner", "attachment", "answered", "forgotten", "whole")  # of a session that outlives a server


class ZarrSnapshots:
    """A folder of snapshots of at most ``max_bytes`` together. See :class:`~omni_loop.session.snapshot.SnapshotStore`.

    Raises:
        MissingExtra: zarr is not installed. SnapshotError: the folder cannot be made or written to.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        _zarr()
        self._folder, self._max_bytes = folder, max_bytes
        self._lock = threading.Lock()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._sweep()
        except OSError as error:
            raise SnapshotError(f"the folder for snapshots cannot be used: {error.strerror}") from error

    def names(self) -> list[str]:
        """Names of the snapshots there are."""
        return sorted(path.name for path in self._folder.iterdir() if _NAME.fullmatch(path.name))

    def save(self, name: str, data: SnapshotData) -> Saved:
        place = self._place(name)
        with self._lock:
            beside = self._folder / f".new-{secrets.token_hex(8)}"
            try:
                self._reserve(place, sum(array.nbytes for _, array in _arrays(data)))
                beside.mkdir()
                _write(beside / _DATA, data)
                seal = sealed.seal(beside, VERSION)
                self._reserve(place, seal.nbytes)
                self._replace(place, beside)
            except OSError as error:
                raise SnapshotError(f"the snapshot {name!r} cannot be written: {error.strerror}") from error
            finally:
                shutil.rmtree(beside, ignore_errors=True)  # what is left of a failure; the error itself is raised
        return Saved(seal.nbytes, seal.digest)

    def load(self, name: str) -> tuple[SnapshotData, Saved]:
        place = self._place(name)
        with self._lock:
            if not place.is_dir() or place.is_symlink():
                raise UnknownName(f"there is no snapshot {name!r}")  # and no word of others' names
            try:
                files, seal = sealed.checked(place, VERSION, self._max_bytes)
            except OSError as error:
                raise _corrupt(name, f"it cannot be read: {error.strerror}") from error
            except sealed.Corrupt as error:
                raise _corrupt(name, str(error)) from error
            except (sealed.OtherVersion, OverflowError) as error:
                raise SnapshotError(f"the snapshot {error}") from error
        try:
            return _parse(files), Saved(seal.nbytes, seal.digest)
        except SnapshotError:
            raise
        except Exception as error:  # the bytes are as they were written, and yet no snapshot of ours
            raise _corrupt(name, f"{type(error).__name__} while reading it") from error

    def discard(self, name: str) -> None:
        """There is no snapshot ``name`` any more."""
        place = self._place(name)
        with self._lock:
            gone = self._folder / f".new-{secrets.token_hex(8)}"  # what a start finds and removes
            try:
                if place.exists():
                    place.rename(gone)
                    sealed.sync(self._folder)
                    shutil.rmtree(gone)
            except OSError as error:
                raise SnapshotError(f"the snapshot {name!r} cannot be removed: {error.strerror}") from error

    def _place(self, name: str) -> Path:
        if not _NAME.fullmatch(name):
            raise InvalidInput(f"{name[:100]!r} cannot name a snapshot: 1 to 100 of letters, digits, '.', '_' and '-'")
        return self._folder / name

    def _reserve(self, place: Path, need: int) -> None:
        """Refuse what does not fit beside the other snapshots."""
        others = sum(
            sealed.size(path) for path in self._folder.iterdir() if path != place and not path.name.startswith(".")
        )
        if (missing := others + need - self._max_bytes) > 0:
            text = f"the snapshot needs {need} bytes, {missing} more than are left for snapshots"
            raise Exhausted(text, reason=Reason.OUT_OF_BYTES, retryable=False, missing_bytes=missing)

    def _replace(self, place: Path, new: Path) -> None:
        old = self._folder / f".old-{place.name}"
        if place.exists():
            place.rename(old)
        new.rename(place)
        sealed.sync(self._folder)
        if old.exists():
            shutil.rmtree(old)

    def _sweep(self) -> None:
        """Finish what a server that died had begun."""
        for path in self._folder.iterdir():
            if path.name.startswith(".old-"):
                place = self._folder / path.name.removeprefix(".old-")
                shutil.rmtree(path) if place.exists() else path.rename(place)
            elif path.name.startswith(".new-"):
                shutil.rmtree(path)


def _corrupt(name: str, why: str) -> SnapshotError:
    return SnapshotError(f"the snapshot {name!r} is corrupt: {why}")


# Writing --------------------------------------------------------------------------------------------------


def _arrays(data: SnapshotData) -> Iterator[tuple[str, NDArray[Any]]]:
    """Every array with its place in the group."""
    if data.chunk is not None:
        yield "chunk", data.chunk.actions
    for number, reply in enumerate(data.replies):
        yield f"replies/{number}", np.frombuffer(reply, np.uint8)
    for group, payloads in (("stages", data.stages), ("feedback", data.feedback)):
        for number, payload in enumerate(payloads.values()):
            for index, value in enumerate(payload.arrays.values()):
                yield f"{group}/{number}/{index}", as_numpy(value)


def _write(path: Path, data: SnapshotData) -> None:
    zarr = _zarr()
    group = zarr.create_group(store=path, zarr_format=3)
    group.attrs[_SESSION] = json.dumps(_describe(data))
    for place, array in _arrays(data):
        # One chunk as it lies in memory: sizes can be checked before anything is allocated, zeros are written too.
        stored = group.create_array(
            place,
            shape=array.shape,
            dtype=array.dtype,
            chunks=tuple(max(n, 1) for n in array.shape),
            compressors=None,
            filters=None,
            config={"write_empty_chunks": True},
        )
        if array.size:
            stored[...] = array


def _describe(data: SnapshotData) -> dict[str, Any]:
    chunk, p = data.chunk, data.position
    return {
        "version": VERSION,
        "pipeline": data.pipeline,
        "spec": data.spec,
        "seed": data.seed,
        "prompt": data.prompt,
        "keys": list(data.keys),
        "options": dict(data.options),
        "epoch": data.epoch,
        "tick": data.tick,
        "seq": data.seq,
        "position": [p.step, p.observed, p.origin],
        "chunk": None if chunk is None else [chunk.seq, chunk.first_step, chunk.epoch, chunk.policy_revision],
        "stages": [_payload_text(name, payload) for name, payload in data.stages.items()],
        "feedback": [_payload_text(name, payload) for name, payload in data.feedback.items()],
        "outlives": {name: getattr(data, name) for name in _OUTLIVES},
        "replies": len(data.replies),
    }


def _payload_text(name: str, payload: Payload) -> dict[str, Any]:
    arrays = list(payload.arrays)
    return {"name": name, "kind": payload.kind, "schema": payload.schema, "meta": dict(payload.meta), "arrays": arrays}


# Reading --------------------------------------------------------------------------------------------------


def _parse(files: Mapping[str, bytes]) -> SnapshotData:
    zarr = _zarr()
    from zarr.core.buffer import default_buffer_prototype

    buffer = default_buffer_prototype().buffer
    store = zarr.storage.MemoryStore(
        {name.removeprefix(f"{_DATA}/"): buffer.from_bytes(content) for name, content in files.items()}, read_only=True
    )
    group = zarr.open_group(store, mode="r")
    about = json.loads(str(group.attrs[_SESSION]))
    held = sum(map(len, files.values()))
    actions = None if about["chunk"] is None else _read(group, "chunk", held)
    return SnapshotData(
        pipeline=about["pipeline"],
        spec=about["spec"],
        seed=about["seed"],
        prompt=about["prompt"],
        keys=tuple(about["keys"]),
        options=about["options"],
        epoch=about["epoch"],
        tick=about["tick"],
        seq=about["seq"],
        position=Position(*about["position"]),
        chunk=None if actions is None else _chunk(actions, *about["chunk"]),
        stages=_payloads(group, "stages", about["stages"], held),
        feedback=_payloads(group, "feedback", about["feedback"], held),
        replies=tuple(_read(group, f"replies/{n}", held).tobytes() for n in range(about.get("replies", 0))),
        **{name: value for name, value in about.get("outlives", {}).items() if name in _OUTLIVES},
    )


def _chunk(actions: NDArray[Any], seq: int, first_step: int, epoch: int, revision: str) -> ActionChunk:
    return ActionChunk(seq, first_step, actions, epoch, revision)


def _payloads(group: zarr.Group, name: str, about: list[dict[str, Any]], held: int) -> dict[str, Payload]:
    payloads = {}
    for number, one in enumerate(about):
        arrays = {key: _read(group, f"{name}/{number}/{i}", held) for i, key in enumerate(one["arrays"])}
        meta: dict[str, Scalar] = one["meta"]
        payloads[one["name"]] = Payload(one["kind"], arrays, meta, one["schema"])
    return payloads


def _read(group: zarr.Group, place: str, held: int) -> NDArray[Any]:
    stored: Any = group[place]
    largest = max(math.prod(stored.shape), math.prod(stored.chunks)) * stored.dtype.itemsize
    if largest > held:  # or a shape that lies would be filled with zeros
        raise SnapshotError("the snapshot is corrupt: an array is larger than the files")
    if len(stored.metadata.codecs) != 1:  # ours are not compressed: nothing unpacks to more than it is
        raise SnapshotError("the snapshot is corrupt: an array is compressed")
    return np.array(stored[...], copy=True)


def _zarr() -> Any:
    try:
        import zarr
    except ImportError as error:
        raise MissingExtra("snapshots need zarr: install omni-loop[serve]") from error
    return zarr
