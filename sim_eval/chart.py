"""Small inline charts: SVG without text that would shrink on a phone; labels are HTML beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup


@dataclass(frozen=True, slots=True)
class Histogram:
    """Bars of the distribution between ``low`` and ``high`` ms; what lies above is in the last bar."""

    svg: Markup
    low: float
    high: float
    above: int
    p50_at: float  # percent of the width
    p99_at: float


def histogram(values: Sequence[float], bins: int = 48) -> Histogram:
    """Times in ms. The axis ends a little above the 99th percentile, so that one outlier hides nothing."""
    v = np.asarray(values, np.float64)
    p50, p99 = (float(np.percentile(v, p)) for p in (50, 99))
    low, high = float(v.min()), max(p99 * 1.08, float(v.min()) + 1e-3)
    counts, _ = np.histogram(np.minimum(v, high), bins, (low, high))
    width = 100 / bins
    bars = "".join(
        f'<rect x="{i * width + width * 0.08:.2f}" y="{40 - 40 * n / counts.max():.2f}" '
        f'width="{width * 0.84:.2f}" height="{40 * n / counts.max():.2f}"/>'
        for i, n in enumerate(counts)
        if n
    )
    svg = f'<svg class="bars" viewBox="0 0 100 40" preserveAspectRatio="none" aria-hidden="true">{bars}</svg>'

    def at(value: float) -> float:
        return float(round(100 * (value - low) / (high - low), 2))

    return Histogram(Markup(svg), low, high, int((v > high).sum()), at(p50), at(p99))  # numbers only


@dataclass(frozen=True, slots=True)
class Stacked:
    """Bars of how many episodes succeeded (below) and did not (above) by some value between ``low`` and ``high``
    ``unit``; ``most``: episodes in the highest bar."""

    svg: Markup
    low: float
    high: float
    most: int
    unit: str


def stacked(values: Sequence[float], success: Sequence[bool], unit: str, bins: int = 30) -> Stacked | None:
    """None: there is nothing to draw. Fewer bars than ``bins`` where whole numbers take fewer values."""
    if not values:
        return None
    v, good = np.asarray(values, np.float64), np.asarray(success, bool)
    low, high = float(v.min()), float(v.max())
    if (v == np.round(v)).all():
        bins = max(1, min(bins, int(high - low) + 1))
        edges = np.linspace(low - 0.5, high + 0.5, bins + 1)
    else:
        edges = np.linspace(low, max(high, low + 1e-3), bins + 1)
    below, _ = np.histogram(v[good], edges)
    above, _ = np.histogram(v[~good], edges)
    most, width, bars = int((below + above).max()), 100 / bins, ""
    for i, (k, f) in enumerate(zip(below, above, strict=True)):
        for kind, n, under in (("k", k, 0), ("f", f, k)):
            if n:
                bars += (
                    f'<rect class="{kind}" x="{i * width + width * 0.06:.2f}" y="{40 - 40 * (under + n) / most:.2f}" '
                    f'width="{width * 0.88:.2f}" height="{40 * n / most:.2f}"/>'
                )
    svg = f'<svg class="stacked" viewBox="0 0 100 40" preserveAspectRatio="none" aria-hidden="true">{bars}</svg>'
    return Stacked(Markup(svg), low, high, most, unit)  # numbers only


def horizon(rows: Sequence[Mapping[str, float]]) -> str:
    """Lines of PSNR over steps ahead: the prediction, and repeating the last frame."""
    w, h, left, right, top, bottom = 520, 220, 40, 96, 14, 32
    values = [row[key] for row in rows for key in ("psnr", "copy_psnr")]
    low, high = np.floor(min(values) / 5) * 5, np.ceil(max(values) / 5) * 5
    high = high if high > low else low + 5
    last = max(row["ahead"] for row in rows)

    def x(ahead: float) -> float:
        return left + (w - left - right) * ((ahead - 1) / max(last - 1, 1))

    def y(value: float) -> float:
        return float(top + (h - top - bottom) * (1 - (value - low) / (high - low)))

    grid = "".join(
        f'<line class="grid" x1="{left}" x2="{w - right}" y1="{y(v):.1f}" y2="{y(v):.1f}"/>'
        f'<text class="tick" x="{left - 8}" y="{y(v) + 4:.1f}" text-anchor="end">{v:.0f}</text>'
        for v in np.arange(low, high + 0.1, 5)
    )
    ticks = "".join(
        f'<text class="tick" x="{x(row["ahead"]):.1f}" y="{h - 12}" text-anchor="middle">{row["ahead"]:.0f}</text>'
        for row in rows
    )
    lines = ""
    for key, kind, label in (("copy_psnr", "copy", "last frame"), ("psnr", "predicted", "predicted")):
        points = " ".join(f"{x(row['ahead']):.1f},{y(row[key]):.1f}" for row in rows)
        dots = "".join(f'<circle cx="{x(row["ahead"]):.1f}" cy="{y(row[key]):.1f}" r="3"/>' for row in rows)
        end = rows[-1]
        text = f'<text x="{x(last) + 10:.1f}" y="{y(end[key]) + 4:.1f}">{label}</text>'
        lines += f'<g class="{kind}"><polyline points="{points}"/>{dots}{text}</g>'
    head = f'<svg class="lines" viewBox="0 0 {w} {h}" role="img" aria-label="PSNR in dB over steps ahead">'
    return f"{head}{grid}{ticks}{lines}</svg>"
