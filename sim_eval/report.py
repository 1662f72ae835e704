"""One HTML page with everything inside: numbers, latency, episodes, videos and predicted frames."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from . import chart, pages
from .bounds import is_bound
from .difference import of
from .media import Media
from .pages import data_uri as data_uri
from .pages import png_uri as png_uri
from .pages import write as write
from .predictions import strip
from .rows import Row, row_of
from .runner import Run
from .stats import Paired


@dataclass(frozen=True, slots=True)
class Segment:
    """Part of a mean tick; ``share`` in percent."""

    name: str
    ms: float
    share: float
    kind: str  # "model", "server" or "transport"


def segments(summary: Mapping[str, Any]) -> list[Segment]:
    """Where a mean tick's time goes: stages in order, the rest of the server, transport."""
    stages = {name: values["mean"] for name, values in summary["stages_ms"].items()}
    transport = max(0.0, summary["transport_ms"]["mean"])
    server = max(0.0, summary["tick_ms"]["mean"] - transport - sum(stages.values()))
    parts = [
        *((n, ms, "model") for n, ms in stages.items()),
        ("server", server, "server"),
        ("transport", transport, "transport"),
    ]
    total = sum(ms for _, ms, _ in parts) or 1.0
    return [Segment(name, ms, 100 * ms / total, kind) for name, ms, kind in parts]


@dataclass(frozen=True, slots=True)
class Reason:
    """Why episodes did not succeed: an outcome and what was said of it, on how many, with some of their rows."""

    outcome: str
    text: str
    rows: tuple[Row, ...]


def reasons(rows: Iterable[Row]) -> list[Reason]:
    """Of the episodes that did not succeed, the most frequent reason first. A failure without a note ran its time."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if not row.success:
            said = row.reason or ("ended without success" if row.outcome == "failure" else "")
            found.setdefault((row.outcome, said), []).append(row)
    ranked = sorted(found.items(), key=lambda item: -len(item[1]))
    return [Reason(outcome, text, tuple(own)) for (outcome, text), own in ranked]


def beside_success(rows: Sequence[Row]) -> list[tuple[str, chart.Stacked]]:
    """What goes with success, as charts with a title: steps, latency and deadline misses of every episode."""
    success = [row.success for row in rows]
    drawn = [("Steps of an episode", chart.stacked([row.steps for row in rows], success, "steps"))]
    ticked = [row for row in rows if row.ticks]
    times = chart.stacked([row.tick_p50_ms for row in ticked], [row.success for row in ticked], "ms")
    drawn.append(("Median tick of an episode", times))
    if any(row.deadline_misses for row in rows):
        missed = chart.stacked([row.deadline_misses for row in rows], success, "misses")
        drawn.append(("Deadline misses of an episode", missed))
    return [(title, picture) for title, picture in drawn if picture is not None]


def render(
    run: Run,
    summary: Mapping[str, Any],
    media: Media,
    comparison: tuple[str, Paired] | None = None,
) -> str:
    """The page as text."""
    times = [t.round_trip_ms for r in run.results for t in r.ticks if not t.frames]
    rows = [row_of(r) for r in run.results]
    return pages.render(
        "report.html",
        suite=run.suite,
        bound=is_bound(run.suite),
        spec=run.spec,
        s=summary,
        score=run.score,
        segments=segments(summary),
        histogram=chart.histogram(times) if times else None,
        horizon=Markup(chart.horizon(media.horizon)) if media.horizon else None,  # numbers only
        rows=rows,
        anchors={row.key: f"e{i}" for i, row in enumerate(rows)},
        reasons=reasons(rows),
        charts=beside_success(rows),
        videos=[
            {"task": v.task, "title": v.title, "note": v.note, "src": data_uri(v.path.read_bytes(), "video/mp4")}
            for v in media.videos
        ],
        strips=[
            {"seed": c.seed, "first": c.first_step, "n": len(c.predicted), "src": png_uri(strip(c))}
            for c in media.comparisons
        ],
        missing=media.missing,
        finding=media.finding,
        comparison=comparison,
        difference=None if comparison is None else of(comparison[1]),
    )
