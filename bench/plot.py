"""Rows as bars against their limits, and the rollout's times frame by frame."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .rows import Bar, Result

_GOOD, _BAD, _NONE, _INK, _MUTED, _GRID = "#2a9d8f", "#d1495b", "#9aa5b1", "#181c22", "#6e7682", "#e3e6ea"


def draw(path: Path, results: Sequence[Result], curve: Sequence[tuple[int, float]] = ()) -> None:
    """Write a PNG. A bar is the row's figure over the limit of its bar: at 1 it just passes; rows that must be large
    are inverted, so that shorter is better everywhere. ``curve``: (frame, CPU milliseconds a frame)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = [(result, value) for result in results if (value := share(result)) is not None]
    heights = [0.34 * max(len(shown), 1) + 0.9, *([2.6] if curve else [])]
    figure = Figure(figsize=(9, sum(heights)), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0])
    _bars(axes[0], shown)
    if curve:
        _line(axes[1], curve)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def share(result: Result) -> float | None:
    """The judged figure over its limit, inverted where large is good; None where that says nothing."""
    bar, value = result.row.bar, result.value
    if bar is None:
        return None
    figure = bar.judged(value)
    if figure is None or not bar.limit:
        return None
    if bar.sign.startswith(">"):
        return bar.limit / figure if figure > 0 else None
    return figure / bar.limit


def _bars(axes: Any, shown: Sequence[tuple[Result, float]]) -> None:
    _plain(axes)
    longest = max([1.0, *(value for _, value in shown)])
    for i, (result, value) in enumerate(shown):
        good = value <= 1
        axes.barh(i, value, color=_GOOD if good else _BAD, height=0.62)
        axes.text(max(value, 1) + longest * 0.015, i, _label(result), va="center", color=_INK, fontsize=8)
    axes.set_yticks(range(len(shown)), [result.row.name for result, _ in shown])
    axes.invert_yaxis()
    axes.axvline(1, color=_INK, linewidth=1, linestyle=(0, (4, 3)))
    axes.set_xlim(0, longest * 1.45)
    axes.set_xlabel("share of what is allowed: left of the line passes", color=_MUTED)
    axes.grid(axis="x", color=_GRID)


def _label(result: Result) -> str:
    bar, value = result.row.bar, result.value
    assert isinstance(bar, Bar)
    figure = bar.judged(value)
    unit = f" {result.row.unit}" if bar.on == "ours" else ""
    return f"{figure:.3g}{unit}   ({bar})"


def _line(axes: Any, curve: Sequence[tuple[int, float]]) -> None:
    _plain(axes)
    frames, ms = zip(*curve, strict=True)
    width = max(len(ms) // 50, 1)
    middle = [sorted(part)[len(part) // 2] for i in range(len(ms)) if (part := ms[max(0, i - width) : i + width + 1])]
    axes.plot(frames, ms, color=_NONE, linewidth=0.6)
    axes.plot(frames, middle, color=_GOOD, linewidth=1.8)
    axes.set_ylim(0, 2 * max(middle))
    axes.set_xlabel("frame of one rollout", color=_MUTED)
    axes.set_ylabel("CPU ms per frame", color=_MUTED)
    axes.grid(color=_GRID)


def _plain(axes: Any) -> None:
    axes.set_axisbelow(True)
    axes.tick_params(colors=_INK, length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(_MUTED)
