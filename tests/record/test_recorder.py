"""What the loop tells is what a recording gives back: ticks of every kind, epochs, forks, rewinds, failures."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from omni_loop.config import Deployment, RecordConfig
from omni_loop.errors import ConfigError, InvalidInput, StageFailed, UnknownName
from omni_loop.loop.tap import Failed
from omni_loop.record import layout
from omni_loop.record.reader import Episode, Recording, RecordingError
from omni_loop.record.recorder import Recorder
from omni_loop.testing.rows.bed import Bed, Robot, bed, row, some_actions
from omni_loop.types import Op, TickResult

from .listener import Listener
from .same import check


def _read(recorder: Listener) -> list[Episode]:
    """The recording, in which every tick that was told is, as it was."""
    episodes = Recording(recorder.run).episodes
    read = {tick.order: tick for episode in episodes for tick in episode.ticks}
    assert len(read) == len(recorder.ticks) == recorder.counts.heard == recorder.counts.written
    for told, order in zip(recorder.ticks, sorted(read), strict=True):
        check(told, read[order])
    return episodes


async def _infers(robot: Robot, n: int, frames: int = 0) -> None:
    for _ in range(n):
        outcome = await robot.infer(row(np.random.default_rng(robot.seq)), frames=frames)
        assert isinstance(outcome, TickResult), outcome


async def _forked(made: Bed, robot: Robot, seed: int | None = None) -> Robot:
    info = await made.core.fork(robot.info.id, robot.info.token, seed)
    return Robot(made, info, robot.seq, robot.step)


async def test_everything_a_session_does_is_read_back(tmp_path: Path) -> None:
    recorder, draw = Listener(tmp_path), np.random.default_rng(0)
    async with bed(tap=recorder) as made:
        robot = await made.open(2**63 + 5)
        await _infers(robot, 2, frames=3)
        await robot.predict(some_actions(draw, 2))
        await robot.recondition(row(draw, 3))
        await _infers(robot, 1)
    (episode,) = _read(recorder)
    assert episode.complete
    assert [tick.op for tick in episode.ticks] == [Op.INFER, Op.INFER, Op.PREDICT, Op.RECONDITION, Op.INFER]
    assert [tick.stands for tick in episode.ticks] == [0, 1, 3, 4, 5]
    assert (episode.begin["event"], episode.begin["seed"]) == ("open", 2**63 + 5)
    assert [e["event"] for e in episode.events] == ["ended"]
    assert episode.spec == robot.info.spec
    assert robot.info.token.encode() not in b"".join(p.read_bytes() for p in recorder.run.rglob("*") if p.is_file())


async def test_a_reset_begins_another_episode_and_parts_are_one(tmp_path: Path) -> None:
    recorder = Listener(tmp_path, part_ticks=2)
    async with bed(tap=recorder) as made:
        robot = await made.open(1)
        await _infers(robot, 5)
        await made.core.reset(robot.info.id, robot.info.token, seed=9)
        robot.step = -1
        await _infers(robot, 1)
    first, second = _read(recorder)
    assert (len(first.folders), first.length, second.length) == (3, 5, 1)
    assert (second.begin["event"], second.begin["seed"], second.begin["epoch"]) == ("reset", 9, 1)
    assert first.events[-1]["why"] == "reset"


async def test_forked_and_rewound_sessions_are_recorded_truthfully(tmp_path: Path) -> None:
    recorder = Listener(tmp_path)
    async with bed(tap=recorder) as made:
        robot = await made.open(1)
        await _infers(robot, 4)
        child = await _forked(made, robot, seed=7)
        await _infers(child, 1)
        await made.core.rewind(robot.info.id, robot.info.token, 1)
        robot.step = 1
        await _infers(robot, 1)
    parent, forked = _read(recorder)
    assert [tick.seq for tick in parent.ticks] == [1, 2, 3, 4, 5]
    assert [(tick.seq, tick.epoch) for tick in parent.line] == [(1, 0), (2, 0), (5, 1)]
    assert [(e["event"], e.get("step")) for e in parent.events] == [("rewind", 1), ("ended", None)]
    begin = forked.begin
    assert (begin["event"], begin["source"], begin["seed"], begin["seq"]) == ("fork", parent.session, 7, 4)
    assert (begin["tick"], begin["step"]) == (4, 3)
    assert parent.ticks[3].order < begin["order"] < parent.ticks[4].order


async def test_a_recondition_of_the_past_takes_back_what_it_replaces(tmp_path: Path) -> None:
    recorder = Listener(tmp_path)
    async with bed(tap=recorder) as made:
        robot = await made.open(1)
        await _infers(robot, 4)
        robot.step = 1  # from step 2 on
        await robot.recondition(row(np.random.default_rng(0), 2))
    (episode,) = _read(recorder)
    assert [(tick.seq, tick.result.epoch) for tick in episode.line] == [(1, 0), (2, 0), (5, 1)]


async def test_a_fork_of_a_session_without_ticks_finds_its_parent(tmp_path: Path) -> None:
    recorder = Listener(tmp_path)
    async with bed(tap=recorder) as made:
        robot = await made.open(1)
        await _infers(await _forked(made, robot), 1)
        await made.open(2)  # of which there is nothing to say
    parent, forked = _read(recorder)
    assert (parent.length, forked.begin["source"]) == (0, parent.session)


async def test_what_fails_is_an_event_and_lost_frames_are_noted(tmp_path: Path) -> None:
    def fail(*_: object) -> None:
        raise ValueError("boom")

    recorder = Listener(tmp_path)
    async with bed(tap=recorder) as made:
        robot = await made.open(1)
        made.faults.plant("frames", robot.info.id, fail)  # type: ignore[arg-type]
        await _infers(robot, 1, frames=2)
        made.faults.plant("context", robot.info.id, fail)  # type: ignore[arg-type]
        assert isinstance(await robot.infer(row(np.random.default_rng(1))), StageFailed)
        made.faults.lift("context", robot.info.id)
        await _infers(robot, 1)
    (episode,) = _read(recorder)
    (told,) = [event for event in recorder.told if isinstance(event, Failed)]
    failed = episode.events[0]
    assert (failed["event"], failed["seq"], failed["op"]) == ("failed", 2, "infer")
    assert (failed["reason"], failed["text"]) == ("stage_failed", told.error.text)
    assert isinstance(episode.ticks[0].result.frames_error, StageFailed)


async def test_keys_and_frames_that_are_not_kept_are_not_there(tmp_path: Path) -> None:
    recorder = Listener(tmp_path, keys=(), frames=False)
    async with bed(tap=recorder) as made:
        await _infers(await made.open(1), 1, frames=2)
    (episode,) = Recording(recorder.run).episodes
    assert (episode.keys, episode.kept) == (("x",), ())
    assert episode.ticks[0].arrays == {}
    assert episode.ticks[0].result.frames is None
    assert episode.ticks[0].frames == 2


async def test_a_server_without_sessions_leaves_no_run(tmp_path: Path) -> None:
    async with bed(tap=Listener(tmp_path)):
        pass
    assert os.listdir(tmp_path) == []
    with pytest.raises(RecordingError, match="no recording"):
        Recording(tmp_path)


def test_a_folder_that_cannot_be_used_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    record = RecordConfig(folder=str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=r"record\.folder"):
        Recorder(Deployment(pipelines=("toy",), record=record))


async def test_runs_of_one_folder_are_read_together(tmp_path: Path) -> None:
    for seed in (1, 2):
        async with bed(tap=Listener(tmp_path)) as made:
            await _infers(await made.open(seed), 1)
    recording = Recording(tmp_path)
    assert sorted(episode.begin["seed"] for episode in recording) == [1, 2]
    assert recording.deployment["pipelines"] == ["toy"]
    assert recording.select(["1"]) == [recording.episodes[1]]
    assert recording.select(["0-1"]) == recording.select([]) == recording.episodes
    with pytest.raises(UnknownName, match="no episode 1-2"):
        recording.select(["1-2"])
    with pytest.raises(InvalidInput, match="names no episode"):
        recording.select(["last"])


@pytest.mark.parametrize("kind", ["flip", "cut", "gone", "more"])
async def test_a_file_that_is_not_as_written_is_found(tmp_path: Path, kind: str) -> None:
    recorder = Listener(tmp_path)
    async with bed(tap=recorder) as made:
        await _infers(await made.open(1), 1)
    (folder,) = (p for p in recorder.run.iterdir() if p.is_dir())
    files = [p for p in folder.rglob("*") if p.is_file()]
    assert len(files) > 10
    for path in files:
        whole = path.read_bytes()
        if kind == "gone":
            path.unlink()
        else:
            path.write_bytes({"flip": bytes([whole[0] ^ 1]) + whole[1:], "cut": whole[:-1], "more": whole + b"!"}[kind])
        recording = Recording(recorder.run)
        if not recording.broken:
            with pytest.raises(RecordingError, match="corrupt"):
                _ = recording.episodes[0].ticks
        path.write_bytes(whole)
    assert len(Recording(recorder.run).episodes[0].ticks) == 1


async def test_a_version_that_is_not_known_is_refused(tmp_path: Path) -> None:
    recorder = Listener(tmp_path)
    async with bed(tap=recorder) as made:
        await _infers(await made.open(1), 1)
    run = recorder.run / layout.RUN
    run.write_text(json.dumps(json.loads(run.read_text()) | {"version": 99}))
    with pytest.raises(RecordingError, match="version 99"):
        Recording(recorder.run)
