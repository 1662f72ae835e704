"""The work of ``omni-loop train``: recipe, demonstrations, trainer, checkpoint, card."""

from __future__ import annotations

import json
import platform
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from .. import config, registry
from ..errors import ConfigError, UnknownName, nearest
from .checkpoint import save
from .demos import Demos, DemoSet
from .recipe import Recipe, TrainContext, Trained, Trainer

SPLITS = ("train", "test")
_ORDER = ("codec", "world", "context", "policy")  # a later part reads the earlier ones' checkpoints


def parts(part: str) -> list[str]:
    """``part``, or for ``all`` every registered one in the order they need."""
    known = registry.names(registry.TRAINERS)
    if part == "all":
        return sorted(known, key=lambda name: (_ORDER.index(name) if name in _ORDER else len(_ORDER), name))
    if part not in known:
        raise UnknownName(f"no part is called {part!r}.{nearest(part, [*known, 'all'])}")
    return [part]


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
    made = card(trained, chosen, context)
    folder = out / part
    save(folder, trained.config, trained.tensors, made, card_text(made))
    console.print(f"{part}: wrote {folder}", highlight=False)
    return folder


def demonstrations(name: str, data: Path | None, workers: int, console: Console) -> tuple[Demos, Demos]:
    """Training and test demonstrations; what is missing is made by the registered set's experts."""
    made: DemoSet = registry.load(registry.DEMOS, name)
    root = data or Path("data") / name
    for split in SPLITS:
        folder = root / split
        if not folder.exists():
            # Made beside and renamed when complete: an interrupted run leaves no half of a set behind.
            partial = root / f".{split}.partial"
            with Progress(console=console, transient=True) as bar:
                task = bar.add_task(f"demonstrations {name}/{split}", total=None)
                made.generate(
                    partial, split, workers, lambda done, total: bar.update(task, completed=done, total=total)
                )
            partial.rename(folder)
            console.print(f"demonstrations: made {folder}", highlight=False)
    try:
        train, test = (Demos(root / split, made.kinds) for split in SPLITS)
    except FileNotFoundError as e:
        raise ConfigError(str(e)) from None
    return train, test


def card(trained: Trained, recipe: Recipe, context: TrainContext) -> dict[str, Any]:
    """What one must know to trust or repeat a checkpoint."""
    return {
        "part": trained.part,
        "observation": trained.observation,
        "metrics": trained.metrics,
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
    rows = "\n".join(f"| {name} | {value} |" for name, value in made["metrics"].items())
    return f"""# {made["part"]}

Observation: {made["observation"]}.
Data: {made["data"]["used"]} ({made["data"]["demos"]}: {made["data"]["train_episodes"]} training and \
{made["data"]["test_episodes"]} test episodes, seeds disjoint).
{made["parameters"]:,} parameters; seed {made["seed"]}; {made["wall_minutes"]} minutes, of which \
{made["cpu_minutes"]} CPU minutes.

| metric, on the test episodes | value |
|---|---|
{rows}

Made by `omni-loop train {made["part"]}` from this recipe:

```json
{json.dumps(made["recipe"], indent=1)}
```
"""


def _logger(part: str, console: Console) -> Any:
    began = time.monotonic()

    def log(text: str) -> None:
        console.print(f"{part} {(time.monotonic() - began) / 60:5.1f} min  {text}", highlight=False, markup=False)

    return log
