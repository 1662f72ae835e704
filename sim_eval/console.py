"""What an evaluation says while and after it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from .episodes import EpisodeResult, Outcome
from .report import segments
from .stats import interval
from .suite import EvalSuite


@contextmanager
def progress(console: Console, suite: EvalSuite) -> Iterator[Callable[[EpisodeResult], None]]:
    """A bar with the running k/n and its interval; yields what is to be told of every result."""
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
    )
    with bar:
        task = bar.add_task(suite.name, total=suite.episodes, rate="")
        k = n = 0

        def on_result(result: EpisodeResult) -> None:
            nonlocal k, n
            k, n = k + result.success, n + 1
            bounds = interval(k, n, suite.interval)
            bar.update(
                task, advance=1, rate=f"[bold]{100 * k / n:.0f} %[/] {k}/{n} {str(bounds).replace('[', chr(92) + '[')}"
            )
            if result.outcome in (Outcome.ERROR, Outcome.TIMEOUT):
                bar.console.print(
                    f"episode {result.episode} (seed {result.seed}): {result.outcome}: {result.reason}", markup=False
                )

        yield on_result


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
