"""Recorded episodes as a LeRobotDataset: LeRobot loads what was recorded, and what cannot be honest is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from omni_loop.config import Deployment, RecordConfig
from omni_loop.errors import ConfigError, InvalidInput, Unsupported
from omni_loop.loop.request import TickRequest
from omni_loop.loop.tap import Opened, Ticked, Turned
from omni_loop.record import outcomes
from omni_loop.record.export import FAILED, UNKNOWN, Export, export
from omni_loop.record.export import told as told_of
from omni_loop.record.reader import Recording
from omni_loop.record.recorder import Recorder
from omni_loop.record.timeline import timeline
from omni_loop.types import ActionChunk, Array, ArraySpec, Op, SessionSpec, TickResult

HORIZON, DIM = 4, 2
SPEC = SessionSpec(
    pipeline="arm",
    observations=(
        ArraySpec("images.top", "uint8", (8, 12, 3)),
        ArraySpec("agent_pos", "float32", (2,)),
        ArraySpec("gripper", "float32", ()),
    ),
    action=ArraySpec("action", "float32", (DIM,), unit="m"),
    horizon=HORIZON,
    execution_horizon=1,
    control_hz=10,
    ops=(Op.INFER, Op.RECONDITION),
    prompt=True,
)


class Told:
    """Tells a recorder of sessions as the loop would."""

    def __init__(self, folder: Path, spec: SessionSpec = SPEC) -> None:
        self.recorder = Recorder(Deployment(pipelines=("arm",), record=RecordConfig(folder=str(folder))))
        self.draw, self.spec, self.seq = np.random.default_rng(0), spec, 0

    def __enter__(self) -> Told:
        return self

    def __exit__(self, *_: object) -> None:
        self.recorder.stop()

    def open(self, session: str, prompt: str = "push the T") -> None:
        keys = tuple(o.name for o in self.spec.observations)
        self.recorder.opened(Opened(session, self.spec, 1, prompt, keys, {}, "open", "", 0, 0, 0, 0))

    def arrays(self, n: int | None = None) -> dict[str, Array]:
        lead = () if n is None else (n,)
        return {
            "images.top": self.draw.integers(0, 256, (*lead, 8, 12, 3), np.uint8),
            "agent_pos": self.draw.random((*lead, 2)).astype(np.float32),
            "gripper": self.draw.random(lead, np.float32) if lead else np.asarray(self.draw.random(), np.float32),
        }

    def infer(self, session: str, step: int, rows: int) -> tuple[Mapping[str, Array], Array, Array]:
        """Arrays, executed and the chunk of a tick at ``step``, before which ``rows`` actions were executed."""
        self.seq += 1
        arrays, executed = self.arrays(), self.draw.random((rows, DIM)).astype(np.float32)
        chunk = self.draw.random((HORIZON, DIM)).astype(np.float32)
        request = TickRequest(session, "secret", self.seq, Op.INFER, step, arrays, executed)
        result = TickResult(self.seq, 0, ActionChunk(self.seq, step, chunk, 0, "r1"))
        self.recorder.ticked(Ticked(request, executed, 0, self.seq, step, step, 1, result))
        return arrays, executed, chunk

    def episode(self, session: str, steps: Sequence[int], **how: Any) -> list[tuple[Mapping[str, Array], Array, Array]]:
        self.open(session, **how)
        before = [*steps[:1], *steps[:-1]]
        told = [self.infer(session, step, step - then) for step, then in zip(steps, before, strict=True)]
        self.recorder.ended(session, "closed")
        return told


def _rows(dataset: Any, episode: int) -> list[dict[str, Any]]:
    return [row for row in (dataset[i] for i in range(len(dataset))) if int(row["episode_index"]) == episode]


def _load(folder: Path) -> Any:
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    return LeRobotDataset(f"omni_loop/{folder.name}", root=folder)


def test_lerobot_loads_what_was_recorded(tmp_path: Path) -> None:
    pytest.importorskip("lerobot")
    with Told(tmp_path / "record") as told:
        first = told.episode("s1", [0, 1, 2, 3])
        second = told.episode("s2", [0, 1], prompt="stack")
    outcomes.write(tmp_path / "record", {"s1": {"success": True}, "s2": {"success": False}})
    made = export(Recording(tmp_path / "record"), tmp_path / "set", how=Export({"agent_pos": "state"}))
    assert (made.episodes, made.rows, made.fps, made.skipped) == (2, 6, 10, {})
    dataset = _load(tmp_path / "set")
    assert (dataset.fps, dataset.num_episodes, len(dataset)) == (10, 2, 6)
    for number, (episode, task) in enumerate(((first, "push the T"), (second, "stack"))):
        rows = _rows(dataset, number)
        for i, (row, (arrays, _, chunk)) in enumerate(zip(rows, episode, strict=True)):
            image = np.asarray(row["observation.images.top"]).transpose(1, 2, 0)
            np.testing.assert_array_equal(np.rint(image * 255).astype(np.uint8), arrays["images.top"])
            np.testing.assert_array_equal(np.asarray(row["observation.state"]), arrays["agent_pos"])
            assert float(row["observation.gripper"]) == float(arrays["gripper"])
            last = i == len(episode) - 1
            action = chunk[0] if last else episode[i + 1][1][0]
            np.testing.assert_array_equal(np.asarray(row["action"]), action)
            assert float(row["timestamp"]) == pytest.approx(i / 10)
            assert (bool(row["next.done"]), bool(row["next.success"])) == (last, last and number == 0)
            assert row["task"] == task


def test_what_a_pusht_pipeline_was_shown_can_be_trained_on(tmp_path: Path) -> None:
    pytest.importorskip("lerobot")
    from omni_loop_policies.lerobot.train import LeRobotRecipe, train

    seen = (ArraySpec("image", "uint8", (64, 64, 3)), ArraySpec("agent_pos", "float32", (2, 2)))

    class Pusht(Told):
        def arrays(self, n: int | None = None) -> dict[str, Array]:
            image = self.draw.integers(0, 256, (64, 64, 3), np.uint8)
            return {"image": image, "agent_pos": self.draw.random((2, 2)).astype(np.float32)}

    with Pusht(tmp_path / "record", replace(SPEC, observations=seen)) as told:
        first = told.episode("s1", [0, 1, 2])
    export(Recording(tmp_path / "record"), tmp_path / "set", how=Export({"agent_pos": "state"}))
    for row, (arrays, _, _) in zip(_rows(_load(tmp_path / "set"), 0), first, strict=True):
        np.testing.assert_array_equal(np.asarray(row["observation.state"]), arrays["agent_pos"].reshape(-1))
    assert json.loads((tmp_path / "set/meta/omni_loop.json").read_text())["shapes"] == {"observation.state": [2, 2]}
    tiny = {"dim_model": 32, "n_heads": 2, "dim_feedforward": 32, "n_encoder_layers": 1, "n_vae_encoder_layers": 1}
    recipe = LeRobotRecipe.model_validate({"type": "act", "steps": 2, "batch": 2, "policy": tiny})
    trained = train(tmp_path / "set", recipe, tmp_path / "trained")
    assert np.isfinite(trained.losses).all()
    assert trained.inputs == {"observation.image": (3, 64, 64), "observation.state": (4,)}


def test_only_successes(tmp_path: Path) -> None:
    pytest.importorskip("lerobot")
    with Told(tmp_path / "record") as told:
        told.episode("s1", [0, 1])
        told.episode("s2", [0, 1, 2])
    outcomes.write(tmp_path / "record", {"s1": {"success": False}})
    outcomes.write(tmp_path / "record", {"s2": {"success": True}})
    made = export(Recording(tmp_path / "record"), tmp_path / "set", how=Export(successes=True))
    assert (made.episodes, made.rows) == (1, 3)
    assert list(made.skipped.values()) == ["it did not succeed"]


def test_steps_apart_are_refused_unless_asked_for(tmp_path: Path) -> None:
    pytest.importorskip("lerobot")
    with Told(tmp_path / "record") as told:
        episode = told.episode("s1", [0, 2, 4])
    recording = Recording(tmp_path / "record")
    with pytest.raises(InvalidInput, match=r"0 and step 2 were observed, 2 apart.*execution_horizon 1.*--stride 2"):
        export(recording, tmp_path / "refused")
    assert not (tmp_path / "refused").exists()
    made = export(recording, tmp_path / "set", how=Export(stride=2))
    assert (made.rows, made.fps) == (3, 5)
    rows = _rows(_load(tmp_path / "set"), 0)
    np.testing.assert_array_equal(np.asarray(rows[0]["action"]), episode[1][1].reshape(-1))
    np.testing.assert_array_equal(np.asarray(rows[2]["action"]), episode[2][2][:2].reshape(-1))
    with pytest.raises(InvalidInput, match="say --stride 2"):
        export(recording, tmp_path / "other", how=Export(stride=5))
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_what_was_not_wanted_is_counted_and_what_is_damaged_is_named() -> None:
    skipped = {"a": FAILED, "b": "it has gaps", "c": FAILED, "d": UNKNOWN}
    assert told_of(skipped) == ["b: it has gaps", f"2 episodes: {FAILED}", f"1 episode: {UNKNOWN}"]


def test_two_exports_at_once_do_not_write_into_each_other(tmp_path: Path) -> None:
    pytest.importorskip("lerobot")
    with Told(tmp_path / "record") as told:
        told.episode("s1", [0, 1])
    recording, out = Recording(tmp_path / "record"), tmp_path / "set"
    with pytest.raises(ConfigError, match="was made meanwhile"):  # by one that is quicker
        export(recording, out, on_episode=lambda _: export(recording, out) and None)
    assert len(_load(out)) == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["record", "set"]


@pytest.mark.parametrize("name", ["a/b", "images.x", ".", "", "..", "a b", "x."])
def test_a_name_that_is_none_in_lerobot_is_refused(name: str, tmp_path: Path) -> None:
    with Told(tmp_path / "record") as told:
        told.episode("s1", [0, 1])
    with pytest.raises(InvalidInput, match="cannot be called"):
        export(Recording(tmp_path / "record"), tmp_path / "set", how=Export({"agent_pos": name}))


def test_what_cannot_be_exported_is_said(tmp_path: Path) -> None:
    with Told(tmp_path / "record") as told:
        told.episode("s1", [0, 1])
    recording = Recording(tmp_path / "record")
    with pytest.raises(ConfigError, match="exists"):
        export(recording, tmp_path)
    with pytest.raises(InvalidInput, match=r"no observation 'agentpos' to rename. Did you mean 'agent_pos'"):
        export(recording, tmp_path / "set", how=Export({"agentpos": "state"}))
    with pytest.raises(InvalidInput, match="would both be called 'gripper'"):
        export(recording, tmp_path / "set", how=Export({"agent_pos": "gripper"}))
    with pytest.raises(InvalidInput, match="no recorded episode is of pipeline 'leg'"):
        export(recording, tmp_path / "set", how=Export(pipeline="leg"))
    with pytest.raises(Unsupported, match="not known to have succeeded"):
        export(recording, tmp_path / "set", how=Export(successes=True))
    odd = replace(SPEC, control_hz=12.5)
    with Told(tmp_path / "odd", odd) as told:
        told.episode("s1", [0, 1])
    with pytest.raises(InvalidInput, match="say --fps"):
        export(Recording(tmp_path / "odd"), tmp_path / "set")


def test_a_recondition_gives_every_step_and_a_rewind_takes_back(tmp_path: Path) -> None:
    with Told(tmp_path) as told:
        told.open("s1")
        first = told.infer("s1", 0, 0)
        told.infer("s1", 1, 1)
        told.recorder.turned(Turned("s1", "rewind", 1, 0, 1, ""))
        again = told.infer("s1", 1, 1)
        arrays, executed = told.arrays(3), told.draw.random((3, DIM)).astype(np.float32)
        told.seq += 1
        request = TickRequest("s1", "secret", told.seq, Op.RECONDITION, 2, arrays, executed)
        told.recorder.ticked(Ticked(request, executed, 1, 2, 2, 4, 1, TickResult(told.seq, 1)))
        told.recorder.ended("s1", "closed")
    (episode,) = Recording(tmp_path)
    seen = timeline(episode)
    assert [one.step for one in seen] == [0, 1, 2, 3, 4]
    np.testing.assert_array_equal(seen[0].done, again[1])
    np.testing.assert_array_equal(np.concatenate([one.done for one in seen[1:]]), executed)
    np.testing.assert_array_equal(seen[0].arrays["agent_pos"], first[0]["agent_pos"])
    for i, one in enumerate(seen[2:]):
        np.testing.assert_array_equal(one.arrays["images.top"], arrays["images.top"][i])
    assert len(seen[-1].done) == 0
