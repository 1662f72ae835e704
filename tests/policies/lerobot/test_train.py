"""LeRobot's policies trained on a LeRobotDataset: a toy whose actions are a linear function of what is observed."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from typer.testing import CliRunner

pytest.importorskip("lerobot")

from omni_loop import registry
from omni_loop.cli.app import app
from omni_loop.errors import ConfigError, UnknownName, Unsupported
from omni_loop.training import lerobot_set
from omni_loop.training.demos import Demos
from omni_loop.training.rollouts import Wanted
from omni_loop.types import Array
from omni_loop_policies.lerobot.load import load
from omni_loop_policies.lerobot.train import LeRobotRecipe, train, train_from
from omni_loop_policies.lerobot.train_data import dataset_info
from omni_loop_policies.lerobot.train_rows import Rows

LENGTHS = (9, 6, 12, 7, 5)
TINY = {"dim_model": 32, "n_heads": 2, "dim_feedforward": 32, "n_encoder_layers": 1, "n_vae_encoder_layers": 1}


class ToyEnv:
    control_hz = 10.0


class ToySet:
    """Five episodes, the last of which failed."""

    kinds = ("expert",)
    env, prompt = "toy", "go on"

    def load(self, folder: Path) -> Mapping[str, Demos]:
        return {"train": Demos(folder / "train", self.kinds)}

    def observations(self, demos: Demos, rows: NDArray[np.int64]) -> Mapping[str, Array]:
        state = demos.state[rows]
        seen = {"state": state[:, :3], "environment_state": state[:, 3:]}
        return seen | ({"image": demos.frames[rows]} if len(demos.frames) else {})


def demos(folder: Path, images: bool = False) -> Demos:
    rng, n = np.random.default_rng(0), sum(LENGTHS)
    state = np.repeat(rng.normal(size=(len(LENGTHS), 5)), LENGTHS, axis=0) + 0.1 * rng.normal(size=(n, 5))
    state = state.astype(np.float32)
    label = (state @ rng.normal(size=(5, 2))).astype(np.float32)
    size = 64 if images else 0
    columns: dict[str, Any] = {
        "frames": rng.integers(0, 256, (n if images else 0, size, size, 3)).astype(np.uint8),
        "state": state,
        "points": np.zeros((n, 0, 2), np.float32),
        "action": label + 1,  # what noise made of it; not what is to be learned
        "label": label,
        "coverage": np.zeros(n, np.float32),
        "length": np.array(LENGTHS),
        "kind": np.zeros(len(LENGTHS), np.int64),
        "success": np.array([True] * 4 + [False]),
        "seed": np.arange(len(LENGTHS)),
    }
    folder.mkdir(parents=True)
    for name, column in columns.items():
        np.save(folder / f"{name}.npy", column)
    return Demos(folder, ToySet.kinds)


@pytest.fixture(autouse=True, scope="module")
def toy_env() -> Iterator[None]:
    with registry.registered(registry.ENVS, "toy", ToyEnv):
        yield


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, toy_env: None) -> Path:
    folder = tmp_path_factory.mktemp("lerobot")
    assert lerobot_set.write(ToySet(), demos(folder / "demos"), folder / "toy") == {
        "episodes": 4,
        "rows": sum(LENGTHS[:4]) - 4,
    }
    return folder / "toy"


def dataset(data: Path, deltas: Mapping[str, list[int]], episodes: list[int] | None = None) -> Any:
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    seconds = {name: [d / 10 for d in around] for name, around in deltas.items()}
    return LeRobotDataset("omni_loop/toy", root=data, episodes=episodes, delta_timestamps=seconds or None)


def recipe(**fields: Any) -> LeRobotRecipe:
    given = {"type": "act", "steps": 40, "batch": 8, "lr": 3e-3, "warmup": 4, "held_out": 0.25, "policy": TINY}
    return LeRobotRecipe.model_validate(given | fields)


def test_demonstrations_are_written_as_lerobot_reads_them(data: Path, tmp_path: Path) -> None:
    source = demos(tmp_path / "demos")
    written = dataset(data, {})
    assert (written.num_episodes, written.fps, written.meta.robot_type) == (4, 10, "toy")
    row = 0
    for episode in range(4):  # the failed one is left out, and of each the row after its last action
        for i in range(source.start[episode], source.start[episode] + LENGTHS[episode] - 1):
            item = written[row]
            np.testing.assert_array_equal(item["observation.state"], source.state[i, :3])
            np.testing.assert_array_equal(item["observation.environment_state"], source.state[i, 3:])
            np.testing.assert_array_equal(item["action"], source.label[i])
            assert item["task"] == "go on"
            row += 1
    assert row == len(written)


def test_what_cannot_be_written_is_refused(data: Path, tmp_path: Path) -> None:
    source = demos(tmp_path / "demos")
    with pytest.raises(ConfigError, match="exists"):
        lerobot_set.write(ToySet(), source, data)
    with pytest.raises(Unsupported, match="does not say what its env gave"):
        lerobot_set.write(object(), source, tmp_path / "out")  # type: ignore[arg-type]
    np.save(tmp_path / "demos" / "success.npy", np.zeros(len(LENGTHS), bool))
    with pytest.raises(ConfigError, match="nothing to learn"):
        lerobot_set.write(ToySet(), Demos(tmp_path / "demos", ToySet.kinds), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("episodes", [None, [1, 3]])
@pytest.mark.parametrize("deltas", [{"action": [0, 1, 2, 3]}, {"action": [-1, 0, 1], "observation.state": [-1, 0]}, {}])
def test_rows_in_memory_are_the_samples_that_lerobot_gives(
    data: Path, deltas: dict[str, list[int]], episodes: list[int] | None
) -> None:
    theirs = dataset(data, deltas, episodes)
    ours, rows = Rows(theirs, deltas), list(range(len(theirs)))[::-1]
    assert len(ours) == len(theirs)
    want, got = torch.utils.data.default_collate([theirs[i] for i in rows]), ours.__getitems__(rows)
    assert want.keys() == got.keys()
    for name in want:
        if name == "task":
            assert got[name] == want[name]
        else:
            assert got[name].dtype == want[name].dtype, name
            assert torch.equal(got[name], want[name]), name


@pytest.fixture(scope="module")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "toy-act"
    done = train(data, recipe(), folder)
    assert len(done.losses) == 40
    assert np.mean(done.losses[-4:]) < 0.5 * np.mean(done.losses[:4]), done.losses
    assert done.held_out_loss is not None
    assert (done.episodes, done.held_out_episodes) == (3, 1)
    return folder


def test_a_checkpoint_is_lerobots_own_and_acts_as_it_was_taught(trained: Path, data: Path) -> None:
    loaded = load(str(trained))
    assert (loaded.horizon, [f.key for f in loaded.described.inputs]) == (10, ["state", "environment_state"])
    errors, sizes = [], []
    rows = dataset(data, {})
    for i in range(len(rows)):
        names = ("observation.state", "observation.environment_state")
        batch = loaded.pre({name: rows[i][name][None] for name in names})
        action = loaded.post(loaded.policy.predict_action_chunk(batch))[0, 0]
        errors.append(float((action - rows[i]["action"]).abs().mean()))
        sizes.append(float(rows[i]["action"].abs().mean()))
    assert np.mean(errors) < 0.5 * np.mean(sizes), "better than doing nothing"


def test_a_card_says_what_was_done_and_nothing_names_this_machine(trained: Path, data: Path) -> None:
    card = json.loads((trained / "card.json").read_text())
    assert card["observation"] == {"state": [3], "environment_state": [2]}
    assert card["data"]["rows"] == sum(LENGTHS[:3]) - 3
    assert card["metrics"]["final_loss"] < card["metrics"]["first_loss"]
    assert (card["steps"], card["control_hz"], card["recipe"]["policy"]) == (40, 10, TINY)
    for file in trained.iterdir():
        if file.suffix in (".json", ".md"):
            assert str(data.parent) not in file.read_text(), file.name
            assert str(trained.parent) not in file.read_text(), file.name


def test_lerobots_own_script_comes_to_the_same_weights(data: Path, tmp_path: Path) -> None:
    from lerobot.scripts import lerobot_train
    from safetensors.torch import load_file

    from omni_loop_policies.lerobot import train as ours

    steps = recipe(steps=3, held_out=0.0)
    train(data, steps, tmp_path / "ours")
    config = ours._configure(data, dataset_info(data), steps)
    config.output_dir = tmp_path / "theirs"
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        lerobot_train.train(config)
    finally:  # the script takes logging over
        root.handlers[:] = handlers
        root.setLevel(level)
    theirs = load_file(tmp_path / "theirs/checkpoints/000003/pretrained_model/model.safetensors")
    mine = load_file(tmp_path / "ours/model.safetensors")
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_the_same_seed_comes_to_the_same_weights_and_another_to_others(data: Path, tmp_path: Path) -> None:
    weights = {}
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        train(data, recipe(steps=2, seed=seed), tmp_path / name)
        weights[name] = (tmp_path / name / "model.safetensors").read_bytes()
    assert weights["a"] == weights["b"] != weights["c"]


def test_diffusion_trains_and_loads(data: Path, tmp_path: Path) -> None:
    tiny = {"horizon": 4, "n_action_steps": 2, "down_dims": [16, 32], "diffusion_step_embed_dim": 16, "n_groups": 4}
    done = train(data, recipe(type="diffusion", steps=12, policy=tiny), tmp_path / "d")
    assert np.mean(done.losses[-3:]) < np.mean(done.losses[:3])
    assert load(str(tmp_path / "d")).described.type == "diffusion"


def test_images_are_learned_from(tmp_path: Path) -> None:
    source = demos(tmp_path / "demos", images=True)
    lerobot_set.write(ToySet(), source, tmp_path / "seen")
    done = train(tmp_path / "seen", recipe(steps=2, batch=2, keys=("image", "state")), tmp_path / "out")
    assert {name: shape for name, shape in done.inputs.items() if "image" in name} == {"observation.image": (3, 64, 64)}
    loaded = load(str(tmp_path / "out"))
    assert [feature.key for feature in loaded.described.inputs] == ["image", "state"]


def test_mistakes_are_named(data: Path, trained: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no meta/info\.json"):
        train(tmp_path, recipe(), tmp_path / "out")
    (tmp_path / "old" / "meta").mkdir(parents=True)
    (tmp_path / "old" / "meta" / "info.json").write_text('{"codebase_version": "v2.1"}')
    with pytest.raises(ConfigError, match=r"LeRobotDataset v2\.1; wanted v3"):
        train(tmp_path / "old", recipe(), tmp_path / "out")
    with pytest.raises(ConfigError, match="exists"):
        train(data, recipe(), trained)
    with pytest.raises(ConfigError, match=r"no 'dim_modle'. Did you mean 'dim_model'"):
        train(data, recipe(policy={"dim_modle": 8}), tmp_path / "out")
    with pytest.raises(ConfigError, match=r"no observation 'stat'. Did you mean 'state'"):
        train(data, recipe(keys=("stat",)), tmp_path / "out")
    with pytest.raises(ConfigError, match="at least one image or the environment state"):
        train(data, recipe(keys=("state",)), tmp_path / "out")
    with pytest.raises(ConfigError, match="upper bound for the number of action steps"):
        train(data, recipe(policy={"chunk_size": 2}), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_command_trains_from_a_recipe_and_its_options_win(data: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(f"type: act\nsteps: 50\nbatch: 4\npolicy: {json.dumps(TINY)}\n")
    arguments = ["train", "policy", "--from", str(data), "--recipe", str(file), "--out", str(tmp_path), "--seed", "3"]
    result = CliRunner().invoke(app, [*arguments, "--steps", "2", "--name", "mine"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "wrote" in result.output
    card = json.loads((tmp_path / "mine" / "card.json").read_text())
    assert (card["steps"], card["seed"], card["part"]) == (2, 3, "mine")


def test_the_command_writes_demonstrations(tmp_path: Path) -> None:
    demos(tmp_path / "set" / "train")
    arguments = ["demos", "toy", "--data", str(tmp_path / "set"), "--out", str(tmp_path / "out")]
    with registry.registered(registry.DEMOS, "toy", ToySet()):
        result = CliRunner().invoke(app, arguments, catch_exceptions=False, env={"COLUMNS": "200"})
        assert result.exit_code == 0, result.output
        assert f"4 episodes, {sum(LENGTHS[:4]) - 4} rows" in result.output
        assert dataset_info(tmp_path / "out")["total_frames"] == sum(LENGTHS[:4]) - 4
        again = CliRunner().invoke(app, arguments)
        assert isinstance(again.exception, ConfigError)
        other = CliRunner().invoke(app, [*arguments[:-1], str(tmp_path / "other"), "--split", "trian"])
        assert isinstance(other.exception, UnknownName)
        assert "Did you mean 'train'" in str(other.exception)


def test_the_command_refuses_what_does_not_go_together(data: Path, tmp_path: Path) -> None:
    def refused(*arguments: str) -> str:
        result = CliRunner().invoke(app, ["train", *arguments], env={"COLUMNS": "200"})
        assert result.exit_code == 2, result.output
        return result.output

    assert "--steps goes with --from" in refused("policy", "--steps", "3")
    assert "--from takes the place of --data" in refused("world", "--from", str(data))
    with pytest.raises(UnknownName, match=r"'atc' is trained here. Did you mean 'act'"):
        train_from(data, tmp_path, Wanted(type="atc"), print)
    file = tmp_path / "mine.yaml"
    file.write_text("type: act\nsteps: 1\n")
    with pytest.raises(ConfigError, match="the recipe says type act"):
        train_from(data, tmp_path, Wanted(type="diffusion", recipe=file), print)


def test_the_shipped_recipes_validate() -> None:
    from omni_loop.config import load as load_config

    assert {load_config(LeRobotRecipe, f"lerobot-{kind}", "train").type for kind in ("act", "diffusion")} == {
        "act",
        "diffusion",
    }
