"""What an evaluation says while and after it runs."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from .pooled import pooled
from .report import segments
from .results import EpisodeResult, Outcome
from .stats import Interval, interval
from .suite import EvalSuite

_ETA_S = 3600.0  # of episodes by whose rate the rest is foretold


class Progressing:
    """A bar for each task where there are several, and one for all: running k/n with its interval, episodes a minute,
    the time left."""

    def __init__(self, bar: Progress, suite: EvalSuite) -> None:
        self._bar, self._method = bar, suite.interval
        names = suite.task_names if len(suite.task_names) > 1 else ()
        self._bars = {
            name: bar.add_task(f"  {escape(name)}", total=suite.episodes, rate="", pace="", start=False)
            for name in names
        }
        total = suite.episodes * len(suite.task_names)
        self._all = bar.add_task(escape(suite.name), total=total, rate="", pace="")
        self._counts: dict[int, list[int]] = {id_: [0, 0] for id_ in (self._all, *self._bars.values())}
        self._began, self._n = time.monotonic(), 0

    def resumed(self, results: Sequence[EpisodeResult]) -> None:
        """What an earlier part of the run finished: it counts, and took no time of this one."""
        for result in results:
            self._add(result)
        if results:
            self._bar.console.print(f"{len(results)} episodes are there already", highlight=False)
        for id_, (_, n) in self._counts.items():
            self._bar.reset(TaskID(id_), start=id_ == self._all, completed=n)
            self._show(id_)
        self._began = time.monotonic()

    def heard(self, result: EpisodeResult) -> None:
        """One more."""
        self._n += 1
        for id_ in self._add(result):
            self._bar.start_task(TaskID(id_))
            self._bar.advance(TaskID(id_))
            self._show(id_)
        minutes = (time.monotonic() - self._began) / 60
        self._bar.update(self._all, pace=f"{self._n / minutes:.0f}/min" if minutes * 60 > 1 else "")
        if result.outcome in (Outcome.ERROR, Outcome.TIMEOUT):
            about = f"{result.task} " if result.task else ""
            self._bar.console.print(
                f"{about}episode {result.episode} (seed {result.seed}): {result.outcome}: {result.reason}", markup=False
            )

    def _add(self, result: EpisodeResult) -> list[int]:
        ids = [int(self._all), *([int(self._bars[result.task])] if result.task in self._bars else [])]
        for id_ in ids:
            self._counts[id_][0] += result.success
            self._counts[id_][1] += 1
        return ids

    def _of_all(self) -> Interval:
        each = [self._counts[int(id_)] for id_ in self._bars.values()] or [self._counts[int(self._all)]]
        return pooled({str(i): (k, n) for i, (k, n) in enumerate(each)}, self._method)[1]

    def _show(self, id_: int) -> None:
        k, n = self._counts[id_]
        if n:
            bounds = interval(k, n, self._method) if id_ != self._all else self._of_all()
            said = f"[bold]{100 * k / n:.0f} %[/] {k}/{n} {escape(str(bounds))}"
            self._bar.update(TaskID(id_), rate=said)


@contextmanager
def progress(console: Console, suite: EvalSuite) -> Iterator[Progressing]:
    """Shows how a run goes, while it goes."""
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TextColumn("{task.fields[pace]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        speed_estimate_period=_ETA_S,
    )
    with bar:
        yield Progressing(bar, suite)


def table(summary: Mapping[str, Any]) -> Table:
    """Rate and the latency breakdown."""
    low, high = summary["ci95"]
    k, n, rate = summary["successes"], summary["episodes"], 100 * summary["success_rate"]
    title = f"{summary['suite']}: {k}/{n} = {rate:.1f} % \\[{100 * low:.0f}–{100 * high:.0f} %]"
    out = Table(title=title, title_justify="left", caption=f"{summary['ticks']} ticks; ms", caption_justify="left")
    for column in ("", "p50", "p99", "mean", "share"):
        out.add_column(column, justify="left" if not column else "right")
    parts = {part.name: part for part in segments(summary)}
    share = {name: f"{part.share:.0f} %" for name, part in parts.items()}
    out.add_row("tick (round trip)", *_cells(summary["tick_ms"]), "100 %", style="bold")
    for name, values in summary["stages_ms"].items():
        out.add_row(f"  {name}", *_cells(values), share[name])
    out.add_row("  server", "", "", f"{parts['server'].ms:.2f}", share["server"])  # what is left of the mean
    out.add_row("  transport", *_cells(summary["transport_ms"]), share["transport"])
    out.add_row("overhead (all but models)", *_cells(summary["overhead_ms"]), "")
    return out


def _cells(values: Mapping[str, float]) -> tuple[str, ...]:
    return tuple(f"{values[key]:.2f}" for key in ("p50", "p99", "mean"))
