"""The snapshot store: bit for bit, whole or refused. Reliability row F11: each region flipped, truncated, gone."""

from __future__ import annotations

import json
import shutil
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import zarr

from omni_loop.errors import Exhausted, InvalidInput, Reason, SnapshotError, UnknownName
from omni_loop.messages import PayloadKind
from omni_loop.record import sealed, snapshot
from omni_loop.record.snapshot import ZarrSnapshots
from omni_loop.session.machine import Position
from omni_loop.session.snapshot import SnapshotData
from omni_loop.stage import Payload
from omni_loop.types import ActionChunk

RNG = np.random.default_rng(3)
STATE = {
    "kv.blocks": RNG.standard_normal((3, 2, 2, 4, 1, 8)).astype(np.float32),
    "zeros": np.zeros((300, 300), np.float32),  # zarr leaves out chunks of zeros unless told otherwise
    "minus": np.full(3, -0.0, np.float32),
    "empty": np.zeros((0, 3), np.float32),
    "scalar": np.array(7, np.int64),
    "flags": np.array([True, False]),
    "half": RNG.standard_normal(5).astype(np.float16),
    "bytes": RNG.integers(0, 255, (2, 3), dtype=np.uint8),
}
META: dict[str, str | int | float | bool] = {"kv.end": 1 << 40, "kv.observed": "[1, 0]", "x": 0.1, "b": True}
DATA = SnapshotData(
    pipeline="pusht",
    spec="abc" * 20,
    seed=(1 << 64) - 1,
    prompt="schieb das T \u2013 \U0001f916",
    keys=("image", "agent_pos"),
    options={"scale": 0.1, "mode": "plain", "steps": 3, "flag": True},
    epoch=2,
    tick=7,
    seq=12,
    position=Position(9, 8, 0),
    chunk=ActionChunk(12, 9, RNG.standard_normal((4, 2)).astype(np.float32), 2, "sha-1"),
    stages={
        "pusht/frames": Payload(
            PayloadKind.STATE, STATE, {"kv.end": 1 << 40, "kv.observed": "[1, 0]", "x": 0.1, "b": True}
        ),
        "pusht/act": Payload(PayloadKind.STATE, {}, {}, schema=3),
    },
    feedback={"frames.latents>frames.latents": Payload(PayloadKind.LATENTS, {"z": np.ones((1, 3))}, {"n": 3})},
)


@pytest.fixture
def store(tmp_path: Path) -> ZarrSnapshots:
    return ZarrSnapshots(tmp_path / "snapshots", 1 << 22)


def folder(store: ZarrSnapshots) -> Path:
    return store._folder


def assert_same(one: SnapshotData, other: SnapshotData) -> None:
    plain = {"chunk": None, "stages": {}, "feedback": {}}
    assert replace(one, **plain) == replace(other, **plain)
    assert list(one.options) == list(other.options)
    assert {k: type(v) for k, v in one.options.items()} == {k: type(v) for k, v in other.options.items()}
    assert (one.chunk is None) == (other.chunk is None)
    if one.chunk is not None and other.chunk is not None:
        assert replace(one.chunk, actions=None) == replace(other.chunk, actions=None)  # type: ignore[arg-type]
        assert_bits(one.chunk.actions, other.chunk.actions)
    for payloads, others in ((one.stages, other.stages), (one.feedback, other.feedback)):
        assert list(payloads) == list(others)
        for name, payload in payloads.items():
            assert (payload.kind, payload.meta, payload.schema) == (
                others[name].kind,
                others[name].meta,
                others[name].schema,
            )
            assert list(payload.arrays) == list(others[name].arrays)
            for key, array in payload.arrays.items():
                assert_bits(array, others[name].arrays[key])


def assert_bits(one: np.ndarray, other: np.ndarray) -> None:
    assert (one.dtype, one.shape) == (other.dtype, other.shape)
    assert one.tobytes() == other.tobytes()


def test_what_was_saved_comes_back_bit_for_bit(store: ZarrSnapshots) -> None:
    saved = store.save("first", DATA)
    data, again = ZarrSnapshots(folder(store), 1 << 22).load("first")
    assert_same(data, DATA)
    assert again == saved
    assert saved.nbytes == sum(p.stat().st_size for p in folder(store).rglob("*") if p.is_file())
    array = data.stages["pusht/frames"].arrays["kv.blocks"]
    assert array.flags.writeable
    assert array.flags.owndata
    assert store.names() == ["first"]


def test_a_snapshot_without_chunk_or_state(store: ZarrSnapshots) -> None:
    bare = replace(DATA, chunk=None, stages={}, feedback={})
    store.save("bare", bare)
    assert_same(store.load("bare")[0], bare)


