"""Statistics of success: intervals for k of n, and paired comparison of two runs by seed."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal, get_args

import numpy as np

from omni_loop.errors import InvalidInput, UnknownName, nearest

Method = Literal["wilson", "clopper-pearson", "jeffreys"]


@dataclass(frozen=True, slots=True)
class Interval:
    """Two-sided interval of a success probability, 0..1."""

    low: float
    high: float
    method: str = "wilson"
    level: float = 0.95

    def __str__(self) -> str:
        return f"[{100 * self.low:.0f}–{100 * self.high:.0f} %]"


def interval(successes: int, episodes: int, method: str = "wilson", level: float = 0.95) -> Interval:
    """The interval for ``successes`` of ``episodes``; nothing observed gives 0..1.

    ``wilson`` (default): score interval, good coverage at any n. ``clopper-pearson``: never covers less than
    ``level``, wide. ``jeffreys``: equal-tailed posterior under Beta(1/2, 1/2), with its usual ends at 0 and n.
    """
    if method not in get_args(Method):
        raise UnknownName(f"no interval is called {method!r}.{nearest(method, get_args(Method))}")
    if not 0 <= successes <= episodes:
        raise InvalidInput(f"{successes} successes of {episodes} episodes")
    if not 0 < level < 1:
        raise InvalidInput(f"level is {level:g}, wanted between 0 and 1")
    if episodes == 0:
        return Interval(0.0, 1.0, method, level)
    low, high = _wilson(successes, episodes, level) if method == "wilson" else _beta(successes, episodes, method, level)
    # Exact at the ends: no sample of only failures speaks against a probability of 0.
    return Interval(0.0 if successes == 0 else low, 1.0 if successes == episodes else high, method, level)


def _wilson(k: int, n: int, level: float) -> tuple[float, float]:
    z = NormalDist().inv_cdf((1 + level) / 2)
    p, shrink = k / n, 1 + z * z / n
    centre = (p + z * z / (2 * n)) / shrink
    half = z / shrink * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return centre - half, centre + half


def _beta(k: int, n: int, method: str, level: float) -> tuple[float, float]:
    from scipy.special import betaincinv

    tail = (1 - level) / 2
    if method == "jeffreys":
        a, b = k + 0.5, n - k + 0.5
        return float(betaincinv(a, b, tail)), float(betaincinv(a, b, 1 - tail))
    low = float(betaincinv(k, n - k + 1, tail)) if k else 0.0
    high = float(betaincinv(k + 1, n - k, 1 - tail)) if k < n else 1.0
    return low, high


def mcnemar(only_a: int, only_b: int) -> float:
    """Exact two-sided p of McNemar's test: of the pairs that differ, is one side favoured?"""
    if only_a < 0 or only_b < 0:
        raise InvalidInput(f"counts of pairs cannot be negative: {only_a}, {only_b}")
    n, k = only_a + only_b, min(only_a, only_b)
    return min(1.0, 2 * sum(math.comb(n, i) for i in range(k + 1)) / int(2**n))


@dataclass(frozen=True, slots=True)
class Paired:
    """Two runs over the same episodes: pairs in which both, only one or neither succeeded. ``p``: exact McNemar, over
    several tasks too: where neither policy is better, each pair that differs is a fair coin, whatever the task."""

    both: int
    only_a: int
    only_b: int
    neither: int
    p: float

    @property
    def pairs(self) -> int:
        return self.both + self.only_a + self.only_b + self.neither


def paired[K: Hashable](a: Mapping[K, bool], b: Mapping[K, bool]) -> Paired:
    """Compare successes by key: a seed, or a task and a seed. Keys only one run has are left out; none in common is an
    error."""
    common = a.keys() & b.keys()
    if not common:
        raise InvalidInput("the two runs have no seed in common; pairing needs the same episodes")
    counts = {(x, y): sum(a[s] == x and b[s] == y for s in common) for x in (True, False) for y in (True, False)}
    only_a, only_b = counts[True, False], counts[False, True]
    return Paired(counts[True, True], only_a, only_b, counts[False, False], mcnemar(only_a, only_b))


def spread(values: Iterable[float]) -> dict[str, float]:
    """``{"p50", "p99", "mean"}`` rounded to a microsecond's worth; zeros for nothing."""
    v = np.fromiter(values, np.float64)
    if not len(v):
        return {"p50": 0.0, "p99": 0.0, "mean": 0.0}
    return {
        "p50": round(float(np.percentile(v, 50)), 3),
        "p99": round(float(np.percentile(v, 99)), 3),
        "mean": round(float(v.mean()), 3),
    }
