"""The work of ``omni-loop train``: recipe, demonstrations, trainer, checkpoint, card."""

from __future__ import annotations

import json
import platform
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress, TaskID

from .. import config, registry
from ..errors import ConfigError, UnknownName, nearest
from .checkpoint import save
from .demos import Demos, DemoSet
from .recipe import Recipe, TrainContext, Trained, Trainer

_ORDER = ("codec", "world", "context", "policy")  # a later part reads the earlier ones' checkpoints


def parts(part: str) -> list[str]:
    """``part``, or for ``all`` every registered one in the order they need."""
    known = registry.names(registry.TRAINERS)
    if part == "all":
        return sorted(known, key=lambda name: (_ORDER.index(name) if name in _ORDER else len(_ORDER), name))
    if part not in known:
        raise UnknownName(f"no part is called {part!r}.{nearest(part, [*known, 'all'])}")
    return [part]


def check(names: Sequence[str], recipe: Path | None, data: Path | None) -> None:
    """See that trainers and recipes are there and valid, and that ``data`` can be a folder, before anything is made.

    Raises:
        UnknownName, MissingExtra: a trainer that cannot be had.
        ConfigError: a recipe that does not validate, or a file for ``data``.
    """
    for name in names:
        trainer: Trainer[Any] = registry.load(registry.TRAINERS, name)
        config.load(trainer.recipe, recipe or name, "train")
    if data is not None:
        _refuse_file(data)


def _refuse_file(data: Path) -> None:
    if data.exists() and not data.is_dir():
        raise ConfigError(f"--data: {data} is a file; wanted a folder with demonstrations, or none to make it")


def train(
    part: str, *, recipe: Path | None, data: Path | None, out: Path, seed: int | None, workers: int, console: Console
) -> Path:
    """Train one part and write ``out/<part>``; returns that folder."""
    trainer: Trainer[Any] = registry.load(registry.TRAINERS, part)
    chosen: Recipe = config.load(trainer.recipe, recipe or part, "train")
    if seed is not None:
        chosen = chosen.model_copy(update={"seed": seed})
    context = TrainContext(*demonstrations(chosen.demos, data, workers, console), out, _logger(part, console))
    trained = trainer.train(chosen, context)
    made = card(trained, chosen, context, trainer.spread)
    folder = out / trained.part
    save(folder, trained.config, trained.tensors, made, card_text(made))
    console.print(f"{part}: wrote {folder}", highlight=False)
    return folder


def demonstrations(name: str, data: Path | None, workers: int, console: Console) -> tuple[Demos, Demos]:
    """Training and test demonstrations; a folder that does not exist is made by the registered set's experts."""
    splits = demo_splits(name, data, workers, console)
    return splits["train"], splits["test"]


def demo_splits(name: str, data: Path | None, workers: int, console: Console) -> Mapping[str, Demos]:
    """All splits of a registered set, from ``data`` or ``data/NAME``, made there when that does not exist."""
    demos: DemoSet = registry.load(registry.DEMOS, name)
    folder = data or Path("data") / name
    _refuse_file(folder)
    if not folder.exists():
        _generate(demos, name, folder, workers, console)
    try:
        return demos.load(folder)
    except FileNotFoundError as e:
        raise ConfigError(f"{e}; remove the folder to make it anew") from None


def _generate(demos: DemoSet, name: str, folder: Path, workers: int, console: Console) -> None:
    # Made beside and renamed when complete: an interrupted run leaves no half of a set behind.
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.parent.mkdir(parents=True, exist_ok=True)
    with Progress(console=console, transient=True) as bar:
        tasks: dict[str, TaskID] = {}

        def progress(split: str, made: int, total: int) -> None:
            if split not in tasks:
                tasks[split] = bar.add_task(f"demonstrations {name}/{split}", total=total)
            bar.update(tasks[split], completed=made)

        demos.generate(partial, workers, progress)
    partial.rename(folder)
    console.print(f"demonstrations {name}: made {folder}", highlight=False)


def card(
    trained: Trained, recipe: Recipe, context: TrainContext, spread: Mapping[str, float] | None = None
) -> dict[str, Any]:
    """What one must know to trust or repeat a checkpoint."""
    return {
        "part": trained.part,
        "observation": trained.observation,
        "metrics": trained.metrics,
        "spread": dict(spread or {}),
        "data": {"demos": recipe.demos, "used": trained.data, **_sizes(context)},
        "seed": recipe.seed,
        "parameters": sum(t.numel() for t in trained.tensors.values() if t.is_floating_point()),
        **context.spent(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "recipe": recipe.model_dump(mode="json"),
    }


def _sizes(context: TrainContext) -> dict[str, int]:
    sets = {"train": context.train, "test": context.test}
    return {f"{name}_episodes": len(demos.length) for name, demos in sets.items()}


def card_text(made: dict[str, Any]) -> str:
    """The card as Markdown."""
    rows = "\n".join(f"| {name} | {value} | {_worse(made, name)} |" for name, value in made["metrics"].items())
    return f"""# {made["part"]}

Observation: {made["observation"]}.
Data: {made["data"]["used"]} ({made["data"]["demos"]}: {made["data"]["train_episodes"]} training and \
{made["data"]["test_episodes"]} test episodes, seeds disjoint).
{made["parameters"]:,} parameters; seed {made["seed"]}; {made["wall_minutes"]} minutes, of which \
{made["cpu_minutes"]} CPU minutes.

| metric, on the test episodes | value | worse with another seed by at most |
|---|---|---|
{rows}

Made by `omni-loop train {made["part"]}` from this recipe:

```json
{json.dumps(made["recipe"], indent=1)}
```
"""


def _worse(made: dict[str, Any], name: str) -> str:
    spread = made.get("spread", {}).get(name)
    return "" if spread is None else f"{spread:+g}"


def _logger(part: str, console: Console) -> Callable[[str], None]:
    began = time.monotonic()

    def log(text: str) -> None:
        console.print(f"{part} {(time.monotonic() - began) / 60:5.1f} min  {text}", highlight=False, markup=False)

    return log
