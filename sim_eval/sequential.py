"""Which of two policies is better, asked after every pair of episodes without paying for having looked.

Both play the same episodes. Of the pairs in which only one succeeded, each side has as many as a fair coin gives it
when neither policy is better, whatever the tasks. Betting on that coin with a fortune of 1, at odds that would be fair,
nobody makes 1/alpha of it but with probability alpha, at any time and however it was chosen (Ville). We bet on both
sides by all amounts at once, weighed by an arcsine law: the fortune is a mixture martingale.

The same bets against "the difference is m", for every m, give a confidence sequence: those m against which too little
was won. It leaves 0 out exactly when the test has decided.

Sources:
    Robbins, "Statistical methods related to the law of the iterated logarithm", Ann. Math. Stat. 41 (1970) (mixtures).
    Waudby-Smith and Ramdas, "Estimating means of bounded random variables by betting", J. R. Stat. Soc. B 86 (2024)
    (confidence sequences from bets).
    Ramdas, Grünwald, Vovk and Shafer, "Game-theoretic statistics and safe anytime-valid inference", Statistical Science
    38 (2023) (e-processes, p-values valid at any time).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from omni_loop.errors import InvalidInput

from .difference import Difference

Verdict = Literal["a", "b", "same", ""]  # better; within the margin; not decided
_NODES = 256  # of the mixture; a mixture of few bets is as valid as one of all
_COSINES = np.cos((np.arange(_NODES) + 0.5) * np.pi / _NODES)  # quantiles of the arcsine law on -1..1


def log_wealth(only_a: int, only_b: int) -> float:
    """Log of the fortune against "neither is better": 0 at the start; it depends on the pairs that differ alone.

    In closed form: a Beta(1/2, 1/2) mixture of coins against the fair one.
    """
    n = only_a + only_b
    beta = math.lgamma(only_a + 0.5) + math.lgamma(only_b + 0.5) - math.lgamma(n + 1)
    return beta - math.log(math.pi) + n * math.log(2)


def log_wealth_against(only_a: int, only_b: int, pairs: int, m: float) -> float:
    """Log of the fortune against "the rate of a minus that of b is m", -1 < m < 1: bets of both signs, each at most
    what cannot be lost. Not defined by a closed form but for m = 0, where it is :func:`log_wealth` up to the nodes."""
    bets = _bets(m)
    same = pairs - only_a - only_b
    with np.errstate(divide="ignore"):
        logs = only_a * np.log1p(bets * (1 - m)) + only_b * np.log1p(-bets * (1 + m)) + same * np.log1p(-bets * m)
    top = float(logs.max())
    return top + math.log(float(np.exp(logs - top).mean()))


def _bets(m: float) -> NDArray[np.float64]:
    """Stakes on the difference of a pair, -1, 0 or 1, exceeding ``m``: half the nodes of a shape per sign."""
    least, most = -1 / (1 - m), 1 / (1 + m)
    return np.where(_COSINES > 0, _COSINES * most, -_COSINES * least)


def confidence(only_a: int, only_b: int, pairs: int, alpha: float = 0.05) -> Difference:
    """The differences that are not refuted: a confidence sequence, right at all times at once with 1 - ``alpha``."""
    value = (only_a - only_b) / pairs if pairs else 0.0
    low = _edge(only_a, only_b, pairs, value, -1.0, alpha)
    high = _edge(only_a, only_b, pairs, value, 1.0, alpha)
    return Difference(value, low, high, 1 - alpha)


def _edge(only_a: int, only_b: int, pairs: int, inside: float, outside: float, alpha: float) -> float:
    """Between the difference seen, against which nothing is won, and the end of the scale."""
    end, limit = outside, -math.log(alpha)
    if abs(inside - outside) < 1e-12:
        return end
    for _ in range(40):
        middle = (inside + outside) / 2
        if log_wealth_against(only_a, only_b, pairs, middle) >= limit:
            outside = middle
        else:
            inside = middle
    return end if abs(outside - end) < 1e-9 else outside


@dataclass(frozen=True, slots=True)
class State:
    """After ``pairs`` pairs. ``p`` may be read at any time; ``verdict`` is kept once there is one."""

    pairs: int
    both: int
    only_a: int
    only_b: int
    p: float
    verdict: Verdict = ""


class SequentialTest:
    """Takes pairs in order.

    Args:
        alpha: probability of a verdict that is wrong, over all looks together.
        margin: 0: a verdict says which is better. More, in 0..1: "same" is one too, once the difference is surely
            within -margin..margin.
    """

    def __init__(self, alpha: float = 0.05, margin: float = 0.0) -> None:
        if not 0 < alpha < 1:
            raise InvalidInput(f"alpha is {alpha:g}, wanted between 0 and 1")
        if not 0 <= margin < 1:
            raise InvalidInput(f"margin is {margin:g}, wanted from 0 to below 1")
        self.alpha, self.margin = alpha, margin
        self._cells = {(x, y): 0 for x in (True, False) for y in (True, False)}
        self._best = 0.0  # highest log of the fortune
        self._verdict: Verdict = ""

    def add(self, a: bool, b: bool) -> State:
        """The next pair; returns the state after it."""
        self._cells[a, b] += 1
        only_a, only_b = self._cells[True, False], self._cells[False, True]
        if a != b:
            self._best = max(self._best, log_wealth(only_a, only_b))
        if not self._verdict:
            self._verdict = self._decide(only_a, only_b, changed=a != b)
        return self.state

    def _decide(self, only_a: int, only_b: int, changed: bool) -> Verdict:
        if changed and log_wealth(only_a, only_b) >= -math.log(self.alpha):
            return "a" if only_a > only_b else "b"
        if self.margin:
            seen = self.interval
            if -self.margin < seen.low and seen.high < self.margin:
                return "same"
        return ""

    @property
    def state(self) -> State:
        cells = self._cells
        p = min(1.0, math.exp(-self._best))
        return State(sum(cells.values()), cells[True, True], cells[True, False], cells[False, True], p, self._verdict)

    @property
    def interval(self) -> Difference:
        """The confidence sequence now."""
        return confidence(self._cells[True, False], self._cells[False, True], sum(self._cells.values()), self.alpha)


def replay(pairs: Iterable[tuple[bool, bool]], alpha: float = 0.05, margin: float = 0.0) -> list[State]:
    """States after each pair, up to the one with a verdict."""
    test, states = SequentialTest(alpha, margin), []
    for a, b in pairs:
        states.append(test.add(a, b))
        if states[-1].verdict:
            break
    return states


def undecided(theta: float, most: int, alpha: float = 0.05) -> NDArray[np.float64]:
    """float64[most + 1]: probability that the test has not decided after 0, 1, ... pairs that differ, each favouring a
    with ``theta``. Exact: the law of a's count among paths that have not crossed, pair by pair."""
    limit, alive = -math.log(alpha), np.zeros(most + 1)
    law = np.array([1.0])  # by a's count
    alive[0] = 1.0
    for n in range(1, most + 1):
        law = np.concatenate([law * (1 - theta), [0.0]]) + np.concatenate([[0.0], law * theta])
        law[crossed(n, limit)] = 0.0
        alive[n] = law.sum()
    return alive


def crossed(n: int, limit: float) -> NDArray[np.bool_]:
    """bool[n + 1]: by a's count among ``n`` pairs that differ, whether the log of the fortune reaches ``limit``."""
    from scipy.special import gammaln

    k = np.arange(n + 1)
    logs = gammaln(k + 0.5) + gammaln(n - k + 0.5) - gammaln(n + 1) - math.log(math.pi) + n * math.log(2)
    return np.asarray(logs >= limit)
