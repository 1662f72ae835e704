"""The difference of two success rates on the same episodes, with an interval; many comparisons at once."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from statistics import NormalDist

from omni_loop.errors import InvalidInput

from .stats import Paired


@dataclass(frozen=True, slots=True)
class Difference:
    """Rate of a minus rate of b, -1..1, with a two-sided interval."""

    value: float
    low: float
    high: float
    level: float = 0.95

    def __str__(self) -> str:
        return f"{100 * self.value:+.1f} [{100 * self.low:+.1f}, {100 * self.high:+.1f}] points"


def difference(only_a: int, only_b: int, pairs: int, level: float = 0.95) -> Difference:
    """The score interval of Tango for the difference of paired proportions.

    A difference d is in it when the score test does not reject it: when |only_a - only_b - pairs d| is less than z
    standard errors, these taken at the most likely probabilities that have the difference d.

    Args:
        only_a: pairs in which only a succeeded; ``only_b`` likewise.
        pairs: all pairs, also those that agree. Without any the interval is -1..1.

    Sources:
        Tango, "Equivalence test and confidence interval for the difference in proportions for the paired-sample
        design", Statistics in Medicine 17 (1998) 891-908.
    """
    if min(only_a, only_b) < 0 or only_a + only_b > pairs:
        raise InvalidInput(f"{only_a} and {only_b} pairs that differ, of {pairs} pairs")
    if not 0 < level < 1:
        raise InvalidInput(f"level is {level:g}, wanted between 0 and 1")
    if pairs == 0:
        return Difference(0.0, -1.0, 1.0, level)
    value, z = (only_a - only_b) / pairs, NormalDist().inv_cdf((1 + level) / 2)
    low = _edge(only_a, only_b, pairs, value, -1.0, z)
    high = _edge(only_a, only_b, pairs, value, 1.0, z)
    return Difference(value, low, high, level)


def _edge(only_a: int, only_b: int, n: int, inside: float, outside: float, z: float) -> float:
    """Where the score test begins to reject between ``inside``, which it does not, and ``outside``."""
    if abs(_score(only_a, only_b, n, outside)) <= z:
        return outside
    for _ in range(60):
        middle = (inside + outside) / 2
        if abs(_score(only_a, only_b, n, middle)) > z:
            outside = middle
        else:
            inside = middle
    return inside


def _score(only_a: int, only_b: int, n: int, d: float) -> float:
    """Tango's statistic: the difference seen minus ``d``, in standard errors under ``d``."""
    far = only_a - only_b - n * d
    if far == 0:
        return 0.0
    variance = n * (2 * nuisance(only_a, only_b, n, d) + d * (1 - d))
    return math.copysign(math.inf, far) if variance <= 0 else far / math.sqrt(variance)


def nuisance(only_a: int, only_b: int, n: int, d: float) -> float:
    """The most likely probability that only b succeeds, among those where only a does so with ``d`` more (Tango)."""
    a, b, c = 2 * n, (2 * n - only_a + only_b) * d - only_a - only_b, -only_b * d * (1 - d)
    root = math.sqrt(max(0.0, b * b - 4 * a * c))
    # Of the two forms of a quadratic's root the one that subtracts nothing of the same size.
    q = (root - b) / (2 * a) if b <= 0 else -2 * c / (root + b)
    return max(q, 0.0, -d)


def of(pairs: Paired, level: float = 0.95) -> Difference:
    """The difference between two runs. Over several tasks it is on the safe side: pairs from given tasks, so many from
    each, spread less than pairs of tasks drawn at random, which the interval is made for."""
    return difference(pairs.only_a, pairs.only_b, pairs.pairs, level)


def holm[K: Hashable](p: Mapping[K, float]) -> dict[K, float]:
    """p-values adjusted for their number, so that all that stay below alpha are right together with 1 - alpha.

    Sources: Holm, "A simple sequentially rejective multiple test procedure", Scand. J. Statistics 6 (1979) 65-70.
    """
    worst = 0.0
    adjusted: dict[K, float] = {}
    for i, (key, value) in enumerate(sorted(p.items(), key=lambda item: item[1])):
        worst = max(worst, min(1.0, (len(p) - i) * value))
        adjusted[key] = worst
    return adjusted
