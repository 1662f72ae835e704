"""Success rates of the shipped suites, as ``omni-loop eval NAME`` runs them, on seeds no demonstration has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from omni_loop_sim_eval.stats import interval

from .eval_runs import Ran, Runs, runs
from .rows import Bar, Bench, Measured, Settings

_EPISODES = 200
_EACH = 70  # of each of the three tasks
_PIXELS = "metaworld-pixels"


class Shipped:
    """The suites that were asked for, each run once."""

    def __init__(self, runs_: Runs) -> None:
        self._runs = runs_
        self._ran: dict[str, Ran] = {}

    def ran(self, suite: str, episodes: int = _EPISODES) -> Ran:
        if suite not in self._ran:
            self._ran[suite] = self._runs.run(suite, episodes, "--workers", "2")
        return self._ran[suite]

    def rate(self, suite: str, episodes: int = _EPISODES, task: str | None = None) -> Measured:
        """Share of ``episodes`` of each task that succeed; ``task``: of that one alone."""
        ran = self.ran(suite, episodes)
        chosen = ran if task is None else ran.of(task)
        k, n = sum(r.success for r in chosen.results), len(chosen.results)
        self._runs.settings.say(f"{suite} {task or ''}: {k}/{n} {interval(k, n)}")
        return Measured(k / n)


@contextmanager
def _subject(settings: Settings) -> Iterator[Shipped]:
    with runs(settings) as made:
        yield Shipped(made)


BENCH: Bench[Shipped] = Bench("shipped", _subject)


@BENCH.row("success", Bar("ours", ">=", 0.98))
def metaworld_state(shipped: Shipped) -> Measured:
    """Meta-World's six tasks from state, told apart by the instruction alone; 50 episodes of each."""
    return shipped.rate("metaworld-state", 50)


@BENCH.row("success", Bar("ours", ">=", 0.95))
def metaworld_door(shipped: Shipped) -> Measured:
    """Meta-World's door from one camera of 64 x 64; 70 episodes."""
    return shipped.rate(_PIXELS, _EACH, "door-open-v3")


@BENCH.row("success", Bar("ours", ">=", 0.95))
def metaworld_drawer(shipped: Shipped) -> Measured:
    """Meta-World's drawer from one camera of 64 x 64; 70 episodes."""
    return shipped.rate(_PIXELS, _EACH, "drawer-open-v3")


@BENCH.row("success", Bar("ours", ">=", 0.95))
def metaworld_button(shipped: Shipped) -> Measured:
    """Meta-World's button from one camera of 64 x 64; 70 episodes."""
    return shipped.rate(_PIXELS, _EACH, "button-press-v3")


@BENCH.row("success", Bar("ours", ">=", 0.95))
def fetch_pick_place(shipped: Shipped) -> Measured:
    """FetchPickAndPlace from its state, LeRobot's ACT; 200 episodes."""
    return shipped.rate("fetch-act")


@BENCH.row("success", Bar("ours", ">=", 0.86))
def pusht_state(shipped: Shipped) -> Measured:
    """PushT with the T's pose given; 200 episodes."""
    return shipped.rate("pusht-state")


@BENCH.row("success", Bar("ours", ">=", 0.85))
def pusht_image(shipped: Shipped) -> Measured:
    """PushT from a 96 x 96 image and the agent's position; 200 episodes."""
    return shipped.rate("pusht-image")


@BENCH.row("success", Bar("ours - baseline", "<=", -0.2))
def pusht_small(shipped: Shipped) -> Measured:
    """PushT from an image, the small training budget against the large one on the same seeds: the pair to compare."""
    return Measured(shipped.rate("pusht-small").ours, shipped.rate("pusht-image").ours)
