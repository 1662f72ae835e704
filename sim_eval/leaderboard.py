"""Finished runs beside each other: sorted, with intervals, and who may be told from whom."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omni_loop.errors import ConfigError

from . import stored
from .compare import check
from .difference import holm
from .pooled import pooled
from .rows import by_task, successes
from .stats import Interval, interval, paired, spread
from .stored import StoredRun


@dataclass(frozen=True, slots=True)
class Task:
    """One task of an entry."""

    name: str
    successes: int
    episodes: int
    bounds: Interval


@dataclass(frozen=True, slots=True)
class Entry:
    """A run's line. ``rank``: 1 and one more for every run that is surely better; runs that nothing tells apart share
    one. ``alike``: names of those that its episodes do not tell it from; ``unpaired``: of those with other episodes."""

    run: StoredRun
    name: str
    successes: int
    episodes: int
    rate: float
    bounds: Interval
    tasks: tuple[Task, ...]
    steps: float  # median
    tick_p50_ms: float  # of all episodes' medians, the median
    tick_p99_ms: float
    deadline_misses: int
    broken: int  # ended with an error or ran out of time
    rank: int = 1
    alike: tuple[str, ...] = ()
    unpaired: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Board:
    """Entries of runs with the same env and tasks, the best first; ``tests``: pairs of runs that were compared."""

    env: str
    tasks: tuple[str, ...]
    entries: tuple[Entry, ...]
    tests: int


def boards(runs: Sequence[StoredRun], level: float = 0.95, method: str = "wilson") -> list[Board]:
    """A board for every env and set of tasks.

    Within one, each pair of runs that played the same episodes is compared by McNemar's exact test; p-values are
    corrected for the number of pairs (Holm), so that with ``level`` every difference that a board shows is one.

    Raises:
        OmniLoopError: no such level or method.
    """
    groups: dict[tuple[str, tuple[str, ...]], list[StoredRun]] = {}
    for run in runs:
        groups.setdefault((run.place, tuple(sorted(run.tasks))), []).append(run)
    called = names(runs)
    return [
        _board([_entry(run, called[id(run)], level, method) for run in own], level)
        for _, own in sorted(groups.items(), key=lambda item: item[0])
    ]


def names(runs: Sequence[StoredRun]) -> dict[int, str]:
    """What each run is called, by its id(): its suite, and its folder too where two have the same suite."""
    suites = [run.suite for run in runs]
    short = {id(r): r.suite if suites.count(r.suite) == 1 else f"{r.suite} ({r.folder.name})" for r in runs}
    given = list(short.values())
    return {id(r): n if given.count(n) == 1 else f"{r.suite} ({r.folder})" for r, n in zip(runs, given, strict=True)}


def _entry(run: StoredRun, name: str, level: float, method: str) -> Entry:
    rows = run.rows
    counts = {task: (sum(r.success for r in own), len(own)) for task, own in by_task(rows).items()}
    rate, bounds = pooled(counts, method, level)
    tasks = tuple(Task(task, k, n, interval(k, n, method, level)) for task, (k, n) in counts.items())
    ticked = [row for row in rows if row.ticks]
    return Entry(
        run=run,
        name=name,
        successes=sum(row.success for row in rows),
        episodes=len(rows),
        rate=rate,
        bounds=bounds,
        tasks=tasks if len(tasks) > 1 else (),
        steps=spread(row.steps for row in rows)["p50"],
        tick_p50_ms=_of(run, "p50", spread(row.tick_p50_ms for row in ticked)["p50"]),
        tick_p99_ms=_of(run, "p99", max((row.tick_p99_ms for row in ticked), default=0.0)),
        deadline_misses=sum(row.deadline_misses for row in rows),
        broken=sum(row.outcome in ("error", "timeout") for row in rows),
    )


def _of(run: StoredRun, key: str, otherwise: float) -> float:
    """Of all ticks, as the summary has it; without one what the rows say."""
    times = run.summary.get("tick_ms")
    return float(times[key]) if isinstance(times, dict) and key in times else otherwise


def _board(entries: Sequence[Entry], level: float) -> Board:
    ordered = sorted(entries, key=lambda e: (-e.rate, e.name))
    p: dict[tuple[int, int], float] = {}
    leads: dict[tuple[int, int], int] = {}  # by how many pairs the first of two is ahead
    for i, j in itertools.combinations(range(len(ordered)), 2):
        if same_episodes(ordered[i].run, ordered[j].run):
            pairs = paired(successes(ordered[i].run.rows), successes(ordered[j].run.rows))
            p[i, j], leads[i, j] = pairs.p, pairs.only_a - pairs.only_b
            leads[j, i] = -leads[i, j]
    adjusted = holm(p)
    placed = []
    for i, entry in enumerate(ordered):
        others = {j: adjusted.get((min(i, j), max(i, j))) for j in range(len(ordered)) if j != i}
        apart = {j for j, q in others.items() if q is not None and q <= 1 - level + 1e-12}
        better = sum(leads[j, i] > 0 for j in apart)  # not by rates: one may have played more episodes
        alike = tuple(ordered[j].name for j, q in others.items() if q is not None and j not in apart)
        unpaired = tuple(ordered[j].name for j, q in others.items() if q is None)
        placed.append(replace(entry, rank=1 + better, alike=alike, unpaired=unpaired))
    placed.sort(key=lambda e: e.rank)  # stable: the best rate first among those that share one
    first = ordered[0].run
    return Board(first.place, first.tasks, tuple(placed), len(p))


def same_episodes(a: StoredRun, b: StoredRun) -> bool:
    """Whether one of them played all that the other did, in the same env."""
    one, other = successes(a.rows).keys(), successes(b.rows).keys()
    if not (one <= other or other <= one):
        return False
    try:
        check(a, b)
    except ConfigError:
        return False
    return True


def read(folders: Sequence[Path]) -> list[StoredRun]:
    """The runs in ``folders``; raises as :func:`stored.find` and :func:`stored.load`."""
    return [stored.load(folder) for folder in stored.find(folders)]


def to_json(found: Sequence[Board]) -> list[dict[str, Any]]:
    """Boards for machines."""
    return [
        {
            "env": board.env,
            "tasks": list(board.tasks),
            "entries": [
                {
                    "name": e.name,
                    "folder": str(e.run.folder),
                    "rank": e.rank,
                    "successes": e.successes,
                    "episodes": e.episodes,
                    "success_rate": e.rate,
                    "interval": [e.bounds.low, e.bounds.high],
                    "tasks": {t.name: [t.successes, t.episodes] for t in e.tasks},
                    "tick_p50_ms": e.tick_p50_ms,
                    "tick_p99_ms": e.tick_p99_ms,
                    "deadline_misses": e.deadline_misses,
                    "broken": e.broken,
                    "alike": list(e.alike),
                    "unpaired": list(e.unpaired),
                }
                for e in board.entries
            ],
        }
        for board in found
    ]
