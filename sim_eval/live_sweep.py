"""Success against latency: one live run for every latency and way in which chunks take over, on the same seeds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import typer
from rich.console import Console
from rich.table import Table

from omni_loop.cli import output
from omni_loop.config import validate
from omni_loop.errors import UnknownName, nearest

from . import pages, plots
from .evaluate import Evaluated, Serve, evaluate
from .stats import paired
from .suite import CHUNKS, Chunks, EvalSuite, Live

FILES = ("latency.html", "latency.json", "latency.svg")
_COLOURS = ("#2f6fd6", "#e0a030", "#c0392b", "#9aa3af")
_STYLE = (
    "text{font:12px sans-serif;fill:#626b78}.grid{stroke:#e4e6ea}polyline{fill:none;stroke-width:2.2}"
    ".bar{stroke-width:1.4;opacity:.55}"
)
_SWEPT: tuple[Chunks, ...] = ("joined", "aligned", "naive")  # where a sweep does not say which


def points(
    suite: EvalSuite,
    live: bool,
    latency_ms: str | None,
    jitter_ms: float | None,
    measured: bool,
    chunks: str | None,
    join: bool | None,
) -> list[EvalSuite]:
    """The runs that the command line asks for; without ``live`` the suite alone.

    Raises:
        typer.BadParameter: an option of live mode without it, or a number that is none.
        ConfigError: a latency or jitter that is out of range.
        UnknownName: no such way to take over.
    """
    given = {"--latency-ms": latency_ms, "--jitter-ms": jitter_ms, "--measured": measured or None, "--chunks": chunks}
    if not live and suite.mode != "live":
        for option, value in {**given, "--join": join}.items():
            if value is not None:
                raise typer.BadParameter(f"{option} goes with --live")
        return [suite]
    if chunks and join is not None:
        raise typer.BadParameter("--chunks says what --join and --no-join say, and more: give one of them")
    latencies = _numbers(latency_ms) if latency_ms else [suite.live.latency_ms]
    ways = _ways(suite, chunks, join, several=len(latencies) > 1)
    rest = {
        "jitter_ms": suite.live.jitter_ms if jitter_ms is None else jitter_ms,
        "measured": measured or suite.live.measured,
    }
    given_live = ({"latency_ms": latency, "chunks": way, **rest} for way in ways for latency in latencies)
    lives = [validate(Live, one, "--live") for one in given_live]
    late = any(live.measured or live.jitter_ms for live in lives)
    lives = [live for live in lives if late or live.latency_ms or _differs_at_once(live.chunks, ways)]
    return [suite.changed(mode="live", live=live.model_dump()) for live in lives]


def _differs_at_once(way: Chunks, ways: Sequence[Chunks]) -> bool:
    """Whether ``way`` needs a run of its own where answers are there at once: those that do not join are one then."""
    return way == "joined" or way == next(w for w in ways if w != "joined")


def _numbers(text: str) -> list[float]:
    try:
        return list(dict.fromkeys(float(part) for part in text.split(",")))
    except ValueError:
        raise typer.BadParameter(f"--latency-ms: {text!r} is no list of numbers by commas") from None


def _ways(suite: EvalSuite, chunks: str | None, join: bool | None, several: bool) -> list[Chunks]:
    if chunks is None:
        named: tuple[Chunks, ...] = _SWEPT if several else (suite.live.chunks,)
        return list(named if join is None else ("joined",) if join else ("aligned",))
    found: list[Chunks] = []
    for part in (p.strip() for p in chunks.split(",")):
        way = next((w for w in CHUNKS if w == part), None)
        if way is None:
            raise UnknownName(f"--chunks: no way to take over is called {part!r}.{nearest(part, get_args(Chunks))}")
        found.append(way)
    return list(dict.fromkeys(found))


@dataclass(frozen=True, slots=True)
class Point:
    """One run of the sweep. ``broken``: episodes that ended with an error or ran out of time. ``against_aligned``:
    success only in this run, and only where chunks were aligned but not joined, of the same seeds; None for that one
    itself."""

    latency_ms: float
    chunks: str
    folder: str
    episodes: int
    successes: int
    low: float
    high: float
    misses: int
    periods: int
    steps: float  # median length of an episode
    broken: int
    against_aligned: tuple[int, int, float] | None = None

    @property
    def rate(self) -> float:
        return self.successes / self.episodes

    @property
    def missed(self) -> float:
        """Share of control periods without an action."""
        return self.misses / self.periods if self.periods else 0.0


def run(sweep: Sequence[EvalSuite], out: Path, serve: Serve, console: Console, fresh: bool = False) -> int:
    """Run every suite of ``sweep`` in a folder of its own below ``out``, all with one server, and write the page over
    them; how many episodes broke."""
    output.folder(out, "--out", *FILES)
    done: list[Evaluated] = []
    with serve(sweep[0]) as connect:
        for suite in sweep:
            name = _folder(suite)
            console.rule(name, align="left")
            done.append(evaluate(suite, out / name, lambda _: nullcontext(connect), console, fresh=fresh))
            write(collect(done), sweep[0], out)
    found = collect(done)
    console.print(table(found))
    console.print(f"page: {out / FILES[0]}", markup=False, soft_wrap=True)
    return sum(one.broken for one in done)


def _folder(suite: EvalSuite) -> str:
    """Of a point, its own also where two latencies look alike."""
    return f"{suite.live.chunks}-{repr(suite.live.latency_ms).removesuffix('.0')}ms"


def collect(done: Sequence[Evaluated]) -> list[Point]:
    """A point for every run."""
    aligned = {one.run.suite.live.latency_ms: one for one in done if one.run.suite.live.chunks == "aligned"}
    return [_point(one, aligned.get(one.run.suite.live.latency_ms)) for one in done]


def _point(one: Evaluated, aligned: Evaluated | None) -> Point:
    results, live = one.run.results, one.run.suite.live
    low, high = one.numbers["ci95"]  # as the point's own report has it, of several tasks too
    compared: tuple[int, int, float] | None = None
    if aligned is not None and aligned is not one:
        pairs = paired(*({(r.task, r.seed): r.success for r in e.run.results} for e in (one, aligned)))
        compared = (pairs.only_a, pairs.only_b, pairs.p)
    return Point(
        live.latency_ms, live.chunks, one.out.name, len(results), one.run.successes, low, high,
        sum(r.deadline_misses for r in results), sum(r.steps for r in results), one.numbers["steps"]["p50"],
        one.broken, compared,
    )  # fmt: skip


def write(found: Sequence[Point], suite: EvalSuite, out: Path) -> Path:
    """``latency.html`` and ``latency.json``."""
    data: dict[str, Any] = {
        "suite": suite.name,
        "first_seed": suite.first_seed,
        "jitter_ms": suite.live.jitter_ms,
        "reproducible": not suite.live.measured,
        "points": [
            {
                "latency_ms": p.latency_ms, "chunks": p.chunks, "folder": p.folder, "episodes": p.episodes,
                "successes": p.successes, "success_rate": p.rate, "ci95": [p.low, p.high], "steps_p50": p.steps,
                "broken": p.broken, "deadline_misses": p.misses, "periods": p.periods,
                "against_aligned": p.against_aligned,
            }
            for p in found
        ],
    }  # fmt: skip
    (out / FILES[1]).write_text(json.dumps(data, indent=1) + "\n")
    (out / FILES[2]).write_text(picture(found) + "\n")
    ways = list(dict.fromkeys(p.chunks for p in found))
    page = pages.render("live.html", suite=suite, points=found, ways=ways, plot=plot(found) if found else None)
    return pages.write(out / FILES[0], page)


def plot(found: Sequence[Point]) -> str:
    """Success over latency, a line for every way to take over, with intervals."""
    ways = list(dict.fromkeys(p.chunks for p in found))
    most = max(max(p.latency_ms for p in found), 1.0)
    x, y = plots.Axis("latency, ms", -most / 20, most * 1.05), plots.Axis("success, %", 0.0, 105.0)
    own = {way: [p for p in found if p.chunks == way] for way in ways}
    at_once = [p for p in found if not p.latency_ms and p.chunks != "joined"]  # of every way that does not join
    for way, points_ in own.items():
        if way != "joined" and all(p.latency_ms for p in points_):
            points_[:0] = at_once
    lines = {way: [(p.latency_ms, 100 * p.rate) for p in own[way]] for way in ways}
    bars = {way: [(p.latency_ms, 100 * p.low, 100 * p.high) for p in own[way]] for way in ways}
    return plots.plot(lines, x, y, bars=bars)


def picture(found: Sequence[Point]) -> str:
    """The plot as an SVG file of its own, with its colours and a legend inside."""
    ways = list(dict.fromkeys(p.chunks for p in found))
    colours = "".join(f".l{i}{{stroke:{c};fill:{c}}}" for i, c in enumerate(_COLOURS))
    legend = "".join(
        f'<g class="l{i}"><circle cx="70" cy="{200 + 16 * i}" r="4"/></g><text x="80" y="{204 + 16 * i}">{way}</text>'
        for i, way in enumerate(ways)
    )
    head, body = str(plot(found)).split(">", 1)
    background = '<rect width="520" height="300" fill="#fff"/>'
    style = f"<style>{_STYLE}{colours}</style>"
    return f'{head} xmlns="http://www.w3.org/2000/svg">{style}{background}{body.removesuffix("</svg>")}{legend}</svg>'


def table(found: Sequence[Point]) -> Table:
    """What the command prints."""
    out = Table("latency, ms", "chunks", "success", "%", "interval", "steps p50", "periods missed", "against aligned")
    broke = any(p.broken for p in found)
    if broke:
        out.add_column("broke")
    for p in found:
        pair = "" if p.against_aligned is None else "+{} −{}, p = {:.3f}".format(*p.against_aligned)
        out.add_row(
            f"{p.latency_ms:g}", p.chunks, f"{p.successes}/{p.episodes}", f"{100 * p.rate:.0f}",
            f"{100 * p.low:.0f}–{100 * p.high:.0f}", f"{p.steps:.0f}", f"{100 * p.missed:.1f} %", pair,
            *([str(p.broken)] if broke else []),
        )  # fmt: skip
    return out
