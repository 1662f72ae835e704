"""Recordings that were altered: what is no episode is broken and the others stay, and what is another one differs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from omni_loop.client import connect
from omni_loop.errors import InvalidInput
from omni_loop.record import layout, sealed
from omni_loop.record.differences import Report, compare
from omni_loop.record.reader import Recording, RecordingError
from omni_loop.record.replay import replay
from omni_loop.record.table import Tick
from omni_loop.testing.rows.bed import row
from omni_loop.testing.rows.toys import DIM, NAME
from omni_loop.types import ActionChunk, FramePrediction, Op, PlanSummary, TickResult

from .served import deployment, registered, served


@pytest.fixture(scope="module")
def again() -> Iterator[str]:
    with registered(), served(deployment()) as address:
        yield address


@pytest.fixture(scope="module")
def whole(again: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sessions of 4 ticks."""
    folder, draw = tmp_path_factory.mktemp("whole"), np.random.default_rng(0)
    with served(deployment(folder)) as address, connect(address) as client:
        for seed in (5, 6):
            with client.open(NAME, seed=seed) as session:
                for step in range(4):
                    executed = np.full((1, DIM), 0.25, np.float32) if step else None
                    session.infer({"x": row(draw)}, step, executed=executed)
    return folder


def _episode(whole: Path, folder: Path) -> Path:
    """The folder of the first episode of a copy."""
    shutil.copytree(whole, folder)
    return sorted(path for path in next(folder.iterdir()).iterdir() if path.is_dir())[0]


