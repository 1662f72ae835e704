"""``omni-loop bench context``: what the context model says of held-out episodes, served tick by tick."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property

from omni_loop.config import load
from omni_loop.training.checkpoint import revision
from omni_loop_worlds.context.perceive import load_codec, load_context, perceive
from omni_loop_worlds.stages.shared import checkpoint
from omni_loop_worlds.train.context import ContextRecipe, evaluate

from .held_out import held_out
from .rows import Bar, Bench, Measured, Settings


class Judge:
    """The context model over all held-out episodes; its figures are computed once."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    @cached_property
    def figures(self) -> dict[str, float]:
        s = self._settings
        folder = checkpoint("codec", s.checkpoints)
        codec, model = load_codec(folder), load_context(checkpoint("context", s.checkpoints))
        demos = held_out(s)  # after the models, since it may take minutes to make
        seen = perceive(codec, revision(folder), demos, s.say, exact=True)
        return evaluate(model, seen, demos, load(ContextRecipe, "context", "train"))


@contextmanager
def _subject(settings: Settings) -> Iterator[Judge]:
    yield Judge(settings)


BENCH: Bench[Judge] = Bench("context", _subject)


@BENCH.row("r", Bar("ours", ">=", 0.9))
def progress_pearson(judge: Judge) -> Measured:
    """Correlation of predicted progress with the true coverage of the goal, over all ticks."""
    return Measured(judge.figures["progress_pearson"])


@BENCH.row("coverage")
def progress_error(judge: Judge) -> Measured:
    """Mean absolute error of predicted progress."""
    return Measured(judge.figures["progress_mae"])


@BENCH.row("F1", Bar("ours", ">=", 0.9))
def done_f1(judge: Judge) -> Measured:
    """F1 of done (probability above 0.5) against coverage above 0.95."""
    return Measured(judge.figures["done_f1"])


@BENCH.row("share")
def done_precision(judge: Judge) -> Measured:
    """Of the ticks called done, those that are."""
    return Measured(judge.figures["done_precision"])


@BENCH.row("share")
def done_recall(judge: Judge) -> Measured:
    """Of the ticks that are done, those called so."""
    return Measured(judge.figures["done_recall"])
