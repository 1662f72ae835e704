"""What a trainer is told and what it returns."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from pydantic import BaseModel, ConfigDict

from .demos import Demos


class Recipe(BaseModel):
    """Fields every recipe has; a trainer's own recipe adds to them. Unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    seed: int = 0
    threads: int = 2
    steps: int
    batch: int
    lr: float
    demos: str  # name of the demonstration set in the registry


R = TypeVar("R", bound=Recipe)


@dataclass
class TrainContext:
    """Everything a trainer may use besides its recipe."""

    train: Demos
    test: Demos
    checkpoints: Path  # folder with one folder per trained part; earlier parts are read from here
    log: Callable[[str], None]
    _began: float = field(default_factory=time.monotonic)
    _cpu: float = field(default_factory=time.process_time)

    def spent(self) -> dict[str, float]:
        """Wall and CPU minutes since the trainer began."""
        return {
            "wall_minutes": round((time.monotonic() - self._began) / 60, 1),
            "cpu_minutes": round((time.process_time() - self._cpu) / 60, 1),
        }


@dataclass(frozen=True)
class Trained:
    """A finished part: what :func:`omni_loop.training.checkpoint.save` writes."""

    part: str
    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    metrics: dict[str, Any]
    observation: str  # which observation the figures belong to
    data: str


@dataclass(frozen=True)
class Trainer(Generic[R]):
    """What a plug-in registers to train a part: the model of its recipe, and how.

    ``spread``: by how much a metric of the card may be worse with another seed; negative where higher is better
    (-0.5: lower by 0.5), positive where lower is. ``omni-loop bench recipes`` holds new parts to it.
    """

    recipe: type[R]
    train: Callable[[R, TrainContext], Trained]
    spread: Mapping[str, float] = field(default_factory=dict)


def begin(recipe: Recipe) -> torch.Generator:
    """Set threads and torch's own seed; returns a generator of the same seed for draws that shall stand apart."""
    torch.set_num_threads(recipe.threads)
    torch.manual_seed(recipe.seed)
    return torch.Generator().manual_seed(recipe.seed)