def _attributes(episode: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change what an episode says of itself, and seal it anew."""
    data = json.loads((episode / "zarr.json").read_text())
    change(data["attributes"]["episode"])
    (episode / "zarr.json").write_text(json.dumps(data))
    _seal(episode)


def _seal(episode: Path) -> None:
    (episode / "manifest").unlink()
    sealed.seal(episode, layout.VERSION)


def _replayed(path: Path, address: str) -> Report:
    with connect(address, timeout_s=30) as client:
        recording = Recording(path)
        return replay(client, recording)


@pytest.mark.parametrize(
    "change",
    [
        lambda about: about.clear(),
        lambda about: about.pop("keys"),
        lambda about: about.update(spec=3),
        lambda about: about["spec"].update(ops=["x"]),
        lambda about: about["spec"].pop("control_hz"),
        lambda about: about.update(begin=None),
        lambda about: about["begin"].update(event="weird"),
        lambda about: about["begin"].update(seed="x"),
        lambda about: about["begin"].pop("order"),
        lambda about: about.update(part="x"),
        lambda about: about.update(ticks="4"),
        lambda about: about.update(options=[1]),
        lambda about: about.update(session=["q"]),
    ],
)
def test_an_episode_with_damaged_attributes_is_broken_and_the_others_stay(
    change: Callable[[dict[str, Any]], Any], whole: Path, again: str, tmp_path: Path
) -> None:
    episode = _episode(whole, tmp_path / "altered")
    _attributes(episode, change)
    recording = Recording(tmp_path / "altered")
    assert list(recording.broken) == [episode.name]
    assert "attributes.episode" in recording.broken[episode.name]
    assert [e.length for e in recording] == [4]
    report = _replayed(tmp_path / "altered", again)
    assert (report.exact, report.ticks, report.differing) == (False, 4, 0)


@pytest.mark.parametrize("text", ["{}", "[]", "\x00", '{"attributes": {"episode": [1]}}', "[" * 100_000])
def test_attributes_that_are_none_break_one_episode(text: str, whole: Path, tmp_path: Path) -> None:
    episode = _episode(whole, tmp_path / "altered")
    (episode / "zarr.json").write_text(text)
    recording = Recording(tmp_path / "altered")
    assert (list(recording.broken), len(recording)) == ([episode.name], 1)


@pytest.mark.parametrize("text", ['{"version": 1}', '{"version": 1, "deployment": 5}', "[]", "[" * 100_000])
def test_a_run_that_says_no_deployment_is_refused(text: str, whole: Path, tmp_path: Path) -> None:
    episode = _episode(whole, tmp_path / "altered")
    (episode.parent / layout.RUN).write_text(text)
    with pytest.raises(RecordingError, match=layout.RUN):
        Recording(tmp_path / "altered")


def test_another_number_of_ticks_than_it_says_is_refused(whole: Path, again: str, tmp_path: Path) -> None:
    episode = _episode(whole, tmp_path / "altered")
    _attributes(episode, lambda about: about.update(ticks=2))
    with pytest.raises(RecordingError, match="says that it has 2 ticks, and holds 4"):
        _replayed(tmp_path / "altered", again)


def test_a_million_epochs_are_not_repeated(whole: Path, again: str, tmp_path: Path) -> None:
    episode = _episode(whole, tmp_path / "altered")
    _attributes(episode, lambda about: about["begin"].update(epoch=1_000_000, order=2_000_000))
    report = _replayed(tmp_path / "altered", again)
    assert "not plausible" in next(e.skipped for e in report.episodes if e.name == episode.name)
    assert not report.exact


@pytest.mark.parametrize(
    ("column", "value", "says"),
    [
        ("seed", 99, "ran under seed 99, and its episode under 5"),
        ("epoch", 3, "ran in epoch 3, now in 0"),
        ("result_epoch", 3, "answered in epoch 3, now in 0"),
    ],
)
def test_numbers_of_a_tick_are_compared(
    column: str, value: int, says: str, whole: Path, again: str, tmp_path: Path
) -> None:
    episode = _episode(whole, tmp_path / "altered")
    array: Any = zarr.open_array(str(episode / layout.TICKS), mode="r+")
    numbers = array[...]
    numbers[1, layout.NUMBERS.index(column)] = value
    array[...] = numbers
    _seal(episode)
    report = _replayed(tmp_path / "altered", again)
    assert (report.exact, report.differing) == (False, 1)
    assert [tick.other for tick in report.episodes[0].ticks] == ["", says, "", ""]


def _tick(result: TickResult) -> Tick:
    none: dict[str, Any] = {"executed": None, "actions": None, "plan": None, "arrays": {}}
    numbers = dict.fromkeys(("order", "at_ns", "seq", "epoch", "tick", "step", "stands", "seed", "steps", "frames"), 0)
    return Tick(op=Op.INFER, kept=True, frames_kept=True, result=result, **none, **numbers)


def test_scenes_and_plans_are_compared() -> None:
    frames, scene = np.zeros((1, 2, 2, 3), np.uint8), np.zeros((1, 3, 2), np.float32)
    plan = PlanSummary(1, 2.0, 3.0, 8, 2, 4)

    def made(scene: Any, plan: PlanSummary | None) -> TickResult:
        return TickResult(1, 0, frames=FramePrediction(1, 0, frames, 0, scene), plan=plan)

    was = _tick(made(scene, plan))
    assert compare(was, made(scene, plan)).exact()
    moved = compare(was, made(scene + 1, plan))
    assert (moved.scene, moved.exact(0.5), moved.exact(1.0)) == (1.0, False, True)
    assert compare(was, made(None, plan)).scene == np.inf
    dearer = compare(was, made(scene, PlanSummary(9, 2.5, 3.0, 8, 2, 4)))
    assert (dearer.plan, dearer.exact(), dearer.exact(0.5)) == (0.5, False, True)
    for other in (None, PlanSummary(1, 2.0, 3.0, 8, 1, 4), PlanSummary(1, 2.0, 3.0, 8, 2, 4, out_of_time=True)):
        assert compare(was, made(scene, other)).plan == np.inf


@pytest.mark.parametrize(
    ("recorded", "now", "same"),
    [
        ("a+1", "a+1", True), ("a", "a+1", True), ("a+1", "a+2", False), ("a+1", "a", False), ("a", "ab+1", False),
        ("a", "b+1", False),
    ],
)  # fmt: skip
def test_a_policy_is_another_when_a_stage_is_unless_only_one_was_recorded(recorded: str, now: str, same: bool) -> None:
    def made(revision: str) -> TickResult:
        return TickResult(1, 0, ActionChunk(1, 0, np.zeros((2, 1), np.float32), 0, revision))

    found = compare(_tick(made(recorded)), made(now))
    assert found.revision == (None if same else (recorded, now))
    assert found.exact() == same


def test_what_names_no_episode_is_refused(whole: Path) -> None:
    recording = Recording(whole)
    for text in ("²", "-", "1-", "9" * 5000, "0--1"):
        with pytest.raises(InvalidInput, match="names no episode"):
            recording.select([text])
    with pytest.raises(InvalidInput, match="runs backwards; say 0-1"):
        recording.select(["1-0"])