def test_a_snapshot_is_a_zarr_group_that_others_can_read(store: ZarrSnapshots) -> None:
    store.save("first", DATA)
    group = zarr.open_group(folder(store) / "first" / "data.zarr", mode="r")
    assert json.loads(str(group.attrs["session"]))["pipeline"] == "pusht"
    assert np.array_equal(np.asarray(group["stages/0/0"]), STATE["kv.blocks"])  # type: ignore[arg-type]


def test_saving_again_replaces_and_tells_the_two_apart(store: ZarrSnapshots) -> None:
    first = store.save("name", DATA)
    second = store.save("name", replace(DATA, tick=8))
    assert first.digest != second.digest
    assert store.load("name")[0].tick == 8
    assert store.save("other", replace(DATA, tick=8)).digest == second.digest
    assert [p.name for p in sorted(folder(store).iterdir())] == ["name", "other"]


# F11: found by checksum, refused, never partly loaded -----------------------------------------------------


def regions(place: Path) -> Iterator[tuple[Path, int]]:
    """Bytes to harm: of every file the first, the last and some between."""
    for path in sorted(p for p in place.rglob("*") if p.is_file()):
        size = path.stat().st_size
        for offset in sorted({0, size // 3, size // 2, size - 1}):
            yield path, offset


def test_every_flipped_region_is_found(store: ZarrSnapshots) -> None:
    store.save("name", DATA)
    place, count = folder(store) / "name", 0
    for path, offset in regions(place):
        content = path.read_bytes()
        for bit in (0, 7):
            harmed = bytearray(content)
            harmed[offset] ^= 1 << bit
            path.write_bytes(harmed)
            with pytest.raises(SnapshotError, match="the snapshot 'name' is corrupt") as caught:
                store.load("name")
            assert caught.value.reason is Reason.BAD_SNAPSHOT
            count += 1
        path.write_bytes(content)
    assert count > 100
    assert_same(store.load("name")[0], DATA)  # nothing else was harmed


def test_every_byte_of_the_manifest_counts(store: ZarrSnapshots) -> None:
    store.save("name", replace(DATA, stages={}, feedback={}, chunk=None))
    path = folder(store) / "name" / "manifest"
    content = path.read_bytes()
    for offset in range(len(content)):
        harmed = bytearray(content)
        harmed[offset] ^= 1
        path.write_bytes(harmed)
        with pytest.raises(SnapshotError):
            store.load("name")


def test_every_truncated_or_lengthened_file_is_found(store: ZarrSnapshots) -> None:
    store.save("name", DATA)
    for path, offset in regions(folder(store) / "name"):
        content = path.read_bytes()
        for harmed in (content[:offset], content + b"\0"):
            path.write_bytes(harmed)
            with pytest.raises(SnapshotError, match="is corrupt"):
                store.load("name")
        path.write_bytes(content)


def test_every_missing_or_additional_file_is_found(store: ZarrSnapshots) -> None:
    store.save("name", DATA)
    place = folder(store) / "name"
    for path in sorted(p for p in place.rglob("*") if p.is_file()):
        content = path.read_bytes()
        path.unlink()
        with pytest.raises(SnapshotError, match="is corrupt"):
            store.load("name")
        path.write_bytes(content)
    (place / "data.zarr" / "more").write_bytes(b"")
    with pytest.raises(SnapshotError, match=r"'data.zarr/more' is not in its manifest"):
        store.load("name")


def test_files_of_two_snapshots_cannot_be_mixed(store: ZarrSnapshots) -> None:
    store.save("one", DATA)
    store.save("two", replace(DATA, tick=8))
    one, two = folder(store) / "one", folder(store) / "two"
    shutil.copy(two / "data.zarr" / "zarr.json", one / "data.zarr" / "zarr.json")
    with pytest.raises(SnapshotError, match=r"'data.zarr/zarr.json' does not match its checksum"):
        store.load("one")


@pytest.mark.parametrize("target", ["file", "folder"])
def test_links_are_refused(store: ZarrSnapshots, target: str, tmp_path: Path) -> None:
    store.save("name", DATA)
    place = folder(store) / "name"
    if target == "folder":
        (folder(store) / "link").symlink_to(place)
        with pytest.raises(UnknownName):
            store.load("link")
        return
    path = place / "data.zarr" / "zarr.json"
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SnapshotError, match=r"'zarr.json' is no plain file"):
        store.load("name")


def seal_again(place: Path) -> None:
    """As somebody would who knows how to make a manifest."""
    (place / "manifest").unlink()
    sealed.seal(place, snapshot.VERSION)


def test_another_version_is_refused(store: ZarrSnapshots, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "VERSION", 2)
    store.save("name", DATA)
    monkeypatch.undo()
    with pytest.raises(SnapshotError, match="is of version 2; this program reads version 1"):
        store.load("name")


def test_an_array_that_lies_about_its_size_is_refused_before_it_is_made(store: ZarrSnapshots) -> None:
    store.save("name", DATA)
    place = folder(store) / "name"
    about = place / "data.zarr" / "stages" / "0" / "0" / "zarr.json"
    meta = json.loads(about.read_text())
    meta["shape"] = [1 << 40]
    meta["chunk_grid"]["configuration"]["chunk_shape"] = [1 << 40]
    about.write_text(json.dumps(meta))
    seal_again(place)
    tracemalloc.start()
    with pytest.raises(SnapshotError, match="an array is larger than the files"):
        store.load("name")
    assert tracemalloc.get_traced_memory()[1] < 50 << 20
    tracemalloc.stop()


@pytest.mark.parametrize("session", ["[]", "{}", "no json", '{"version": 1}', "null"])
def test_a_description_of_something_else_is_refused(store: ZarrSnapshots, session: str) -> None:
    store.save("name", DATA)
    place = folder(store) / "name"
    about = place / "data.zarr" / "zarr.json"
    meta = json.loads(about.read_text())
    meta["attributes"]["session"] = session
    about.write_text(json.dumps(meta))
    seal_again(place)
    with pytest.raises(SnapshotError, match="is corrupt"):
        store.load("name")


# Names, room, failures ------------------------------------------------------------------------------------

TRAVERSALS = [
    *("", ".", "..", "...", "../x", "a/b", "/etc/passwd", "a\\b", "~", "~root", ".hidden", "-x", "_x", "a b", "a\n"),
    *("a\0b", "\u00e9", "\uff0e\uff0e", "a" * 101, "..%2f", "name/", "CON:", "a\u202eb", "\ud800"),
    *(f"{'../' * n}etc/passwd" for n in range(1, 20)),
]


@pytest.mark.parametrize("name", TRAVERSALS)
def test_a_name_that_leads_elsewhere_is_refused(store: ZarrSnapshots, name: str) -> None:
    for call in (lambda: store.save(name, DATA), lambda: store.load(name)):
        with pytest.raises(InvalidInput, match="cannot name a snapshot"):
            call()
    assert list(folder(store).iterdir()) == []
    assert list(folder(store).parent.iterdir()) == [folder(store)]


def test_an_unknown_name_is_told_the_nearest(store: ZarrSnapshots) -> None:
    store.save("evening", DATA)
    with pytest.raises(UnknownName, match=r"there is no snapshot 'evenign'$"):
        store.load("evenign")


def test_the_store_has_a_bound_and_says_what_is_missing(tmp_path: Path) -> None:
    size = ZarrSnapshots(tmp_path / "probe", 1 << 22).save("x", DATA).nbytes
    store = ZarrSnapshots(tmp_path / "snapshots", int(1.5 * size))
    store.save("one", DATA)
    with pytest.raises(Exhausted) as caught:
        store.save("two", DATA)
    assert caught.value.reason is Reason.OUT_OF_BYTES
    assert 0 < caught.value.missing_bytes <= size
    assert store.names() == ["one"]
    assert [p.name for p in folder(store).iterdir()] == ["one"]  # nothing of it is left
    store.save("one", replace(DATA, tick=9))  # in place of itself it fits
    assert store.load("one")[0].tick == 9


def test_a_snapshot_that_cannot_be_written_leaves_the_one_before(
    store: ZarrSnapshots, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.save("name", DATA)

    def full(path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sealed, "sync", full)
    with pytest.raises(SnapshotError, match="cannot be written: No space left on device"):
        store.save("name", replace(DATA, tick=9))
    assert store.load("name")[0].tick == 7
    assert [p.name for p in folder(store).iterdir()] == ["name"]


@pytest.mark.parametrize("moved", [True, False])
def test_what_a_server_that_died_left_is_finished(store: ZarrSnapshots, moved: bool) -> None:
    """It died between the two renames, or before the second was tidied up."""
    store.save("name", DATA)
    place = folder(store) / "name"
    shutil.copytree(place, folder(store) / ".old-name")
    (folder(store) / ".new-0123").mkdir()
    (folder(store) / ".new-0123" / "half").write_bytes(b"x")
    if moved:
        shutil.rmtree(place)
    again = ZarrSnapshots(folder(store), 1 << 22)
    assert_same(again.load("name")[0], DATA)
    assert [p.name for p in folder(store).iterdir()] == ["name"]


def test_a_folder_that_cannot_be_used_is_named_at_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(SnapshotError, match="the folder for snapshots cannot be used"):
        ZarrSnapshots(tmp_path / "file" / "sub", 1 << 20)
