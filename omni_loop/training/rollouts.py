"""The work of ``omni-loop train policy --from`` and ``omni-loop demos``: datasets of rollouts in LeRobot's format."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rich.console import Console
from rich.progress import Progress

from .. import registry
from ..errors import ConfigError, UnknownName, nearest
from .command import demo_splits
from .demos import DemoSet
from .lerobot_set import write


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the command line says of a policy to be trained; None and empty: as the recipe says."""

    type: str | None = None
    recipe: Path | None = None
    name: str | None = None
    steps: int | None = None
    seed: int | None = None
    threads: int | None = None
    keys: tuple[str, ...] = ()

    def only_with_rollouts(self) -> str | None:
        """The first option given that means nothing without a dataset of rollouts."""
        given = {"type": self.type, "name": self.name, "steps": self.steps, "threads": self.threads, "keys": self.keys}
        return next((option for option, value in given.items() if value), None)


class RolloutTrainer(Protocol):
    """What a plug-in registers to train policies on a dataset of rollouts; returns the checkpoint's folder."""

    def __call__(self, data: Path, out: Path, wanted: Wanted, log: Callable[[str], None]) -> Path: ...


def train_from(data: Path, out: Path, wanted: Wanted, console: Console) -> Path:
    """Train on the LeRobotDataset in ``data`` and write a checkpoint to a folder in ``out``, which is returned."""
    trainer: RolloutTrainer = registry.load(registry.ROLLOUT_TRAINERS, "lerobot")
    began = time.monotonic()

    def log(text: str) -> None:
        minutes = (time.monotonic() - began) / 60
        console.print(f"policy {minutes:5.1f} min  {text}", highlight=False, markup=False)

    folder = trainer(data, out, wanted, log)
    console.print(f"policy: wrote {folder}", highlight=False)
    return folder


def write_demos(name: str, data: Path | None, split: str, out: Path, workers: int, console: Console) -> dict[str, int]:
    """Write ``split`` of the registered set ``name`` to ``out``; returns the counts of episodes and rows.

    Raises:
        UnknownName: no such set or split. ConfigError: ``out`` exists.
    """
    if out.exists():
        raise ConfigError(f"--out: {out} exists; name a folder that can be made")
    demo_set: DemoSet = registry.load(registry.DEMOS, name)
    splits = demo_splits(name, data, workers, console)
    if split not in splits:
        raise UnknownName(f"demonstrations {name!r} have no split {split!r}.{nearest(split, splits)}")
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task(f"writing {out.name}", total=None)
        counts = write(demo_set, splits[split], out, lambda done, total: bar.update(task, completed=done, total=total))
    console.print(f"demonstrations {name}/{split}: wrote {out}, {counts['episodes']} episodes, {counts['rows']} rows")
    return counts
