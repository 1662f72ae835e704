"""A disk that is full, gone or slow, and a queue that overflows: ticks go on, and what is lost is counted and said."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from omni_loop.loop.request import TickRequest
from omni_loop.loop.tap import Opened, Ticked
from omni_loop.record import layout, sealed
from omni_loop.record.reader import Recording
from omni_loop.testing.faulty_disk import Disk
from omni_loop.testing.rows.toys import SPEC, WIDTH
from omni_loop.types import Op, TickResult

from .listener import Listener

CHUNK = 1024  # rows of a column as small as the toy's


def _open(recorder: Listener, session: str = "s1") -> None:
    recorder.opened(Opened(session, SPEC, 1, "", ("x",), {}, "open", "", 0, 0, 0, 0))


def _tell(recorder: Listener, n: int, session: str = "s1") -> None:
    """``n`` ticks more of ``session``."""
    first = sum(tick.request.session == session for tick in recorder.ticks)
    for seq in range(first + 1, first + n + 1):
        x = np.full(WIDTH, seq, np.float32)
        request = TickRequest(session, "secret", seq, Op.INFER, seq, {"x": x})
        recorder.ticked(Ticked(request, None, 0, seq, seq, seq, 1, TickResult(seq, 0)))


def _settled(recorder: Listener) -> None:
    """Until the recorder's thread has taken all that it was told."""
    for _ in range(3000):
        if not recorder.counts.waiting and not recorder._lines.unsealed:
            return
        recorder._thread.join(0.01)
    raise AssertionError("the recorder does not keep up")


def _seqs(recorder: Listener) -> list[int]:
    """Seqs whose arrays are on disk, as they were told."""
    ticks = [tick for episode in Recording(recorder.run) for tick in episode.ticks if tick.kept]
    for tick in ticks:
        np.testing.assert_array_equal(tick.arrays["x"], np.full(WIDTH, tick.seq, np.float32))
    return [tick.seq for tick in ticks]


def _balanced(recorder: Listener) -> None:
    counts = recorder.counts
    assert counts.heard == counts.written + counts.lost == len(recorder.ticks)
    assert counts.written == len(_seqs(recorder))


def test_a_full_disk_costs_a_gap_and_recording_recovers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    disk = Disk()
    recorder = Listener(tmp_path, disk)
    _open(recorder)
    _tell(recorder, CHUNK)
    _settled(recorder)
    assert recorder.healthy()
    disk.full = True
    _tell(recorder, 2 * CHUNK)
    _settled(recorder)
    assert not recorder.healthy()
    assert recorder.counts.lost == 2 * CHUNK
    disk.full = False
    _tell(recorder, CHUNK)
    _settled(recorder)
    assert recorder.healthy()
    recorder.ended("s1", "closed")
    recorder.stop()
    assert _seqs(recorder) == [*range(1, CHUNK + 1), *range(3 * CHUNK + 1, 4 * CHUNK + 1)]
    (episode,) = Recording(recorder.run)
    assert (episode.length, episode.lost, episode.complete) == (4 * CHUNK, 2 * CHUNK, False)
    lost = [e for e in episode.events if e["event"] == "lost"]
    assert (sum(e["ticks"] for e in lost), {e["why"] for e in lost}) == (2 * CHUNK, {"No space left on device"})
    _balanced(recorder)
    said = [(r.levelno, r.getMessage()) for r in caplog.records if r.name == "omni_loop.record.recorder"]
    assert said == [
        (logging.ERROR, "recording is degraded: No space left on device"),
        (logging.WARNING, f"recording goes on; {2 * CHUNK} ticks were lost"),
    ]


def test_an_episode_that_ends_while_the_disk_is_full_is_sealed_later(tmp_path: Path) -> None:
    disk = Disk()
    recorder = Listener(tmp_path, disk)
    _open(recorder)
    _tell(recorder, CHUNK + 3)
    _settled(recorder)
    disk.full = True
    recorder.ended("s1", "closed")
    while not recorder._lines.unsealed:
        recorder._thread.join(0.01)
    assert (len(Recording(recorder.run)), recorder.healthy()) == (0, False)
    disk.full = False
    _settled(recorder)
    recorder.stop()
    assert _seqs(recorder) == list(range(1, CHUNK + 1))
    _balanced(recorder)
    assert recorder.counts.lost == 3


def test_a_disk_that_stays_full_leaves_a_readable_prefix(tmp_path: Path) -> None:
    disk = Disk()
    recorder = Listener(tmp_path, disk, part_ticks=CHUNK)
    _open(recorder)
    _tell(recorder, CHUNK)
    _settled(recorder)
    disk.full = True
    _tell(recorder, CHUNK)
    recorder.stop()
    assert _seqs(recorder) == list(range(1, CHUNK + 1))
    assert (recorder.counts.written, recorder.counts.lost) == (CHUNK, CHUNK)
    (episode,) = Recording(recorder.run)
    assert (episode.complete, episode.ended) == (False, False)  # its last part was given up


