"""How many episodes it takes to see a difference of two success rates, and what so many episodes could see.

Everything is exact where it is computed from the test's own critical region: power is the probability of all outcomes
that the test rejects. Fisher's test beyond ``EXACT`` episodes per run, where summing takes long, is approximated, and
what is approximated says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from omni_loop.errors import InvalidInput

from . import sequential

EXACT = 700  # episodes of each run up to which Fisher's test is summed over all outcomes
MOST = 20_000  # episodes beyond which nobody plans
GAP = 1e-6  # rates that are nearer to each other are the same


@dataclass(frozen=True, slots=True)
class Pairing:
    """Probabilities that, on the same episode, only a and only b succeeds. ``correlation`` (phi) of the two outcomes;
    0: as if the seeds were not the same."""

    only_a: float
    only_b: float
    correlation: float

    @property
    def differing(self) -> float:
        return self.only_a + self.only_b


def pairing(a: float, b: float, *, correlation: float | None = None, differing: float | None = None) -> Pairing:
    """How two policies of success rates ``a`` and ``b`` go together: by ``correlation``, or by the share of episodes on
    which they differ; without either as if independent.

    Raises:
        InvalidInput: rates that do not differ or are no rates; what no two policies of these rates can have.
    """
    for name, rate in (("--from", a), ("--to", b)):
        if not 0 <= rate <= 1:
            raise InvalidInput(f"{name}: {rate:g} is no success rate, wanted from 0 to 1")
    if abs(a - b) < GAP:
        raise InvalidInput(f"--from and --to are both {a:g}: there is no difference to see")
    if correlation is not None and differing is not None:
        raise InvalidInput("--correlation and --discordant say the same thing twice: give one")
    scale = math.sqrt(a * (1 - a) * b * (1 - b))
    least, most = abs(a - b), min(a + b, 2 - a - b)  # of the share that differs
    if differing is None:
        differing = a + b - 2 * (a * b + (correlation or 0.0) * scale)
        if not least - 1e-9 <= differing <= most + 1e-9:
            low, high = ((a + b - d - 2 * a * b) / (2 * scale) if scale else 0.0 for d in (most, least))
            raise InvalidInput(
                f"--correlation: {correlation:g} is not possible with rates {a:g} and {b:g}; "
                f"from {low:.2f} to {high:.2f} is"
            )
    elif not least - 1e-9 <= differing <= most + 1e-9:
        raise InvalidInput(
            f"--discordant: rates {a:g} and {b:g} differ on a share from {least:g} to {most:g}, not on {differing:g}"
        )
    differing = min(max(differing, least), most)
    phi = (a + b - differing - 2 * a * b) / (2 * scale) if scale else 0.0
    return Pairing(max(0.0, (differing + a - b) / 2), max(0.0, (differing + b - a) / 2), phi)


def mcnemar_power(pair: Pairing, pairs: int, alpha: float = 0.05) -> float:
    """Probability that the exact McNemar test of ``pairs`` pairs has p <= ``alpha``. Exact."""
    from scipy.stats import binom

    differ = np.arange(pairs + 1)
    weight = binom.pmf(differ, pairs, pair.differing)
    theta = pair.only_a / pair.differing
    # Most that the weaker side may have when the test rejects: -1, never.
    k = binom.ppf(alpha / 2, differ, 0.5).astype(int)
    k = np.where(binom.cdf(k, differ, 0.5) <= alpha / 2, k, k - 1)
    rejects = np.where(k >= 0, binom.cdf(k, differ, theta) + binom.cdf(k, differ, 1 - theta), 0.0)
    return float((weight * rejects).sum())


def fisher_power(a: float, b: float, episodes: int, alpha: float = 0.05) -> float:
    """Probability that Fisher's exact test of two runs of ``episodes`` each, on other seeds, has p <= ``alpha``.
    Exact."""
    from scipy.stats import binom, hypergeom

    k = np.arange(episodes + 1)
    first, second = binom.pmf(k, episodes, a), binom.pmf(k, episodes, b)
    power = 0.0
    for total in range(2 * episodes + 1):
        own = np.arange(max(0, total - episodes), min(total, episodes) + 1)
        reach = float(first[own] @ second[total - own])
        if reach < 1e-12:
            continue
        law = hypergeom.pmf(own, 2 * episodes, episodes, total)
        power += float((first[own] * second[total - own])[_rejected(law, alpha)].sum())
    return power


def _rejected(law: NDArray[np.float64], alpha: float) -> NDArray[np.bool_]:
    """Which outcomes have a two-sided p of at most ``alpha``: the probability of all that are not likelier."""
    order = np.argsort(law, kind="stable")
    cumulative = np.cumsum(law[order])
    # Equal ones count together; the tolerance is that of R and scipy.
    last = np.searchsorted(law[order], law * (1 + 1e-7), side="right") - 1
    return np.asarray(cumulative[last] <= alpha * (1 + 1e-12))


def fisher_approximated(a: float, b: float, power: float, alpha: float = 0.05) -> int:
    """Episodes of each run by the normal approximation with continuity correction, which is close to Fisher's test.

    Sources: Fleiss, Tytun and Ury, "A simple approximation for calculating sample sizes for comparing independent
    proportions", Biometrics 36 (1980) 343-346.
    """
    z, zp, gap, mean = NormalDist().inv_cdf(1 - alpha / 2), NormalDist().inv_cdf(power), abs(a - b), (a + b) / 2
    n = (z * math.sqrt(2 * mean * (1 - mean)) + zp * math.sqrt(a * (1 - a) + b * (1 - b))) ** 2 / gap**2
    return math.ceil(n / 4 * (1 + math.sqrt(1 + 4 / (n * gap))) ** 2)


def sequential_power(pair: Pairing, most: int, alpha: float = 0.05) -> tuple[float, float]:
    """Of the sequential test that gives up after ``most`` pairs: probability of a verdict, and mean number of pairs.
    Exact, for one that looks after every pair."""
    alive = survival(pair, most, alpha)
    return float(1 - alive[-1]), float(alive[:-1].sum())


def survival(pair: Pairing, most: int, alpha: float = 0.05) -> NDArray[np.float64]:
    """float64[most + 1]: probability that the sequential test has not decided after 0, 1, ... ``most`` pairs."""
    from scipy.stats import binom

    reach = int(binom.ppf(1 - 1e-12, most, pair.differing)) + 1
    by_differing = sequential.undecided(pair.only_a / pair.differing, min(most, reach), alpha)
    alive = np.ones(most + 1)
    for t in range(1, most + 1):
        differ = np.arange(min(t, len(by_differing) - 1) + 1)
        alive[t] = binom.pmf(differ, t, pair.differing) @ by_differing[differ]
    return alive


def least(enough: Callable[[int], bool], start: int = 8) -> int | None:
    """The fewest episodes with which ``enough``; None: more than ``MOST``. Power grows with small teeth: the last tooth
    that is too low lies below what is returned, as far as 8 episodes back and forth tell."""
    high = start
    while not enough(high):
        if high >= MOST:
            return None
        high = min(MOST, high * 2)
    low = high // 2 if high > start else 1
    while low < high:
        middle = (low + high) // 2
        if enough(middle):
            high = middle
        else:
            low = middle + 1
    while any(not enough(n) for n in range(high + 1, high + 9)):
        high += 1
    return high
