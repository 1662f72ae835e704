"""What must not be trained on is refused before anything is, and what fails leaves nothing behind."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("lerobot")

from omni_loop.errors import ConfigError
from omni_loop.training.rollouts import Wanted
from omni_loop_policies.lerobot.train import LeRobotRecipe, train, train_from
from omni_loop_policies.lerobot.train_data import local_only
from omni_loop_policies.lerobot.train_folder import made_beside

TINY = {"dim_model": 32, "n_heads": 2, "dim_feedforward": 32, "n_encoder_layers": 1, "n_vae_encoder_layers": 1}
SHAPES = {"observation.state": (4,), "observation.environment_state": (3,), "action": (2,)}
ROWS = 8


def recipe(**fields: Any) -> LeRobotRecipe:
    return LeRobotRecipe.model_validate({"type": "act", "steps": 3, "batch": 4, "policy": TINY} | fields)


def written(folder: Path, spoil: str = "", shapes: dict[str, tuple[int, ...]] = SHAPES) -> Path:
    """Two episodes; the feature ``spoil`` has one value that is not a number, in row 11."""
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    from omni_loop.record.quiet import quiet

    features = {name: {"dtype": "float32", "shape": shape, "names": None} for name, shape in shapes.items()}
    draw = np.random.default_rng(0)
    with quiet():
        made = LeRobotDataset.create("toy/set", fps=10, features=features, root=folder, use_videos=False)
        for episode in range(2):
            for step in range(ROWS):
                row = {name: draw.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
                if spoil and (episode, step) == (1, 3):
                    row[spoil][1] = np.nan
                made.add_frame({**row, "task": "go on"})
            made.save_episode()
        made.finalize()
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("damaged") / "whole")


def edited(name: str, change: Callable[[Any], Any]) -> Callable[[Path], None]:
    def edit(data: Path) -> None:
        file = data / "meta" / name
        content = json.loads(file.read_text())
        change(content)
        file.write_text(json.dumps(content))

    return edit


def info(change: Callable[[Any], Any]) -> Callable[[Path], None]:
    return edited("info.json", change)


def cut(data: Path) -> None:
    (file,) = data.glob("data/*/*.parquet")
    file.write_bytes(file.read_bytes()[:200])


EXTRA = {"observation.foo": {"dtype": "float32", "shape": [2], "names": None}}
DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "no episodes": (info(lambda j: j.update(total_episodes=0)), "total_episodes: .* greater than or equal to 1"),
    "a word": (info(lambda j: j.update(total_episodes="x")), "total_episodes: .* valid integer"),
    "more episodes": (info(lambda j: j.update(total_episodes=3)), "meta/episodes has 2 episodes, .* says 3"),
    "more rows": (info(lambda j: j.update(total_frames=99)), "its data has 16 rows, .* says 99 rows"),
    "no features": (info(lambda j: j.pop("features")), "features: Field required"),
    "a width": (info(lambda j: j["features"]["action"].update(shape=[9])), r"'action' has rows of \[2\] .* says 9"),
    "a feature": (info(lambda j: j["features"].update(EXTRA)), "no column for the feature 'observation.foo'"),
    "a path": (info(lambda j: j.update(data_path="{nothing}")), "data_path: KeyError: 'nothing'"),
    "no rows": (lambda data: shutil.rmtree(data / "data"), r"there is no .*file-000\.parquet"),
    "no episode table": (lambda data: shutil.rmtree(data / "meta/episodes"), "meta/episodes has 0 episodes"),
    "no tasks": (lambda data: (data / "meta/tasks.parquet").unlink(), r"it has no meta/tasks\.parquet"),
    "cut": (cut, "cannot be read"),
    "no statistics": (lambda data: (data / "meta/stats.json").unlink(), r"it has no meta/stats\.json"),
    "no mean": (edited("stats.json", lambda j: j["action"].pop("mean")), "action.mean is missing"),
    "NaN": (edited("stats.json", lambda j: j["action"].update(std=[1.0, float("nan")])), "action.std is not finite"),
    "a shape": (edited("stats.json", lambda j: j["action"].update(std=[1.0] * 3)), "action.std has shape"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_dataset_is_refused_by_what_is_wrong(whole: Path, tmp_path: Path, damage: str) -> None:
    spoil, wanted = DAMAGE[damage]
    shutil.copytree(whole, tmp_path / "set")
    spoil(tmp_path / "set")
    with pytest.raises(ConfigError, match=wanted):
        train(tmp_path / "set", recipe(), tmp_path / "out" / "mine")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("feature", ["observation.state", "action"])
def test_a_value_that_is_not_finite_is_found(tmp_path: Path, feature: str) -> None:
    data = written(tmp_path / "set", spoil=feature)
    with pytest.raises(ConfigError, match=f"'{feature}' is not finite in row 11"):
        train(data, recipe(), tmp_path / "out" / "mine")
    assert not (tmp_path / "out").exists()


def test_only_what_is_read_need_be_finite_and_a_vector(tmp_path: Path) -> None:
    shapes = SHAPES | {"observation.odd": (2, 2)}
    data = written(tmp_path / "set", shapes=shapes)
    with pytest.raises(ConfigError, match=r"vectors and images, not observation\.odd \[2, 2\]: leave it out"):
        train(data, recipe(), tmp_path / "out")
    assert np.isfinite(train(data, recipe(keys=("state", "environment_state")), tmp_path / "out").losses).all()
    data = written(tmp_path / "other", spoil="observation.unread", shapes=SHAPES | {"observation.unread": (2,)})
    with pytest.raises(ConfigError, match=r"'observation\.unread' is not finite"):
        train(data, recipe(), tmp_path / "second")
    assert np.isfinite(train(data, recipe(keys=("state", "environment_state")), tmp_path / "second").losses).all()


def test_a_loss_that_is_not_finite_ends_it_and_leaves_nothing(whole: Path, tmp_path: Path) -> None:
    wild = recipe(steps=20, lr=1e20, clip=0, warmup=0)
    with pytest.raises(ConfigError, match=r"the loss of step \d+ is (nan|inf)"):
        train(whole, wild, tmp_path / "out" / "mine")
    assert list((tmp_path / "out").iterdir()) == []


def test_nothing_is_asked_of_a_hub() -> None:
    from huggingface_hub import HfApi, constants

    before = constants.HF_HUB_OFFLINE
    with pytest.raises(ConfigError, match="cannot read set: OfflineModeIsEnabled"), local_only(Path("set")):
        HfApi().list_repo_refs("omni_loop/set", repo_type="dataset")
    assert before == constants.HF_HUB_OFFLINE


def test_a_folder_is_whole_or_not_there(tmp_path: Path) -> None:
    folder = tmp_path / "in" / "mine"
    stale = tmp_path / "in" / ".mine.partial"
    stale.mkdir(parents=True)
    (stale / "half").touch()
    with made_beside(folder) as partial:
        (partial / "all").touch()
        assert not folder.exists()
    assert [p.name for p in folder.iterdir()] == ["all"]
    other = tmp_path / "in" / "other"
    with pytest.raises(RuntimeError, match="no"), made_beside(other):
        raise RuntimeError("no")
    with pytest.raises(SystemExit), made_beside(other):
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert [p.name for p in folder.parent.iterdir()] == ["mine"]


@pytest.mark.parametrize("name", ["../../evil", "/evil", "..", ".", "", ".mine", "a/b", "a\\b", "a\0b", "-a", "a\n"])
def test_a_name_leads_nowhere_else(whole: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="no plain name"):
        train_from(whole, tmp_path / "out", Wanted(name=name, steps=1), print)
    assert not (tmp_path / "out").exists()
