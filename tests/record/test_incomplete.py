"""What a recording no longer holds, or never got, is missed: an episode without its end, a hole among episodes."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from omni_loop.client import Session, connect
from omni_loop.config import RecordConfig
from omni_loop.errors import Unsupported
from omni_loop.record.differences import Report
from omni_loop.record.export import export
from omni_loop.record.outcomes import Outcomes
from omni_loop.record.reader import Episode, Recording
from omni_loop.record.replay import replay
from omni_loop.testing.rows.bed import row
from omni_loop.testing.rows.toys import DIM, NAME
from omni_loop_sim_eval.recorded import render

from .served import deployment, registered, served


@pytest.fixture(scope="module")
def again() -> Iterator[str]:
    with registered(), served(deployment()) as address:
        yield address


def _live(session: Session, n: int) -> None:
    draw = np.random.default_rng(0)
    for step in range(n):
        executed = np.full((1, DIM), 0.25, np.float32) if step else None
        session.infer({"x": row(draw)}, step, executed=executed)


@pytest.fixture(scope="module")
def whole(again: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A session in three parts of 4, 4 and 2 ticks, and one of three episodes of 2."""
    folder = tmp_path_factory.mktemp("whole")
    record = RecordConfig(folder=str(folder), part_ticks=4)
    with served(deployment().model_copy(update={"record": record})) as address, connect(address) as client:
        with client.open(NAME, seed=5) as session:
            _live(session, 10)
        with client.open(NAME, seed=6) as session:
            for seed in (7, 8):
                _live(session, 2)
                session.reset(seed=seed)
            _live(session, 2)
    return folder


def _without(whole: Path, folder: Path, *parts: int) -> Recording:
    """The recording without some of its parts."""
    shutil.copytree(whole, folder)
    found = sorted(path for path in next(folder.iterdir()).iterdir() if path.is_dir())
    assert len(found) == 6
    for part in parts:
        shutil.rmtree(found[part])
    return Recording(folder)


def _replayed(recording: Recording, address: str, *wanted: str) -> Report:
    with connect(address, timeout_s=30) as client:
        return replay(client, recording, recording.select(wanted))


def test_what_is_whole_is_complete(whole: Path, again: str) -> None:
    recording = Recording(whole)
    assert [(e.length, e.complete) for e in recording] == [(10, True), (2, True), (2, True), (2, True)]
    report = _replayed(recording, again)
    assert (report.exact, report.ticks, report.missing) == (True, 16, [])


def test_an_episode_without_its_end_is_not_complete(whole: Path, again: str, tmp_path: Path) -> None:
    recording = _without(whole, tmp_path / "cut", 2)
    first = recording.episodes[0]
    assert (first.length, first.complete) == (8, False)
    assert "its end is missing" in first.incomplete
    report = _replayed(recording, again, "0")
    assert (report.exact, report.ticks, report.differing) == (False, 8, 0)
    assert "its end is missing" in report.episodes[0].skipped
    assert "its end is missing" in render(first, Outcomes({}))
    with pytest.raises(Unsupported, match=f"{first.name}: its end is missing"):
        export(recording, tmp_path / "set", [first])


def test_what_follows_a_part_that_is_missing_is_not_replayed(whole: Path, again: str, tmp_path: Path) -> None:
    recording = _without(whole, tmp_path / "cut", 1)
    report = _replayed(recording, again, "0")
    assert "it has gaps" in recording.episodes[0].incomplete
    assert (report.exact, report.ticks, report.differing) == (False, 4, 0)
    assert "ticks were lost" in report.episodes[0].skipped


def test_a_hole_among_episodes_is_said(whole: Path, again: str, tmp_path: Path) -> None:
    recording = _without(whole, tmp_path / "hole", 4)
    (session,) = {episode.session for episode in recording.episodes[1:]}
    assert recording.missing == {session: [1]}
    report = _replayed(recording, again)
    assert (report.exact, report.differing) == (False, 0)
    assert report.missing == [f"session {session}: episode 1 of it is missing"]
    assert report.as_json()["missing"] == report.missing
    assert _replayed(recording, again, "0").exact  # nothing of that session was asked for


def test_an_end_at_the_end_of_a_part_and_episodes_of_nothing_leave_no_holes(again: str, tmp_path: Path) -> None:
    record = RecordConfig(folder=str(tmp_path), part_ticks=4)
    chosen = deployment().model_copy(update={"record": record})
    with served(chosen) as address, connect(address) as client, client.open(NAME, seed=5) as session:
        session.reset()
        _live(session, 8)
        session.reset()
        session.reset()
        _live(session, 1)
        session.reset()
    recording = Recording(tmp_path)
    assert [(e.number, e.length, e.complete) for e in recording] == [(0, 8, True), (1, 1, True)]
    assert recording.missing == {}
    assert _replayed(recording, again).exact


def test_a_session_that_still_runs_is_not_complete(again: str, tmp_path: Path) -> None:
    record = RecordConfig(folder=str(tmp_path), part_ticks=4)
    chosen = deployment().model_copy(update={"record": record})
    with served(chosen) as address, connect(address) as client, client.open(NAME, seed=5) as session:
        _live(session, 6)
        recorded: list[Episode] = []
        while not recorded:  # its first part is sealed by another thread
            client.sessions()
            recorded = list(Recording(tmp_path))
        assert [(e.length, e.complete) for e in recorded] == [(4, False)]
    assert [(e.length, e.complete) for e in Recording(tmp_path)] == [(6, True)]
