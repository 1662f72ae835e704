"""One evaluation from a suite to its folder: run or gone on with, and everything that is made of it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from omni_loop.cli import output

from . import media as media_
from . import report, rows, summary
from .api import Connect
from .console import progress, table
from .runner import Run, run_suite
from .stats import Paired
from .store import JOURNAL, RUN, Store
from .suite import EvalSuite

Serve = Callable[[EvalSuite], AbstractContextManager[Connect]]  # how a suite's policy is reached, while that lasts
Other = tuple[str, dict[rows.Key, bool]]  # a run to pair with: its name, and success by task and seed


@dataclass
class Evaluated:
    """A run, its numbers as in ``summary.json``, and what there is to see of it."""

    run: Run
    out: Path
    numbers: dict[str, Any]
    seen: media_.Media = field(default_factory=media_.Media)
    page: Path | None = None

    @property
    def broken(self) -> int:
        """Episodes without a verdict."""
        return int(self.numbers["errors"] + self.numbers["timeouts"])


def check(suite: EvalSuite, out: Path) -> None:
    """See that the env has the suite's keys and that ``out`` can be written, before a server is started."""
    suite.make_env().close()
    output.folder(out, "--out", "summary.json", "episodes.json", "report.html")
    for name in (JOURNAL, RUN):
        if (out / name).exists():
            output.file(out / name, "--out")
    output.folder(out / "videos", "--out")


def evaluate(
    suite: EvalSuite, out: Path, serve: Serve, console: Console, *, fresh: bool = False, other: Other | None = None
) -> Evaluated:
    """Check, run what the journal in ``out`` does not hold, and write numbers, videos and page.

    Raises:
        OmniLoopError: as :func:`check`, :func:`.runner.run_suite`; what ``serve`` raises.
    """
    check(suite, out)
    with serve(suite) as connect:
        run = run_episodes(suite, connect, out, console, fresh)
    done = save(run, out)
    finish(done, console, other)
    return done


def run_episodes(suite: EvalSuite, connect: Connect, out: Path, console: Console, fresh: bool) -> Run:
    """Run them with a journal in ``out`` and a bar on ``console``."""
    with progress(console, suite) as bar:
        return run_suite(suite, connect, bar.heard, store=Store(out, fresh), on_resumed=bar.resumed)


def save(run: Run, out: Path) -> Evaluated:
    """Write the numbers first: a film that cannot be made must not cost them."""
    numbers = summary.summarise(run)
    summary.write(out, numbers, run.results)
    seen = media_.collect(run, out / "videos")
    numbers["predictions"] = {"n": seen.compared, "psnr_by_horizon": seen.horizon}
    return Evaluated(run, out, numbers, seen)


def finish(done: Evaluated, console: Console, other: Other | None = None) -> None:
    """Table, JSON and page. ``other``: the run to pair with."""
    run, numbers, seen, out = done.run, done.numbers, done.seen, done.out
    comparison: tuple[str, Paired] | None = None
    if other is not None:
        name, pairs = other[0], summary.against(run.results, other[1])
        comparison = (name, pairs)
        numbers["paired"] = {"with": name, "only_this": pairs.only_a, "only_other": pairs.only_b, "p": pairs.p}
        console.print(f"paired with {name}: {pairs.only_a} only here, {pairs.only_b} only there, p = {pairs.p:.3f}")
    summary.write(out, numbers, run.results)
    done.page = report.write(out / "report.html", report.render(run, numbers, seen, comparison=comparison))
    console.print(table(numbers))
    if run.suite.mode == "live":
        console.print(_live(run), markup=False, highlight=False)
    if seen.finding:
        console.print(seen.finding, style="yellow", markup=False, highlight=False)
    for said in seen.missing:
        console.print(said, markup=False)
    console.print(f"report: {done.page}", markup=False, soft_wrap=True)
    if done.broken:
        console.print(f"[red]{done.broken} of {numbers['episodes']} episodes broke; the report says why[/]")


def _live(run: Run) -> str:
    live, misses = run.suite.live, sum(r.deadline_misses for r in run.results)
    steps = sum(r.steps for r in run.results)
    measured = " and what answers took: not reproducible" if live.measured else ""
    return (
        f"live: {live.latency_ms:g} ms of latency{measured}, chunks {live.chunks}; "
        f"no action was there in {misses} of {steps} control periods"
    )
