"""The card beside a LeRobot checkpoint: what one must know to trust or repeat it."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from omni_loop.record.features import key_of


@dataclass(frozen=True, slots=True)
class Trained:
    """A finished run. ``losses``: of every step, in LeRobot's own units. ``inputs``: shapes by feature."""

    type: str
    losses: tuple[float, ...]
    held_out_loss: float | None
    episodes: int
    held_out_episodes: int
    rows: int
    parameters: int
    inputs: Mapping[str, tuple[int, ...]]
    spent: Mapping[str, float]

    def mean_loss(self, part: slice) -> float:
        chosen = self.losses[part]
        return round(sum(chosen) / len(chosen), 4)


def write_card(
    folder: Path, trained: Trained, recipe: Mapping[str, Any], info: Mapping[str, Any], name: str, data: str
) -> None:
    """Write ``card.json`` and ``README.md``; ``info`` is the dataset's, ``data`` its name."""
    tenth = max(1, len(trained.losses) // 10)
    metrics = {"first_loss": trained.mean_loss(slice(tenth)), "final_loss": trained.mean_loss(slice(-tenth, None))}
    if trained.held_out_loss is not None:
        metrics["held_out_loss"] = round(trained.held_out_loss, 4)
    card = {
        "part": name,
        "type": trained.type,
        "observation": {key_of(feature): list(shape) for feature, shape in trained.inputs.items()},
        "control_hz": info["fps"],
        "metrics": metrics,
        "data": {
            "name": data,
            "robot": info.get("robot_type"),
            "episodes": trained.episodes,
            "held_out_episodes": trained.held_out_episodes,
            "rows": trained.rows,
        },
        "seed": recipe["seed"],
        "steps": len(trained.losses),
        "parameters": trained.parameters,
        **trained.spent,
        "lerobot": metadata.version("lerobot"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "recipe": dict(recipe),
    }
    (folder / "card.json").write_text(json.dumps(card, indent=1) + "\n")
    (folder / "README.md").write_text(_text(card))


def _text(card: Mapping[str, Any]) -> str:
    observed = ", ".join(f"`{key}` {shape}" for key, shape in card["observation"].items())
    rows = "\n".join(f"| {name} | {value} |" for name, value in card["metrics"].items())
    data = card["data"]
    return f"""# {card["part"]}

LeRobot's {card["type"]}, {card["parameters"]:,} parameters, trained with lerobot {card["lerobot"]}.
Observation: {observed}, at {card["control_hz"]} Hz.
Data: `{data["name"]}` ({data["robot"]}): {data["episodes"]} episodes, {data["rows"]} rows; held out besides: \
{data["held_out_episodes"]} episodes.
{card["steps"]} steps; seed {card["seed"]}; {card["wall_minutes"]} minutes, of which {card["cpu_minutes"]} CPU minutes.

| metric | value |
|---|---|
{rows}

`first_loss` and `final_loss` are means over the first and the last tenth of the steps.

Made by `omni-loop train policy --from {data["name"]}` from this recipe:

```json
{json.dumps(card["recipe"], indent=1)}
```
"""