def test_a_folder_that_vanishes_is_made_again(tmp_path: Path) -> None:
    recorder = Listener(tmp_path)
    _open(recorder)
    _tell(recorder, CHUNK + 5)
    _settled(recorder)
    shutil.rmtree(recorder.run)
    _tell(recorder, CHUNK)  # the write that finds out
    _settled(recorder)
    assert recorder.counts.lost == 2 * CHUNK
    _tell(recorder, 10)
    recorder.ended("s1", "closed")
    recorder.stop()
    assert _seqs(recorder) == list(range(2 * CHUNK + 1, 2 * CHUNK + 16))
    (episode,) = Recording(recorder.run)
    assert not episode.complete
    assert [e["ticks"] for e in episode.events if e["event"] == "gap"] == [2 * CHUNK]
    _balanced(recorder)


@pytest.mark.parametrize("bound", [{"queue_events": 16}, {"queue_bytes": 16 * 4 * WIDTH}])
def test_a_queue_that_overflows_drops_ticks_and_counts_them(
    tmp_path: Path, bound: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    disk = Disk()
    recorder = Listener(tmp_path, disk, **bound, part_ticks=4)
    _open(recorder)
    disk.flows.clear()  # the writer hangs in its first write
    _tell(recorder, 100)
    assert not recorder.healthy()
    assert recorder.counts.lost >= 100 - 16 - 4
    disk.flows.set()
    _settled(recorder)
    _tell(recorder, 1)
    assert recorder.healthy()
    recorder.ended("s1", "closed")
    recorder.stop()
    _balanced(recorder)
    seqs = _seqs(recorder)
    assert (seqs[0], seqs[-1], len(seqs)) == (1, 101, 101 - recorder.counts.lost)
    (episode,) = Recording(recorder.run)
    assert sum(e["ticks"] for e in episode.events if e["event"] == "gap") == recorder.counts.lost
    assert sum("more waits than may wait" in r.getMessage() for r in caplog.records) == 1


def test_max_bytes_ends_recording_until_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omni_loop.record.room._AGAIN_S", 0.0)
    (tmp_path / "others").write_bytes(bytes(1 << 20))
    recorder = Listener(tmp_path, max_bytes=(1 << 20) + 4096)
    _open(recorder)
    _tell(recorder, CHUNK)
    _settled(recorder)
    assert (recorder.counts.lost, recorder.healthy()) == (CHUNK, False)
    (tmp_path / "others").unlink()
    _tell(recorder, CHUNK)
    _settled(recorder)
    assert (recorder.counts.lost, recorder.healthy()) == (CHUNK, True)
    recorder.ended("s1", "closed")
    recorder.stop()
    assert _seqs(recorder) == list(range(CHUNK + 1, 2 * CHUNK + 1))
    _balanced(recorder)


def test_a_folder_that_a_file_took_the_place_of_degrades_to_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Listener(tmp_path / "record")
    _open(recorder)
    _tell(recorder, CHUNK)
    _settled(recorder)
    shutil.rmtree(tmp_path / "record")
    (tmp_path / "record").write_text("x")
    _tell(recorder, CHUNK)
    recorder.stop()
    said = [r for r in caplog.records if r.name == "omni_loop.record.recorder"]
    assert [(r.levelno, r.exc_info) for r in said] == [(logging.ERROR, None)]
    assert "recording is degraded" in said[0].getMessage()
    assert (recorder.counts.lost, recorder.healthy()) == (2 * CHUNK, False)


def test_a_bug_of_the_recorder_costs_its_tick_and_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorder = Listener(tmp_path)
    _open(recorder)
    _tell(recorder, 2)
    wrong = TickRequest("s1", "", 3, Op.INFER, 3, {"x": np.zeros(WIDTH + 1, np.float64)})
    recorder.ticked(Ticked(wrong, None, 0, 3, 3, 3, 1, TickResult(3, 0)))
    _tell(recorder, 2)
    recorder.ended("s1", "closed")
    recorder.stop()
    assert _seqs(recorder) == [1, 2, 4, 5]
    _balanced(recorder)
    assert recorder.counts.lost == 1
    assert any(r.exc_info for r in caplog.records)


def test_a_run_taken_away_as_a_part_is_sealed_is_counted_as_it_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder, real = Listener(tmp_path / "runs"), os.rename
    taken = recorder.run.with_name("taken")

    def rename(source: str | Path, target: str | Path, **folders: int) -> None:
        real(source, target, **folders)
        if (
            Path(source).name.startswith(layout.OPEN) and not taken.exists()
        ):  # between the rename and what makes it last
            recorder.run.rename(taken)

    monkeypatch.setattr(sealed.os, "rename", rename)
    _open(recorder)
    _tell(recorder, 3)
    recorder.ended("s1", "closed")
    recorder.stop()
    (episode,) = Recording(taken)
    assert [tick.seq for tick in episode.ticks] == [1, 2, 3]
    assert (recorder.counts.written, recorder.counts.lost) == (3, 0)
