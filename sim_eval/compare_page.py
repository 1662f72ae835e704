"""A comparison of two runs for people: a table in the terminal and one page."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.markup import escape
from rich.table import Table

from . import pages
from .compare import Compared, Comparison, Side, verdict
from .rows import Key
from .sequential import State, confidence, log_wealth
from .series import Series, series
from .stored import StoredRun


@dataclass(frozen=True, slots=True)
class Course:
    """How a sequential comparison went: a sentence, its p, which is valid at any time, and over pairs its evidence and
    its difference."""

    said: str
    p: float
    wealth: Series
    gap: Series


def names(a: StoredRun, b: StoredRun) -> tuple[str, str]:
    """What the two are called: their suites, or where these are the same, their folders."""
    pairs = ((a.suite, b.suite), (a.folder.name, b.folder.name), (str(a.folder), str(b.folder)))
    return next((pair for pair in pairs if pair[0] != pair[1]), ("a", "b"))


def render(found: Comparison, a: StoredRun, b: StoredRun, page: Path, sequence: Course | None = None) -> str:
    """The page as text; ``page``: where it will lie, for links to the runs' own reports."""
    called = names(a, b)
    return pages.render(
        "compare.html",
        c=found,
        names=called,
        env=a.env,
        links=[link(run.folder / "report.html", page) for run in (a, b)],
        verdict=verdict(found.pooled, called, found.level) if sequence is None else sequence.said,
        notes=notes(found, a, b, decided=sequence is not None),
        differ=[(called[0], seeds(found.pooled.only_a)), (called[1], seeds(found.pooled.only_b))],
        sequence=sequence,
        footer=[f"{name}: {run.policy}, {run.folder}" for name, run in zip(called, (a, b), strict=True)],
    )


def seeds(keys: Sequence[Key]) -> list[tuple[str, int, str]]:
    """By task: how many, and which, those that follow each other as a range."""
    found: dict[str, list[int]] = {}
    for task, seed in keys:
        found.setdefault(task, []).append(seed)
    return [(task, len(own), _ranges(sorted(own))) for task, own in found.items()]


def _ranges(numbers: Sequence[int]) -> str:
    groups: list[list[int]] = []
    for n in numbers:
        if groups and n == groups[-1][-1] + 1:
            groups[-1].append(n)
        else:
            groups.append([n])
    return ", ".join(f"{g[0]}–{g[-1]}" if len(g) > 2 else ", ".join(map(str, g)) for g in groups)


def link(target: Path, page: Path) -> str:
    """From ``page`` to ``target``; empty when that does not exist."""
    return Path(os.path.relpath(target, page.parent)).as_posix() if target.exists() else ""


def notes(found: Comparison, a: StoredRun, b: StoredRun, decided: bool = False) -> list[str]:
    """What a reader has to know before the figures. ``decided``: a sequential test said how many pairs there are."""
    said = []
    for name, left, run in zip(names(a, b), found.left_out, (a, b), strict=True):
        if left:
            said.append(f"{left} episodes of {name} are left out: the other run has not played them.")
        if broken := sum(row.outcome in ("error", "timeout") for row in run.rows):
            said.append(f"{broken} episodes of {name} broke. They count as not successful.")
        if run.summary.get("seeds_unseen") is False:
            said.append(f"Seeds of {name} may be those of demonstrations.")
    if found.stopped:
        said.append(
            "It was stopped by what had been seen: rates and their own intervals are as if the number of pairs had "
            "been fixed, and lie further apart than more would show. The interval of the difference is right."
        )
    if found.pooled.pairs.pairs < 20 and not decided:
        said.append(f"{found.pooled.pairs.pairs} pairs are few: only a large difference could show.")
    return said


def sequence_of(states: Sequence[State], said: str, alpha: float) -> Course | None:
    """Charts of a sequential comparison; None before there is a pair."""
    if not states:
        return None
    x = [s.pairs for s in states]
    wealth = [log_wealth(s.only_a, s.only_b) / math.log(10) for s in states]
    limit = -math.log10(alpha)
    seen = [confidence(s.only_a, s.only_b, s.pairs, alpha) for s in states]
    evidence = series({"evidence": (x, wealth), f"enough for alpha {alpha:g}": (x, [limit] * len(x))})
    lines = {name: (x, [100 * getattr(d, key) for d in seen]) for name, key in _LINES.items()}
    gap = series({**lines, "no difference": (x, [0.0] * len(x))})
    return None if evidence is None or gap is None else Course(said, states[-1].p, evidence, gap)


_LINES = {"difference": "value", "lower bound": "low", "upper bound": "high"}


def table(found: Comparison, a: StoredRun, b: StoredRun) -> Table:
    """Rates, difference and p: of every task, and of all together. Where pairs were looked at one by one, only the
    difference of all together has an interval."""
    called, level = names(a, b), f"{100 * found.level:g} %"
    title = escape(f"{called[0]} and {called[1]}: {found.pooled.pairs.pairs} pairs")
    out = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    out.add_column("", overflow="fold")
    tests = [] if found.stopped else ["McNemar p", *(["corrected"] if found.tasks else [])]
    for column in (*called, "difference", level, *tests):
        out.add_column(escape(column), justify="right")
    for one in (*found.tasks, found.pooled):
        last = one is found.pooled
        p = [pages.p_value(one.pairs.p), "" if last else pages.p_value(one.adjusted)][: len(tests)]
        out.add_row(*_cells(one, last, found.stopped), *p, style="bold" if last else "")
    return out


def _cells(one: Compared, last: bool, stopped: bool) -> list[str]:
    d = one.difference
    return [
        "all" if last else escape(one.task),
        _side(one.a),
        _side(one.b),
        pages.points(d.value),
        "" if stopped and not last else f"{pages.points(d.low)} to {pages.points(d.high)}",
    ]


def _side(side: Side) -> str:
    return f"{side.successes}/{side.episodes} {escape(str(side.bounds))}"
