"""Two suites on the same seeds, pair by pair, until it is decided which policy is better or the pairs are used up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from omni_loop.errors import ConfigError

from .api import Connect
from .results import EpisodeResult
from .runner import Run, run_suite
from .sequential import SequentialTest, State
from .store import Store, fingerprint
from .stored import refuse_others, world
from .suite import EvalSuite

FIRST = 8  # pairs of the first batch: with 7 that favour one side it is decided
GROWTH = 1.25  # of a run from batch to batch: what is run in vain is at most that share


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two. ``fresh``: what its folder holds goes away."""

    suite: EvalSuite
    connect: Connect
    folder: Path
    fresh: bool = False


@dataclass(frozen=True, slots=True)
class Contest:
    """``states``: after each pair, in order, up to the one with the verdict, or all there were. The runs may hold a few
    episodes more: those of the batch in which it was decided."""

    a: Run
    b: Run
    states: list[State]

    @property
    def last(self) -> State:
        return self.states[-1]


def check(a: EvalSuite, b: EvalSuite) -> None:
    """Refuse suites whose episodes of a seed are not the same episodes.

    Raises:
        ConfigError: what they have differently: env, its options, tasks, seeds.
    """
    if a.task_names != b.task_names:
        tasks = [", ".join(name or "(one)" for name in suite.task_names) for suite in (a, b)]
        raise ConfigError(f"the runs cannot be paired: tasks are {tasks[0]} in {a.name} and {tasks[1]} in {b.name}")
    worlds = [world(s.env, s.task_names, fingerprint(s)) | {"first_seed": s.first_seed} for s in (a, b)]
    refuse_others(worlds[0], worlds[1], a.name, b.name)


def batches(tasks: int, most: int) -> list[int]:
    """Episodes of each task after each batch: growing, so that few batches decide nothing and little is run in vain."""
    last, sizes = max(1, -(-most // tasks)), []
    n = max(1, -(-FIRST // tasks))
    while n < last:
        sizes.append(n)
        n = max(n + 1, round(n * GROWTH))
    return [*sizes, last]


def contest(
    a: Side,
    b: Side,
    most: int,
    test: SequentialTest,
    on_batch: Callable[[int], None] | None = None,
    on_state: Callable[[State], None] | None = None,
) -> Contest:
    """Run pairs in order (episode 0 of every task, episode 1, ...) until ``test`` has a verdict or ``most`` are played.

    Each side's episodes are kept in its folder, and those that are there already are not run again: a contest that was
    interrupted goes on. ``on_batch`` hears up to which episode of each task the next batch goes, ``on_state`` of every
    pair.

    Raises:
        ConfigError: the suites cannot be paired.
        OmniLoopError: as for :func:`.runner.run_suite`.
    """
    check(a.suite, b.suite)
    states: list[State] = []
    begun = 0
    for n in batches(len(a.suite.task_names), most):
        if on_batch:
            on_batch(n)
        runs = [_batch(side, n, begun == 0) for side in (a, b)]
        for one, other in _pairs(runs[0].results, runs[1].results, begun):
            if len(states) < most and not (states and states[-1].verdict):
                states.append(test.add(one, other))
                if on_state:
                    on_state(states[-1])
        begun = n
        if states[-1].verdict:
            break
    return Contest(runs[0], runs[1], states)


def _batch(side: Side, episodes: int, first: bool) -> Run:
    """The run up to ``episodes`` of each task."""
    store = Store(side.folder, fresh=side.fresh and first)
    try:
        return run_suite(side.suite.changed(episodes=episodes), side.connect, store=store)
    finally:
        store.close()


def _pairs(a: Sequence[EpisodeResult], b: Sequence[EpisodeResult], begun: int) -> list[tuple[bool, bool]]:
    """Successes of the same episodes, from episode ``begun`` on, in an order that depends on nothing but the suite."""
    other = {(r.task, r.episode): r.success for r in b}
    new = sorted((r for r in a if r.episode >= begun), key=lambda r: r.episode)  # stable: tasks stay in their order
    return [(r.success, other[r.task, r.episode]) for r in new]


def said(contest: Contest, names: tuple[str, str], most: int) -> str:
    """One sentence on how it ended."""
    s = contest.last
    if s.verdict in ("a", "b"):
        better, worse = names if s.verdict == "a" else names[::-1]
        saved = f", {most - s.pairs} fewer than the {most} it was allowed" if s.pairs < most else ""
        return f"Decided after {s.pairs} pairs{saved}: {better} is better than {worse}."
    if s.verdict == "same":
        return f"Decided after {s.pairs} pairs: the two are the same within the margin."
    return f"Not decided after {s.pairs} pairs."
