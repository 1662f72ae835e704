"""Training: two tasks that look the same and differ by what is asked for; told another scene's, the policy holds."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from omni_loop.config import validate
from omni_loop.errors import ConfigError, UnknownName
from omni_loop.training.checkpoint import save
from omni_loop.training.demos import Demos
from omni_loop.training.recipe import TrainContext
from omni_loop_policies.instructed.eye import EyeConfig
from omni_loop_policies.instructed.model import HeadConfig, Instructed
from omni_loop_policies.instructed.samples import Lessons, Samples, vocabulary
from omni_loop_policies.instructed.stages import load_policy
from omni_loop_policies.instructed.train import InstructedRecipe, train
from omni_loop_policies.instructed.words import BEGIN, END, TOKENS, Vocabulary

TASKS = ["reach-v3", "pick-place-v3", "door-open-v3"]
GOES = np.array([[0.8, 0, 0, 0], [-0.8, 0, 0, 0], [0, 0.8, 0, 0]], np.float32)  # by task
LENGTH = 12


def write(folder: Path, seed: int, images: bool = False) -> Demos:
    """Eight episodes of each task; the first two begin alike."""
    folder.mkdir(parents=True)
    task, rng = np.repeat(np.arange(3), 8), np.random.default_rng(seed)
    n = len(task) * LENGTH
    place = np.repeat(task == 2, LENGTH)[:, None] * np.ones(39)
    label = np.repeat(GOES[task], LENGTH, 0)
    columns = {
        "frames": rng.integers(0, 255, (n if images else 0, 16, 16, 3)).astype(np.uint8),
        "state": (place + 0.1 * rng.normal(size=(n, 39))).astype(np.float32),
        "points": np.zeros((n, 1, 2), np.float32),
        "action": label,
        "label": label,
        "coverage": np.ones(n, np.float32),
        "length": np.full(len(task), LENGTH),
        "kind": np.zeros(len(task), np.int64),
        "success": np.arange(len(task)) != 3,
        "seed": np.arange(len(task)) + seed,
        "task": task,
    }
    for name, column in columns.items():
        np.save(folder / f"{name}.npy", column)
    (folder / "tasks.json").write_text(json.dumps(TASKS))
    return Demos(folder, ("expert",))


def recipe(**fields: object) -> InstructedRecipe:
    small = {
        "text": {"layers": 2, "head_dim": 16, "feed_forward": 32},
        "head": {"horizon": 4, "execution_horizon": 2, "width": 48, "condition": 48, "blocks": 2},
        "texts": 12, "hold_share": 0.34, "warmup": 20, "ema": 0.98,
        "steps": 360, "batch": 48, "lr": 4e-3, "threads": 1, "demos": "toy",
    }  # fmt: skip
    return InstructedRecipe.model_validate(small | fields)


def context(tmp_path: Path, images: bool = False) -> TrainContext:
    learned, kept = write(tmp_path / "train", 0, images), write(tmp_path / "test", 100, images)
    return TrainContext(learned, kept, tmp_path, lambda text: None)


def act(model: Instructed, text: str, scene: float) -> NDArray[np.float32]:
    """First actions of 16 chunks at states of a scene."""
    kv = model.text(Vocabulary(model.config.text.words).tokens(text)[None]).expand(16, -1, -1, -1, -1, -1)
    known = model.known(torch.full((16, 39), scene), None)
    noise = torch.randn(16, 4, 4, generator=torch.Generator().manual_seed(0))
    return np.asarray(model.actions(model.sample(noise, known, kv))[:, 0])


def test_the_text_alone_says_which_task_it_is(tmp_path: Path) -> None:
    trained = train(recipe(), context(tmp_path))
    save(tmp_path / "toy", trained.config, trained.tensors, {}, "")
    model = load_policy(tmp_path / "toy")
    assert model.config.tasks == tuple(TASKS)
    said = {
        ("reach the goal", 0): GOES[0],
        ("please touch the target", 0): GOES[0],
        ("grasp the puck and carry it to the goal", 0): GOES[1],
        ("open the door", 1): GOES[2],
        ("reach the goal", 1): np.zeros(4),
        ("open the door", 0): np.zeros(4),
        ("close the door", 1): np.zeros(4),
    }
    for (text, scene), want in said.items():
        error = np.abs(act(model, text, float(scene)).mean(0) - want).max()
        assert error < 0.35, (text, scene, error)
    assert trained.metrics["action_error"] < 0.15
    assert trained.metrics["motion_when_told_another_scenes_task"] < 0.15


def test_training_is_a_function_of_its_seed_and_an_eye_can_learn(tmp_path: Path) -> None:
    given = context(tmp_path, images=True)
    eye = EyeConfig(size=16, channels=(8, 8, 8, 8), points=4, out=8)
    head = HeadConfig(horizon=4, execution_horizon=2, features=4, width=16, condition=16, blocks=1, eye=eye)
    small = {"head": head.model_dump(), "text": {"layers": 2, "head_dim": 8}, "steps": 3}
    runs = [train(recipe(**small, seed=seed), given) for seed in (0, 0, 1)]
    first, same, other = (run.tensors["eye.out.weight"] for run in runs)
    assert (first == same).all()
    assert (first != other).any()
    assert runs[0].tensors["state_mean"].shape == (4,)


def test_an_episode_ends_its_last_chunks_and_failures_are_left_out(tmp_path: Path) -> None:
    samples = Samples(write(tmp_path / "demos", 0), 4, 39, images=False)
    assert len(samples.rows) == 23 * (LENGTH - 1)
    assert samples.mask[:11].sum(1).tolist() == [4] * 8 + [3, 2, 1]
    assert not ((samples.rows >= 3 * LENGTH) & (samples.rows < 4 * LENGTH)).any()


def test_only_rows_that_hold_are_told_what_another_scene_asks_for() -> None:
    task, rng, words = np.arange(30) % 3, np.random.default_rng(0), Vocabulary(vocabulary())
    lessons = Lessons(TASKS, task, 12, 0.25)
    puck, door = (set(words.tokens(text).tolist()) - {BEGIN, END} for text in ("puck object cylinder", "door"))
    others = {words.tokens(word)[1].item() for word in ("close", "shut", "closed", "lock", "unlock")}
    held = 0
    for _ in range(20):
        lesson = lessons.draw(50, rng)
        assert lesson.tokens.shape == (12, TOKENS)
        assert (lesson.tokens[:, 0] == BEGIN).all()
        assert (lesson.tokens[:, -1] == END).all()
        assert (lesson.holds == (np.arange(48) >= 36)).all()
        rows = task[lesson.at].reshape(12, 4)
        said = [set(text) for text in lesson.tokens.tolist()]
        assert (rows[:9] == rows[:9, :1]).all()
        assert np.bincount(rows[:9, 0]).tolist() == [3, 3, 3]
        for text, own in zip(said[:9], rows[:9, 0], strict=True):
            assert (bool(text & puck), bool(text & door)) == (own == 1, own == 2)
        for text, told in zip(said[9:], rows[9:], strict=True):
            assert not (text & puck) or (told == 2).all()
            assert not (text & door) or text & others or (told < 2).all()
            held += bool(text & (puck | door))
    assert held > 10


def test_what_cannot_be_done_where_the_goal_lies_is_held_too() -> None:
    tasks = ("reach-v3", "push-v3", "pick-place-v3")
    task, rng, words = np.arange(30) % 3, np.random.default_rng(0), Vocabulary(vocabulary())
    lessons = Lessons(tasks, task, 12, 0.5)
    puck, pushing, lifting = (
        set(words.tokens(text).tolist()) - {BEGIN, END}
        for text in ("puck object cylinder", "push shove slide", "pick grasp lift take carry")
    )
    seen = set()
    for _ in range(40):
        lesson = lessons.draw(48, rng)
        for text, there in zip(lesson.tokens[6:].tolist(), task[lesson.at].reshape(12, 4)[6:], strict=True):
            if {*text} & puck and {*text} & (pushing | lifting):
                seen |= {("push" if {*text} & pushing else "lift", tasks[i]) for i in there}
    assert seen == {("push", "reach-v3"), ("push", "pick-place-v3"), ("lift", "push-v3")}


def test_a_task_without_a_successful_demonstration_is_named() -> None:
    with pytest.raises(ConfigError, match="no demonstration of pick-place-v3 succeeded"):
        Lessons(TASKS, np.array([0, 0, 2, 2]), 12, 0.25)


def test_every_text_needs_a_row() -> None:
    with pytest.raises(ConfigError, match="batch: 8 rows are less than one for each of 12 texts"):
        validate(InstructedRecipe, {"demos": "metaworld", "steps": 1, "batch": 8, "lr": 0.001, "texts": 12}, "mine")


def test_demonstrations_that_do_not_say_their_task_are_refused(tmp_path: Path) -> None:
    given = context(tmp_path)
    (tmp_path / "train" / "tasks.json").write_text('["juggle-v3"]')
    with pytest.raises(UnknownName, match="juggle-v3"):
        train(recipe(), given)
    (tmp_path / "train" / "tasks.json").unlink()
    with pytest.raises(ConfigError, match=r"tasks\.json"):
        train(recipe(), given)


def test_an_eye_needs_frames(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="frames of 0"):
        train(recipe(head={"eye": {"size": 16}, "features": 4}), context(tmp_path))
