"""How well one evaluation of some policies foretells another: Pearson's r and rank violation over the policies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike, NDArray

from omni_loop.errors import InvalidInput

Values = NDArray[np.float64]
_RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Agreement:
    """Of ``n`` policies. ``low``, ``high``: Fisher's interval of r, wide for few policies (none below 4: -1..1).
    ``sampled_low``, ``sampled_high``: percentiles of r when the episodes of every policy are drawn again; what is left
    of the doubt then is that of the policies. NaN: an r that does not exist, as one side is constant."""

    n: int
    r: float
    low: float
    high: float
    mmrv: float
    sampled_low: float = math.nan
    sampled_high: float = math.nan
    level: float = 0.95


def pearson(a: ArrayLike, b: ArrayLike) -> float:
    """Correlation of ``a [n]`` and ``b [n]``; NaN when either is constant.

    Raises:
        InvalidInput: not two lists of one length of at least 2.
    """
    x, y = _pair(a, b)
    x, y = x - x.mean(), y - y.mean()
    scale = math.sqrt(float(x @ x) * float(y @ y))
    return max(-1.0, min(1.0, float(x @ y) / scale)) if scale > 1e-15 else math.nan


def fisher(r: float, n: int, level: float = 0.95) -> tuple[float, float]:
    """Interval of a correlation ``r`` over ``n`` pairs: normal in artanh(r) with variance 1 / (n - 3) (Fisher 1921)."""
    if n < 4 or math.isnan(r):
        return -1.0, 1.0
    if abs(r) >= 1:
        return r, r
    half = NormalDist().inv_cdf((1 + level) / 2) / math.sqrt(n - 3)
    return math.tanh(math.atanh(r) - half), math.tanh(math.atanh(r) + half)


def mmrv(real: ArrayLike, other: ArrayLike) -> float:
    """Mean maximum rank violation (SIMPLER, arXiv 2405.05941) of ``other [n]`` against ``real [n]``; 0 is best.

    Of policies i and j the violation is ``|real_i - real_j|`` if ``other`` orders them otherwise than ``real`` does,
    ``(other_i < other_j) != (real_i < real_j)``, else 0; the measure is the mean over i of the largest over j. It is
    in the units of ``real``: by how much of it one errs who trusts the order that ``other`` gives. A tie counts as
    "not less", as in the definition.
    """
    x, y = _pair(real, other)
    apart = np.abs(x[:, None] - x[None])
    wrong = (y[:, None] < y[None]) != (x[:, None] < x[None])
    return float((apart * wrong).max(1).mean())


def agreement(
    real: Sequence[ArrayLike], other: Sequence[ArrayLike], level: float = 0.95, seed: int = 0, paired: bool = False
) -> Agreement:
    """Agreement of the means of ``real[i]`` and ``other[i]``, each a list of what policy i got in its episodes.

    ``paired``: episode k of every policy on both sides is of one start, and is drawn again as one.
    """
    if len(real) != len(other):
        raise InvalidInput(f"{len(real)} policies on one side, {len(other)} on the other")
    a, b = ([np.asarray(v, np.float64) for v in side] for side in (real, other))
    if any(not len(v) for v in (*a, *b)):
        raise InvalidInput("a policy without episodes has no mean")
    means = [np.array([v.mean() for v in side]) for side in (a, b)]
    r = pearson(*means)
    drawn = _drawn(a, b, np.random.default_rng(seed), paired)
    tail = 100 * (1 - level) / 2
    known = drawn[~np.isnan(drawn)]
    sampled = np.percentile(known, [tail, 100 - tail]) if len(known) else (math.nan, math.nan)
    return Agreement(len(a), r, *fisher(r, len(a), level), mmrv(*means), float(sampled[0]), float(sampled[1]), level)


def _drawn(a: Sequence[Values], b: Sequence[Values], rng: np.random.Generator, paired: bool) -> Values:
    """r of means over episodes drawn again, many times."""
    if paired:
        if len({len(v) for v in (*a, *b)}) != 1:
            raise InvalidInput("paired episodes: every policy needs as many on both sides")
        x, y = np.stack(a), np.stack(b)
        picks = rng.integers(0, x.shape[1], (_RESAMPLES, x.shape[1]))
        rows = [(x[:, pick].mean(1), y[:, pick].mean(1)) for pick in picks]
    else:
        sides = [
            np.stack([v[rng.integers(0, len(v), (_RESAMPLES, len(v)))].mean(1) for v in side], 1) for side in (a, b)
        ]
        rows = list(zip(*sides, strict=True))
    return np.array([pearson(p, q) for p, q in rows])


def _pair(a: ArrayLike, b: ArrayLike) -> tuple[Values, Values]:
    x, y = np.asarray(a, np.float64), np.asarray(b, np.float64)
    if x.shape != y.shape or x.ndim != 1 or len(x) < 2:
        raise InvalidInput(f"wanted two lists of one length of at least 2, got {list(x.shape)} and {list(y.shape)}")
    return x, y
