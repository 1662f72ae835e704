"""Lines over control steps as inline SVG; what they are called stands in HTML beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup
from numpy.typing import ArrayLike

_W, _H, _PAD = 1000, 160, 4
MOST = 8  # lines in one picture


@dataclass(frozen=True, slots=True)
class Series:
    """``svg`` of lines between ``low`` and ``high`` over steps ``first`` to ``last``; ``names`` in the order of their
    classes ``l0``, ``l1``, ..."""

    svg: Markup
    names: tuple[str, ...]
    low: float
    high: float
    first: int
    last: int


def series(lines: Mapping[str, tuple[Sequence[int], ArrayLike]], marks: Sequence[int] = ()) -> Series | None:
    """``lines``: steps and values by name; ``marks``: steps at which something happened. None: there is nothing."""
    drawn = {name: (np.asarray(x), np.asarray(y, np.float64)) for name, (x, y) in lines.items() if len(x)}
    if not drawn:
        return None
    xs, ys = (np.concatenate([line[i] for line in drawn.values()]) for i in (0, 1))
    first, last, low, high = int(xs.min()), int(xs.max()), float(ys.min()), float(ys.max())
    high = high if high > low else low + 1.0

    def at(x: float) -> float:
        return _PAD + (_W - 2 * _PAD) * (x - first) / max(last - first, 1)

    parts = [
        f'<line class="mark" x1="{at(x):.1f}" x2="{at(x):.1f}" y1="0" y2="{_H}"/>' for x in marks if first <= x <= last
    ]
    for i, (x, y) in enumerate(drawn.values()):
        up = _PAD + (_H - 2 * _PAD) * (1 - (y - low) / (high - low))
        points = " ".join(f"{at(a):.1f},{b:.1f}" for a, b in zip(x, up, strict=True))
        parts.append(f'<polyline class="l{i % MOST}" points="{points}"/>')
    head = f'<svg class="series" viewBox="0 0 {_W} {_H}" preserveAspectRatio="none" aria-hidden="true">'
    return Series(Markup(f"{head}{''.join(parts)}</svg>"), tuple(drawn), low, high, first, last)  # numbers only
