from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("metaworld")

from omni_loop.env import EVALUATION_SEED
from omni_loop.errors import ConfigError, MissingExtra, UnknownName
from omni_loop_envs import headless
from omni_loop_envs.metaworld.demos import METAWORLD_DEMOS, METAWORLD_PIXELS_DEMOS, Job, MetaWorldDemos, make_episode
from omni_loop_envs.metaworld.env import MetaWorld
from omni_loop_envs.metaworld.tasks import INSTRUCTIONS

TWO = ("door-open-v3", "button-press-v3")
SMALL = MetaWorldDemos(
    "small", TWO, {"train": ({"expert": 1, "perturbed": 1}, 700_000), "test": ({"expert": 1}, 950_000)}
)


def test_splits_and_evaluation_share_no_seed() -> None:
    for demos in (METAWORLD_DEMOS, METAWORLD_PIXELS_DEMOS):
        train, test = ({job.seed for job in demos.jobs(split)} for split in ("train", "test"))
        assert not train & test
        assert max(train | test) < EVALUATION_SEED
    assert (len(METAWORLD_DEMOS.jobs("train")), len(METAWORLD_PIXELS_DEMOS.jobs("train"))) == (480, 405)
    with pytest.raises(ConfigError, match="seed 7 is in both train and test"):
        MetaWorldDemos("x", TWO, {"train": ({"expert": 3}, 5), "test": ({"expert": 1}, 7)})
    with pytest.raises(ConfigError, match="belongs to evaluation"):
        MetaWorldDemos("x", TWO, {"train": ({"expert": 1}, EVALUATION_SEED)})
    with pytest.raises(UnknownName, match=r"'exprt'. Did you mean 'expert'"):
        MetaWorldDemos("x", TWO, {"train": ({"exprt": 1}, 0)})
    with pytest.raises(UnknownName, match=r"'door-opn-v3'. Did you mean 'door-open-v3'"):
        MetaWorldDemos("x", ("door-opn-v3",), {"train": ({"expert": 1}, 0)})
    with pytest.raises(UnknownName, match=r"'tst'. Did you mean 'test'"):
        METAWORLD_DEMOS.jobs("tst")


def test_generated_sets_load_and_overlap_on_disk_is_refused(tmp_path: Path) -> None:
    heard: list[tuple[str, int, int]] = []
    SMALL.generate(tmp_path, workers=1, progress=lambda *args: heard.append(args))
    assert heard == [("train", 1, 4), ("train", 2, 4), ("train", 3, 4), ("train", 4, 4), ("test", 1, 2), ("test", 2, 2)]
    train = SMALL.load(tmp_path)["train"]
    rows = int(train.length.sum())
    assert train.state.shape == (rows, 39)
    assert train.points.shape == (rows, 3, 2)
    assert np.abs(train.points).max() < 1
    assert train.label.shape == train.action.shape == (rows, 4)
    assert train.frames.shape == (0, 64, 64, 3)
    assert train.success.all()
    assert list(train.column("kind")) == [0, 1, 0, 1]
    tasks = json.loads((tmp_path / "train" / "tasks.json").read_text())
    assert [tasks[task] for task in train.column("task")] == [TWO[0], TWO[0], TWO[1], TWO[1]]
    recipe = json.loads((tmp_path / "train" / "recipe.json").read_text())
    assert recipe["tasks"] == {task: INSTRUCTIONS[task] for task in TWO} == SMALL.prompts
    given = SMALL.gave(train, np.array([0, 5]))
    assert (given["gripper"] == train.state[[0, 5], :4]).all()
    np.save(tmp_path / "test" / "seed.npy", train.column("seed")[:2])
    with pytest.raises(ConfigError, match="is also in train"):
        SMALL.load(tmp_path)


def test_an_episode_is_a_pure_function_of_its_job_and_its_actions_lead_to_the_next_row() -> None:
    job = Job("drawer-open-v3", "perturbed", 300_123, False)
    a, b = make_episode(job), make_episode(job)
    assert a.state.tobytes() == b.state.tobytes()
    assert (a.action[:, :3] != a.label[:, :3]).any()
    assert (a.action[:, 3] == a.label[:, 3]).all()
    assert a.coverage.sum() == 5
    env = MetaWorld(task=job.task, images=False)
    assert (env.reset(job.seed)["state"] == a.state[0]).all()
    for i, action in enumerate(a.action[:-1]):
        step = env.step(action, keys=("state",))
        assert (step.arrays["state"] == a.state[i + 1]).all(), f"row {i + 1}"
        assert step.success == a.coverage[i + 1]


def test_framed_episodes_have_the_frame_of_every_row(tmp_path: Path) -> None:
    try:
        headless.open_gl(8, 8).free()
    except MissingExtra:
        pytest.skip("neither OSMesa nor EGL on this machine")
    framed = MetaWorldDemos("framed", ("button-press-v3",), {"train": ({"expert": 2}, 700_000)}, framed=True)
    framed.generate(tmp_path, workers=1)
    train = framed.load(tmp_path)["train"]
    assert len(train.frames) == len(train.state) == train.length.sum()
    env = MetaWorld(task="button-press-v3")
    first = env.reset(700_001)["image"]
    assert (train.frames[train.start[1]] == first).all()
    rows = np.array([int(train.start[1])])
    assert (framed.gave(train, rows)["image"][0] == first).all()
    env.close()
