from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from omni_loop.env import EVALUATION_SEED
from omni_loop.errors import ConfigError, UnknownName
from omni_loop_envs.pusht.demos import (
    KINDS,
    PUSHT_DEMOS,
    PUSHT_SMALL_DEMOS,
    Job,
    PushTDemos,
    Split,
    make_episode,
    scene_points,
)
from omni_loop_envs.pusht.simulator import PushTSimulator

SMALL = PushTDemos(
    "small",
    KINDS,
    {
        "train": Split({"expert": 1, "random": 1, "poses": 1}, {"random": 1, "poses": 1}, first_seed=700_000),
        "test": Split({"random": 1}, {"random": 1}, first_seed=750_000),
    },
)


def test_splits_and_evaluation_share_no_seed() -> None:
    train, test = (PUSHT_DEMOS.split(name).seeds() for name in ("train", "test"))
    assert len(train) == sum(PUSHT_DEMOS.split("train").counts.values())
    assert not train & test
    assert max(train | test) < EVALUATION_SEED


def test_sets_that_share_seeds_cannot_be_made() -> None:
    one = Split({"expert": 3}, {}, first_seed=5)
    with pytest.raises(ConfigError, match="seed 7 is in both train and test"):
        PushTDemos("x", KINDS, {"train": one, "test": Split({"expert": 1}, {}, first_seed=7)})
    with pytest.raises(ConfigError, match="belongs to evaluation"):
        PushTDemos("x", KINDS, {"train": Split({"expert": 1}, {}, first_seed=EVALUATION_SEED)})
    with pytest.raises(UnknownName, match=r"'exprt'. Did you mean 'expert'"):
        PushTDemos("x", KINDS, {"train": Split({"exprt": 1}, {}, first_seed=0)})


def test_generated_sets_load_and_overlap_on_disk_is_refused(tmp_path: Path) -> None:
    heard: list[tuple[str, int, int]] = []
    SMALL.generate(tmp_path, workers=1, progress=lambda *args: heard.append(args))
    assert heard == [("train", 1, 3), ("train", 2, 3), ("train", 3, 3), ("test", 1, 1)]
    train, test = (SMALL.load(tmp_path)[name] for name in ("train", "test"))
    rows = int(train.length.sum())
    assert train.state.shape == (rows, 5)
    assert train.points.shape == (rows, 9, 2)
    assert len(train.action) == rows
    assert len(train.frames) == int(train.length[:2].sum()), "frames are a prefix: framed episodes come first"
    assert len(test.frames) == int(test.length.sum())
    assert [KINDS[k] for k in train.column("kind")] == ["random", "poses", "expert"]
    np.save(tmp_path / "test" / "seed.npy", train.column("seed")[:1])
    with pytest.raises(ConfigError, match="is also in train"):
        SMALL.load(tmp_path)


def test_an_episode_is_a_pure_function_of_its_job_and_its_actions_lead_to_the_next_row() -> None:
    job = Job("perturbed", 700_123, framed=False, max_steps=25)
    a, b = make_episode(job), make_episode(job)
    assert a.state.tobytes() == b.state.tobytes()
    assert a.action.tobytes() == b.action.tobytes()
    sim = PushTSimulator()
    assert (sim.reset(job.seed) == a.state[0]).all()
    for i, action in enumerate(a.action[:-1]):
        sim.step(action)
        assert (sim.state == a.state[i + 1]).all(), f"row {i + 1}"


def test_scene_points_are_agent_and_keypoints_in_table_units() -> None:
    points = scene_points(np.array([[0, 512, 256, 256, 0]], np.float32))
    assert points.shape == (1, 9, 2)
    assert points.dtype == np.float32
    assert points[0, 0].tolist() == [-1, 1]
    np.testing.assert_allclose(points[0, 1], [-60 / 256, 0], atol=1e-6)


def test_scaled_keeps_every_kind() -> None:
    small = PUSHT_DEMOS.scaled(0.001)
    assert set(small.split("train").counts) == set(KINDS)
    assert sum(small.split("test").counts.values()) == 4
    with pytest.raises(UnknownName, match=r"'tst'. Did you mean 'test'"):
        PUSHT_DEMOS.split("tst")


def test_the_small_set_is_the_beginning_of_the_whole_one() -> None:
    small, whole = (demos.split("train").seeds() for demos in (PUSHT_SMALL_DEMOS, PUSHT_DEMOS))
    assert len(small) == 260
    assert small < whole
