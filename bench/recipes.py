"""``omni-loop bench recipes``: parts trained anew from their recipes, held against the shipped ones.

Train them with ``omni-loop train all --out DIR --seed N`` and name the folder with ``--checkpoints DIR``. A row's
bar is the spread that the part's trainer states: by how much another seed's figure may be worse. Figures on
held-out episodes are read from the cards, where training writes them; success is measured here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from omni_loop.errors import CheckpointError, ConfigError
from omni_loop.training.checkpoint import load_card
from omni_loop.training.recipe import Trainer
from omni_loop_policies import train as policy
from omni_loop_policies.stages import SHIPPED as SHIPPED_POLICIES
from omni_loop_worlds.stages.shared import SHIPPED as SHIPPED_WORLDS
from omni_loop_worlds.train import codec, context, world

from .policy import Closed
from .rows import Bar, Bench, Measured, Settings

_SUCCESS_SPREAD = -0.08  # of 100 episodes: two runs of one policy on other seeds differ by as much


class Retrained:
    """The parts in ``--checkpoints`` beside the shipped ones."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def figure(self, part: str, metric: str) -> Measured:
        """``metric`` of the part's new card, and of the shipped card."""
        return Measured(_metric(self._new / part, metric), _metric(_shipped(part), metric))

    def success(self) -> Measured:
        """Success rate from the image of the new parts, and of the shipped ones as their card says."""
        shipped = load_card(_shipped("act"))["closed_loop"]["image"]
        return Measured(Closed(self._settings).rate("pusht-image").ours, shipped)

    @property
    def _new(self) -> Path:
        if not self._settings.checkpoints:
            raise ConfigError(
                "bench recipes holds new parts against the shipped ones: train them with "
                "'omni-loop train all --out DIR --seed 1', then say --checkpoints DIR"
            )
        return Path(self._settings.checkpoints)


def _shipped(part: str) -> Path:
    return (SHIPPED_POLICIES if part == "act" else SHIPPED_WORLDS) / part


def _metric(folder: Path, metric: str) -> float:
    metrics = load_card(folder).get("metrics", {})
    if metric not in metrics:
        raise CheckpointError(f"the card of {folder.name!r} has no metric {metric!r}; it has {', '.join(metrics)}")
    return float(metrics[metric])


@contextmanager
def _subject(settings: Settings) -> Iterator[Retrained]:
    yield Retrained(settings)


BENCH: Bench[Retrained] = Bench("recipes", _subject)


def _bar(spread: float) -> Bar:
    return Bar("ours - baseline", ">=" if spread < 0 else "<=", spread)


def _register(part: str, trainer: Trainer[Any]) -> None:
    """A row for each metric whose spread the trainer states."""

    def row(metric: str) -> Callable[[Retrained], Measured]:
        def measure(retrained: Retrained) -> Measured:
            return retrained.figure(part, metric)

        measure.__name__ = f"{part}_{metric}"
        measure.__doc__ = f"{metric} on held-out episodes, of the new {part} against the shipped one."
        return measure

    for metric, spread in trainer.spread.items():
        BENCH.row(_unit(metric), _bar(spread), group=part)(row(metric))


def _unit(metric: str) -> str:
    return "dB" if "_db" in metric else "px" if "_px" in metric else ""


for _part, _module in (("codec", codec), ("world", world), ("context", context), ("act", policy)):
    _register(_part, _module.TRAINER)


@BENCH.row("success", _bar(_SUCCESS_SPREAD))
def success(retrained: Retrained) -> Measured:
    """PushT from the image, 100 unseen seeds through gRPC, all parts new, against the shipped ones."""
    return retrained.success()
