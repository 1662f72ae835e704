"""One HTML page with everything inside: numbers, latency, episodes, videos and predicted frames."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from PIL import Image

from . import chart
from .media import Media
from .predictions import strip
from .runner import Run
from .stats import Paired, spread
from .video import Frame


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


def episodes_table(run: Run) -> list[dict[str, Any]]:
    """Rows of the per-episode table."""
    return [
        {
            "episode": r.episode,
            "seed": r.seed,
            "outcome": str(r.outcome),
            "steps": r.steps,
            "score": r.score,
            "tick": spread(t.round_trip_ms for t in r.ticks if not t.frames),
            "reason": r.reason,
        }
        for r in run.results
    ]


def render(
    run: Run,
    summary: Mapping[str, Any],
    media: Media,
    comparison: tuple[str, Paired] | None = None,
) -> str:
    """The page as text."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string((resources.files(__package__) / "report.html").read_text(encoding="utf-8"))
    times = [t.round_trip_ms for r in run.results for t in r.ticks if not t.frames]
    return template.render(
        suite=run.suite,
        spec=run.spec,
        s=summary,
        score=run.score,
        segments=segments(summary),
        histogram=chart.histogram(times) if times else None,
        horizon=Markup(chart.horizon(media.horizon)) if media.horizon else None,  # numbers only
        rows=episodes_table(run),
        videos=[
            {"title": v.title, "note": v.note, "src": data_uri(v.path.read_bytes(), "video/mp4")} for v in media.videos
        ],
        strips=[
            {"seed": c.seed, "first": c.first_step, "n": len(c.predicted), "src": png_uri(strip(c))}
            for c in media.comparisons
        ],
        missing=media.missing,
        comparison=comparison,
    )


def write(path: Path, page: str) -> Path:
    path.write_text(page, encoding="utf-8")
    return path


def data_uri(data: bytes, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def png_uri(image: Frame) -> str:
    out = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(image)).save(out, "PNG", optimize=True)
    return data_uri(out.getvalue(), "image/png")


__all__: Sequence[str] = ("Segment", "data_uri", "episodes_table", "png_uri", "render", "segments", "write")
