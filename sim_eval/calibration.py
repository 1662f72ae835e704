"""Whether the progress head can be taken at its word: probabilities of done, and progress against the true score."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from omni_loop.errors import InvalidInput

from .correlation import pearson

BINS = 10


@dataclass(frozen=True, slots=True)
class Bin:
    """What was said between ``low`` and ``high``: how often, in the mean, and what was true in the mean."""

    low: float
    high: float
    n: int
    said: float
    true: float


@dataclass(frozen=True, slots=True)
class Reliability:
    """Of ``n`` probabilities. ``brier``: mean squared error; ``base_brier`` is that of who always says the base rate.
    ``ece``: mean over what was said of |said - true| of its bin. ``f1`` of done at ``threshold``. ``bins`` holds those
    in which something is."""

    n: int
    base_rate: float
    brier: float
    base_brier: float
    ece: float
    f1: float
    precision: float
    recall: float
    bins: tuple[Bin, ...]
    threshold: float = 0.5


@dataclass(frozen=True, slots=True)
class Tracking:
    """Progress against the true score, both 0..1, of ``n`` ticks: mean absolute error, mean error (positive: it says
    too much), Pearson's r, and the curve by what was said."""

    n: int
    mae: float
    bias: float
    pearson: float
    ece: float
    bins: tuple[Bin, ...]


def binned(said: ArrayLike, true: ArrayLike, bins: int = BINS) -> tuple[Bin, ...]:
    """Bins of one width over 0..1 that are not empty; the last one includes 1."""
    p, t = _checked(said, true)
    at = np.minimum((p * bins).astype(int), bins - 1)
    return tuple(
        Bin(i / bins, (i + 1) / bins, int(here.sum()), float(p[here].mean()), float(t[here].mean()))
        for i in range(bins)
        if (here := at == i).any()
    )


def expected_error(bins: tuple[Bin, ...]) -> float:
    """Expected calibration error: |said - true| of the bins, weighed by how often each was said."""
    total = sum(b.n for b in bins)
    return sum(b.n * abs(b.said - b.true) for b in bins) / total


def reliability(said: ArrayLike, true: ArrayLike, bins: int = BINS, threshold: float = 0.5) -> Reliability:
    """Of probabilities ``said [n]`` in 0..1 against outcomes ``true [n]``, each 0 or 1.

    Raises:
        InvalidInput: nothing was said, or not a probability of something that is or is not.
    """
    p, t = _checked(said, true)
    if not np.isin(t, (0, 1)).all():
        raise InvalidInput("outcomes are 0 or 1")
    rate, called = float(t.mean()), p > threshold
    hits = float(t[called].sum())
    made = binned(p, t, bins)
    return Reliability(
        n=len(p),
        base_rate=rate,
        brier=float(np.square(p - t).mean()),
        base_brier=rate * (1 - rate),
        ece=expected_error(made),
        f1=_share(2 * hits, float(called.sum() + t.sum())),
        precision=_share(hits, float(called.sum())),
        recall=_share(hits, float(t.sum())),
        bins=made,
        threshold=threshold,
    )


def tracking(said: ArrayLike, true: ArrayLike, bins: int = BINS) -> Tracking:
    """Of progress ``said [n]`` against scores ``true [n]``, both in 0..1."""
    p, t = _checked(said, true)
    made = binned(p, t, bins)
    r = pearson(p, t) if len(p) > 1 else math.nan
    return Tracking(len(p), float(np.abs(p - t).mean()), float((p - t).mean()), r, expected_error(made), made)


def _checked(said: ArrayLike, true: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    p, t = np.asarray(said, np.float64), np.asarray(true, np.float64)
    if p.shape != t.shape or p.ndim != 1 or not len(p):
        raise InvalidInput(f"wanted as many statements as truths, got {list(p.shape)} and {list(t.shape)}")
    for name, v in (("what was said", p), ("what is true", t)):
        if not ((v >= 0) & (v <= 1)).all():
            raise InvalidInput(f"{name} lies outside 0..1: {v.min():g} to {v.max():g}")
    return p, t


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
