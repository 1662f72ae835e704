"""A recording lived through again gives what was recorded, bit for bit, and says what does not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from omni_loop.client import Session, connect
from omni_loop.config import Limits
from omni_loop.record.differences import Difference, Report
from omni_loop.record.reader import Recording
from omni_loop.record.replay import replay
from omni_loop.testing.rows.bed import row, some_actions
from omni_loop.testing.rows.toys import DIM, NAME
from omni_loop.types import Op

from .served import deployment, registered, served


@pytest.fixture(scope="module")
def again() -> Iterator[str]:
    """A server that records nothing, to replay on."""
    with registered(), served(deployment()) as address:
        yield address


def _live(session: Session, draw: np.random.Generator, n: int, step: int = 0) -> int:
    """``n`` observed steps; the step that comes next."""
    for _ in range(n):
        executed = np.full((1, DIM), 0.25, np.float32) if step else None
        session.infer({"x": row(draw)}, step, executed=executed, frames=int(draw.integers(0, 3)))
        step += 1
    return step


def _replayed(path: Path, address: str, *wanted: str) -> Report:
    recording = Recording(path)
    with connect(address, timeout_s=30) as client:
        return replay(client, recording, recording.select(wanted))


def test_a_session_of_every_op_is_repeated_to_the_bit(tmp_path: Path, again: str) -> None:
    draw = np.random.default_rng(1)
    with served(deployment(tmp_path)) as address, connect(address) as client, client.open(NAME, seed=5) as session:
        step = _live(session, draw, 3)
        session.predict(some_actions(draw, 2))
        session.recondition({"x": row(draw, 3)}, executed=some_actions(draw, 3), first_step=step)
        step = _live(session, draw, 2, step + 3)
        session.recondition({"x": row(draw, 2)}, executed=some_actions(draw, 2), first_step=step - 1)
        session.predict(some_actions(draw, 1))
        session.reset(seed=8)
        _live(session, draw, 2)
    report = _replayed(tmp_path, again)
    assert (report.exact, report.ticks, report.differing) == (True, 11, 0)
    assert all(tick.error == "" for episode in report.episodes for tick in episode.ticks)
    assert report.episodes[0].worst("frames") == report.episodes[1].worst("frames") == 0.0
    assert {tick.op for episode in report.episodes for tick in episode.ticks} == {Op.INFER, Op.PREDICT, Op.RECONDITION}
    alone = _replayed(tmp_path, again, "1")  # what the reset began, without what came before it
    assert (alone.exact, alone.ticks) == (True, 2)


def test_forks_rewinds_and_restored_sessions_are_repeated_to_the_bit(tmp_path: Path, again: str) -> None:
    draw = np.random.default_rng(2)
    server = served(deployment(tmp_path / "record", tmp_path / "snapshots"))
    with server as address, connect(address) as client, client.open(NAME, seed=5) as session:
        step = _live(session, draw, 4)
        with session.fork(seed=99) as child:
            _live(child, draw, 2, step)
            session.snapshot("here")
            with child.fork() as grandchild:
                _live(grandchild, draw, 1, step + 2)
            session.rewind(1)
            _live(session, draw, 2, 2)
        with client.restore("here") as restored:
            _live(restored, draw, 2, step)
        _live(session, draw, 1, 4)
    report = _replayed(tmp_path / "record", again)
    assert [episode.skipped for episode in report.episodes] == [""] * 4
    assert (report.exact, report.ticks) == (True, 12)
    last = _replayed(tmp_path / "record", again, "2")  # only a grandchild: its ancestors are lived through for it
    assert [(e.session, e.recorded, len(e.ticks)) for e in last.episodes] == [(grandchild.id, 1, 1)]
    assert last.exact


def test_sessions_that_ran_side_by_side_are_each_repeated(tmp_path: Path, again: str) -> None:
    draw = np.random.default_rng(3)
    with served(deployment(tmp_path)) as address, connect(address) as client:
        sessions = [client.open(NAME, seed=seed) for seed in range(3)]
        for step in range(4):
            for session in sessions:
                _live(session, draw, 1, step)
        for session in sessions:
            session.close()
    heard: list[Difference] = []
    with connect(again) as client:
        report = replay(client, Recording(tmp_path), on_tick=heard.append)
    assert (report.exact, report.ticks, len(heard)) == (True, 12, 12)


def test_a_server_with_room_for_few_replays_many(tmp_path: Path, again: str) -> None:
    draw = np.random.default_rng(6)
    with served(deployment(tmp_path)) as address, connect(address) as client:
        for seed in range(5):
            with client.open(NAME, seed=seed) as session:
                _live(session, draw, 2)
                session.reset()
                _live(session, draw, 1)
    with served(deployment(limits=Limits(max_sessions=1))) as address:
        report = _replayed(tmp_path, address)
        assert (report.ticks, report.exact) == (15, True)
        assert _replayed(tmp_path, address, "0", "2", "5").ticks == 5


def test_what_comes_out_otherwise_is_said(tmp_path: Path, again: str) -> None:
    draw = np.random.default_rng(4)
    with served(deployment(tmp_path)) as address, connect(address) as client, client.open(NAME, seed=5) as session:
        _live(session, draw, 3)
    recording = Recording(tmp_path)
    recording.episodes[0].begin["seed"] += 1  # type: ignore[index]
    with connect(again) as client:
        report = replay(client, recording)
    assert (report.exact, report.differing) == (False, 3)
    worst = report.episodes[0].worst("chunk")
    assert worst is not None
    assert 0 < worst < 2.0
    said = report.as_json()
    assert [tick["seq"] for tick in said["episodes"][0]["differing"]] == [1, 2, 3]
    assert {tick["other"] for tick in said["episodes"][0]["differing"]} == {"ran under seed 5, and its episode under 6"}
    assert not Report(report.episodes, tolerance=2.0, pixels=255).exact  # another seed is no rounding
    for ticks in (episode.ticks for episode in report.episodes):
        ticks[:] = [replace(tick, other="") for tick in ticks]
    assert Report(report.episodes, tolerance=2.0, pixels=255).exact


def test_a_server_that_refuses_is_no_error_of_the_replay(tmp_path: Path, again: str) -> None:
    draw = np.random.default_rng(5)
    with served(deployment(tmp_path)) as address, connect(address) as client, client.open(NAME, seed=5) as session:
        step = _live(session, draw, 2)
        session.infer({"x": row(draw)}, step + 1, executed=some_actions(draw, 2))
        with client.open(NAME, seed=6) as other:
            _live(other, draw, 1)
    recording = Recording(tmp_path)
    recording.episodes[0].options["nonsense"] = 1  # type: ignore[index]
    with connect(again) as client:
        report = replay(client, recording)
    first, second = report.episodes
    assert "nonsense" in first.skipped
    assert (first.recorded, len(first.ticks)) == (3, 0)
    assert (second.skipped, len(second.ticks)) == ("", 1)
    assert not report.exact
