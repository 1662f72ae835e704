"""Plots over two axes as inline SVG: dots and lines by name. What the names are stands in HTML beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup

Points = Sequence[tuple[float, float]]
MOST = 10  # series in one plot, as the page has colours
_W, _H, _LEFT, _RIGHT, _TOP, _BOTTOM = 520, 300, 52, 14, 12, 44


@dataclass(frozen=True, slots=True)
class Axis:
    """``low`` to ``high`` with about five ticks; ``name`` stands beside it."""

    name: str
    low: float
    high: float

    @classmethod
    def around(cls, name: str, values: Sequence[float], least: float = 1e-6) -> Axis:
        """Holds all ``values``, and a twentieth of their range on both sides."""
        low, high = (float(f(values)) for f in (np.min, np.max))
        room = max((high - low) / 20, least)
        return cls(name, low - room, high + room)

    def ticks(self) -> list[float]:
        """Round numbers within."""
        span = self.high - self.low
        step = 10.0 ** np.floor(np.log10(span / 4))
        step *= next(m for m in (1, 2, 5, 10) if span / (step * m) <= 6)
        first = np.ceil(self.low / step - 1e-9) * step
        return [float(round(t, 10)) + 0.0 for t in np.arange(first, self.high + step * 1e-6, step)]

    def at(self, value: float) -> float:
        """0..1."""
        return (value - self.low) / (self.high - self.low)


def plot(
    series: Mapping[str, Points],
    x: Axis,
    y: Axis,
    *,
    lines: bool = True,
    dots: bool = True,
    diagonal: bool = False,
    bars: Mapping[str, Sequence[tuple[float, float, float]]] | None = None,
) -> Markup:
    """``series`` as lines and dots of classes ``l0``, ``l1``, ... in their order. ``diagonal``: where both axes say the
    same. ``bars``: of a series, (x, low, high) of upright lines such as intervals."""
    parts = [_frame(x, y)]
    if diagonal:
        low, high = max(x.low, y.low), min(x.high, y.high)
        parts.append(_line("ideal", (_x(x, low), _y(y, low)), (_x(x, high), _y(y, high))))
    for i, (name, points) in enumerate(series.items()):
        placed = [(_x(x, a), _y(y, b)) for a, b in points]
        upright = (bars or {}).get(name, ())
        drawn = "".join(_line("bar", (_x(x, a), _y(y, low)), (_x(x, a), _y(y, high))) for a, low, high in upright)
        if lines and len(placed) > 1:
            drawn += f'<polyline points="{" ".join(f"{a:.1f},{b:.1f}" for a, b in placed)}"/>'
        if dots:
            drawn += "".join(f'<circle cx="{a:.1f}" cy="{b:.1f}" r="4"/>' for a, b in placed)
        parts.append(f'<g class="l{i % MOST}">{drawn}</g>')
    label = Markup.escape(f"{y.name} over {x.name}")
    head = f'<svg class="plot" viewBox="0 0 {_W} {_H}" role="img" aria-label="{label}">'
    return Markup(f"{head}{''.join(parts)}</svg>")  # numbers, and names that are escaped


def _x(axis: Axis, value: float) -> float:
    return _LEFT + (_W - _LEFT - _RIGHT) * axis.at(value)


def _y(axis: Axis, value: float) -> float:
    return _TOP + (_H - _TOP - _BOTTOM) * (1 - axis.at(value))


def _line(kind: str, a: tuple[float, float], b: tuple[float, float]) -> str:
    return f'<line class="{kind}" x1="{a[0]:.1f}" y1="{a[1]:.1f}" x2="{b[0]:.1f}" y2="{b[1]:.1f}"/>'


def _frame(x: Axis, y: Axis) -> str:
    bottom, right = _H - _BOTTOM, _W - _RIGHT
    parts = []
    for value in y.ticks():
        at = _y(y, value)
        parts.append(_line("grid", (_LEFT, at), (right, at)))
        parts.append(f'<text class="tick" x="{_LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{value:g}</text>')
    for value in x.ticks():
        at = _x(x, value)
        parts.append(_line("grid", (at, _TOP), (at, bottom)))
        parts.append(f'<text class="tick" x="{at:.1f}" y="{bottom + 16}" text-anchor="middle">{value:g}</text>')
    middle, name = (_LEFT + right) / 2, Markup.escape(x.name)
    parts.append(f'<text class="tick" x="{middle:.1f}" y="{_H - 8}" text-anchor="middle">{name}</text>')
    return "".join(parts)
