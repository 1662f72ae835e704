"""The circle at small scale, by the README's own commands: record what a served LeRobot policy does, export that, train
on it, serve what was trained, evaluate it."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("lerobot")
pytest.importorskip("gymnasium_robotics")

from omni_loop.cli.app import app
from omni_loop.record.reader import Recording
from omni_loop_envs.fetch.env import FetchPickPlace
from omni_loop_policies.lerobot.load import load

EPISODES = 3
STEPS = 30
README = (Path(__file__).resolve().parents[2] / "README.md").read_text()


def command(*words: str) -> list[str]:
    """The arguments of the README's one command of the circle that has these words."""
    blocks = re.findall(r"^```\w*\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    (block,) = [block for block in blocks if "--record" in block]
    (line,) = [line for line in block.splitlines() if set(words) <= set(line.split())]
    arguments = shlex.split(line, comments=True)
    return arguments[arguments.index("omni-loop") + 1 :]


COMMANDS = {
    "record": command("eval", "--record"),
    "export": command("export"),
    "train": command("train", "--from"),
    "evaluate": command("eval", "--checkpoint"),
}


def call(home: Path, name: str, *more: object) -> None:
    """One of the README's commands, made small by ``more``."""
    with contextlib.chdir(home):
        arguments = [*COMMANDS[name], *map(str, more)]
        result = CliRunner().invoke(app, arguments, catch_exceptions=False, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the commands are given: each writes what the next one reads."""
    return tmp_path_factory.mktemp("circle")


def succeeded(episodes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Which the export keeps; with a new chunk at every step the shipped policy does not always succeed."""
    kept = [row for row in episodes if row["success"]]
    assert len(kept) >= EPISODES - 1, [row["outcome"] for row in episodes]
    return kept


def read(file: Path) -> Any:
    return json.loads(file.read_text())


@pytest.fixture(scope="module")
def episodes(home: Path) -> list[dict[str, Any]]:
    """Episodes of the shipped policy, recorded."""
    call(home, "record", "--episodes", EPISODES, "--videos", "none")
    return list(read(home / "runs/fetch/episodes.json"))


@pytest.fixture(scope="module")
def dataset(home: Path, episodes: list[dict[str, Any]]) -> Any:
    """What was recorded, as LeRobot loads it."""
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    call(home, "export")
    return LeRobotDataset("omni_loop/rollouts", root=home / "data/rollouts")


@pytest.fixture(scope="module")
def trained(home: Path, dataset: Any) -> Path:
    call(home, "train", "--steps", STEPS)
    return home / "checkpoints/mine"


@pytest.fixture(scope="module")
def evaluated(home: Path, trained: Path) -> dict[str, Any]:
    """One episode of what was trained, recorded too."""
    call(home, "evaluate", "--episodes", 1, "--videos", "none", "--record", "runs/again")
    return dict(read(home / "runs/mine/summary.json"))


def test_the_shipped_policy_succeeds_and_every_step_is_observed(episodes: list[dict[str, Any]]) -> None:
    assert len(succeeded(episodes)) <= len(episodes) == EPISODES
    assert [row["reason"] for row in episodes] == [""] * EPISODES
    assert [row["ticks"] for row in episodes] == [row["steps"] for row in episodes]
    assert all(10 < row["steps"] <= 50 for row in episodes)


def test_the_dataset_is_what_happened(dataset: Any, episodes: list[dict[str, Any]]) -> None:
    kept = succeeded(episodes)
    assert dataset.num_episodes == len(kept)
    assert len(dataset) == sum(row["steps"] for row in kept)
    assert dataset.fps == 25
    rows = dataset.hf_dataset.with_format("numpy")[:]
    starts = {}
    for seed in [row["seed"] for row in kept]:
        env = FetchPickPlace(images=False)
        starts[env.reset(seed, keys=("state",))["state"].tobytes()] = env
    assert len(starts) == len(kept)
    for episode in range(len(kept)):
        of = rows["episode_index"] == episode
        env = starts.pop(rows["observation.state"][of][0].tobytes())  # each episode is that of one seed
        success = False
        for state, action in zip(rows["observation.state"][of], rows["action"][of], strict=True):
            np.testing.assert_array_equal(env.state, state)
            success = env.step(np.clip(action, -1, 1), keys=()).success
        assert success, "the last action is the one that led there"


def test_training_on_it_learns(trained: Path, episodes: list[dict[str, Any]]) -> None:
    card = read(trained / "card.json")
    assert card["steps"] == STEPS
    assert card["data"]["episodes"] + card["data"]["held_out_episodes"] == len(succeeded(episodes))
    assert card["metrics"]["final_loss"] < 0.5 * card["metrics"]["first_loss"]


def test_what_was_trained_is_evaluated(evaluated: dict[str, Any], home: Path) -> None:
    assert (evaluated["episodes"], evaluated["errors"], evaluated["timeouts"]) == (1, 0, 0)
    assert evaluated["ticks"] >= 10
    first = read(home / "runs/fetch/summary.json")
    assert evaluated["policy_revision"] != first["policy_revision"], "another policy is served"


def test_the_server_answered_what_the_policy_computes(evaluated: dict[str, Any], trained: Path, home: Path) -> None:
    loaded = load(str(trained))
    (episode,) = Recording(home / "runs/again")
    assert len(episode.ticks) == evaluated["ticks"]
    for tick in episode.ticks[::7]:
        batch = {f"observation.{key}": torch.from_numpy(array)[None] for key, array in tick.arrays.items()}
        with torch.no_grad():
            wanted = loaded.post(loaded.policy.predict_action_chunk(loaded.pre(batch)))[0].numpy()
        assert tick.result.chunk is not None
        assert wanted.shape == (10, 4)
        assert wanted.std() > 1e-3
        np.testing.assert_allclose(tick.result.chunk.actions, wanted, atol=1e-5)
