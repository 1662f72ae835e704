"""``omni-loop train`` with a trainer of one weight."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import nn

from omni_loop import registry
from omni_loop.errors import ConfigError, UnknownName
from omni_loop.training import command
from omni_loop.training.checkpoint import load_weights
from omni_loop.training.demos import Demos
from omni_loop.training.recipe import Recipe, TrainContext, Trained, Trainer, begin

COLUMNS = ("frames", "state", "points", "action", "label", "coverage", "length", "kind", "success", "seed")


class ToyRecipe(Recipe):
    gain: float = 1.0


def train(recipe: ToyRecipe, context: TrainContext) -> Trained:
    weight = recipe.gain * torch.rand(1, 1, generator=begin(recipe))
    context.log(f"{len(context.train.length)} episodes")
    return Trained("toy", {"width": 1}, {"weight": weight}, {"loss": 0.5}, "state", "all episodes")


class ToyDemos:
    kinds = ("expert",)

    def __init__(self) -> None:
        self.made = 0

    def generate(
        self, folder: Path, workers: int = 2, progress: Callable[[str, int, int], None] | None = None
    ) -> Mapping[str, Path]:
        self.made += 1
        for split in ("train", "test"):
            (folder / split).mkdir(parents=True)
            for name in COLUMNS:
                np.save(folder / split / f"{name}.npy", np.ones(2, np.int64))
            if progress is not None:
                progress(split, 1, 1)
        return {split: folder / split for split in ("train", "test")}

    def load(self, folder: Path) -> Mapping[str, Demos]:
        return {split: Demos(folder / split, self.kinds) for split in ("train", "test")}


@pytest.fixture
def demos() -> Iterator[ToyDemos]:
    made = ToyDemos()
    trainer = Trainer(ToyRecipe, train)
    with registry.registered(registry.DEMOS, "toy", made), registry.registered(registry.TRAINERS, "toy", trainer):
        yield made


def run(tmp_path: Path, seed: int | None = None, data: str = "data") -> Path:
    recipe = tmp_path / "toy.yaml"
    recipe.write_text("steps: 1\nbatch: 1\nlr: 0.1\ngain: 2.0\ndemos: toy\nthreads: 1\n")
    return command.train(
        "toy",
        recipe=recipe,
        data=tmp_path / data,
        out=tmp_path / "out",
        seed=seed,
        workers=1,
        console=Console(quiet=True),
    )


def test_demonstrations_are_made_once_and_the_checkpoint_tells_its_story(demos: ToyDemos, tmp_path: Path) -> None:
    folder = run(tmp_path)
    first = load_weights(folder, nn.Linear(1, 1, bias=False)).weight.item()
    card = json.loads((folder / "card.json").read_text())
    assert card["metrics"] == {"loss": 0.5}
    assert card["recipe"]["gain"] == 2.0
    assert card["data"] == {"demos": "toy", "used": "all episodes", "train_episodes": 2, "test_episodes": 2}
    assert card["sha256"] == hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    assert (card["observation"], card["seed"], card["parameters"]) == ("state", 0, 1)
    assert "| loss | 0.5 |" in (folder / "README.md").read_text()
    assert load_weights(run(tmp_path), nn.Linear(1, 1, bias=False)).weight.item() == first
    assert load_weights(run(tmp_path, seed=1), nn.Linear(1, 1, bias=False)).weight.item() != first
    assert demos.made == 1
    assert not list(tmp_path.glob(".*"))


def test_an_interrupted_generation_leaves_no_set_behind(
    demos: ToyDemos, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = demos.generate

    def half(folder: Path, *rest: object) -> Mapping[str, Path]:
        (folder / "train").mkdir(parents=True)
        raise KeyboardInterrupt

    monkeypatch.setattr(demos, "generate", half)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path)
    assert not (tmp_path / "data").exists()
    monkeypatch.setattr(demos, "generate", whole)
    run(tmp_path)
    assert (tmp_path / "data" / "test").is_dir()


def test_an_incomplete_set_is_refused_by_what_is_missing(demos: ToyDemos, tmp_path: Path) -> None:
    run(tmp_path)
    (tmp_path / "data" / "test" / "coverage.npy").unlink()
    with pytest.raises(ConfigError, match="coverage missing"):
        run(tmp_path)


def test_a_file_is_no_folder_of_demonstrations(demos: ToyDemos, tmp_path: Path) -> None:
    (tmp_path / "data").write_text("x")
    with pytest.raises(ConfigError, match=r"--data: .*data is a file"):
        run(tmp_path)
    assert demos.made == 0


def test_all_parts_come_in_the_order_they_need() -> None:
    assert command.parts("all")[:4] == ["codec", "world", "context", "policy"]
    assert command.parts("world") == ["world"]
    with pytest.raises(UnknownName, match="Did you mean 'world'"):
        command.parts("wold")
