from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from omni_loop.errors import InvalidInput
from omni_loop_sim_eval.difference import difference, holm, of
from omni_loop_sim_eval.pooled import pooled
from omni_loop_sim_eval.stats import interval, paired


def test_tango_known_values() -> None:
    """Fagerland, Lydersen and Laake (2014), table of the airway example: 1 and 7 of 21 pairs differ."""
    found = difference(1, 7, 21)
    assert (round(found.value, 3), round(found.low, 3), round(found.high, 3)) == (-0.286, -0.517, -0.026)


def test_interval_inverts_the_score_test_of_a_likelihood_maximised_by_brute_force() -> None:
    """The standard error at a difference is that of its most likely probabilities; here they are searched for."""
    z = 1.959964
    for b, c, n in ((12, 2, 50), (3, 3, 20), (9, 0, 30), (0, 1, 5)):
        found = difference(b, c, n)
        for d, inside in (
            (found.low + 1e-3, True), (found.low - 1e-3, False), (found.high - 1e-3, True), (found.high + 1e-3, False)
        ):  # fmt: skip
            if not -1 < d < 1:
                continue
            q = np.linspace(max(0.0, -d), (1 - d) / 2, 400_001)[1:-1]  # only b; only a is q + d
            likelihood = c * np.log(q) + (b * np.log(q + d) if b else 0) + (n - b - c) * np.log1p(-2 * q - d)
            best = q[np.argmax(likelihood)]
            score = (b - c - n * d) / math.sqrt(n * (2 * best + d - d * d))
            assert (abs(score) <= z) == inside, (b, c, n, d)


def test_coverage_of_the_paired_interval_by_exact_enumeration() -> None:
    """Every outcome of n pairs, weighed by its probability: the true difference is covered close to 95 %."""
    n = 30
    cells = [(b, c) for b in range(n + 1) for c in range(n + 1 - b)]
    bounds = {cell: difference(*cell, n) for cell in cells}
    log = [math.lgamma(i + 1) for i in range(n + 1)]
    covered = []
    for only_a, only_b in itertools.product((0.02, 0.1, 0.25, 0.45), repeat=2):
        rest, truth = 1 - only_a - only_b, only_a - only_b
        total = 0.0
        for b, c in cells:
            found = bounds[b, c]
            if found.low - 1e-9 <= truth <= found.high + 1e-9:
                logs = b * math.log(only_a) + c * math.log(only_b) + (n - b - c) * math.log(rest)
                total += math.exp(log[n] - log[b] - log[c] - log[n - b - c] + logs)
        covered.append(total)
    assert min(covered) > 0.93, covered
    assert 0.945 < np.mean(covered) < 0.975, covered


def test_paired_interval_is_antisymmetric_holds_the_difference_and_shrinks() -> None:
    for b, c, n in ((0, 0, 10), (10, 0, 10), (4, 1, 10), (0, 7, 40), (20, 20, 40)):
        one, other = difference(b, c, n), difference(c, b, n)
        assert one.low == pytest.approx(-other.high, abs=1e-9)
        assert -1 <= one.low <= one.value <= one.high <= 1
    assert difference(100, 20, 400).high - difference(100, 20, 400).low < difference(10, 2, 40).high
    assert difference(4, 1, 10, 0.99).low < difference(4, 1, 10).low
    assert (difference(0, 0, 0).low, difference(0, 0, 0).high) == (-1, 1)
    assert of(paired({1: True, 2: True, 3: False}, {1: True, 2: False, 3: False})) == difference(1, 0, 3)


def test_bad_counts_are_refused() -> None:
    with pytest.raises(InvalidInput, match="5 and 6 pairs that differ, of 10 pairs"):
        difference(5, 6, 10)
    with pytest.raises(InvalidInput, match="level"):
        difference(1, 1, 10, 95)


def test_holm_known_values() -> None:
    """Of four p-values: the smallest times 4, the next times 3, ..., none below one before it."""
    adjusted = holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005})
    assert adjusted == pytest.approx({"d": 0.02, "a": 0.03, "c": 0.06, "b": 0.06})
    assert holm({"a": 0.9, "b": 0.8}) == {"b": 1.0, "a": 1.0}
    assert holm({}) == {}


def test_pooled_over_one_or_equal_tasks_is_wilson() -> None:
    assert pooled({"": (9, 10)}) == (0.9, interval(9, 10))
    rate, bounds = pooled({"a": (20, 50), "b": (20, 50)})
    assert (rate, bounds.low, bounds.high) == pytest.approx((0.4, interval(40, 100).low, interval(40, 100).high))
    rate, bounds = pooled({str(i): (50, 50) for i in range(6)})
    assert (rate, bounds.high) == (1.0, 1.0)
    assert bounds.low == pytest.approx(interval(300, 300).low)


def test_pooled_over_different_tasks_is_narrower_but_never_more_than_the_tasks_allow() -> None:
    _, bounds = pooled({"easy": (50, 50), "hard": (2, 50)})
    plain = interval(52, 100)
    assert plain.low < bounds.low < 0.52 < bounds.high < plain.high
    rate, bounds = pooled({"a": (9, 10), "b": (300, 1000)})
    assert rate == pytest.approx(309 / 1010), "an episode counts as an episode"
    assert bounds.low < rate < bounds.high
    assert pooled({"a": (1, 2), "b": (0, 2)}, "clopper-pearson")[1] == interval(1, 4, "clopper-pearson")
    with pytest.raises(InvalidInput, match="no task"):
        pooled({})


@pytest.mark.parametrize("rates", [(0.5, 0.5), (0.95, 0.2), (0.9, 0.98), (0.99, 0.6)])
def test_coverage_of_the_pooled_interval_by_exact_enumeration(rates: tuple[float, float]) -> None:
    n, truth = 25, sum(rates) / 2
    law = [[math.comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(n + 1)] for p in rates]
    covered = 0.0
    for k, m in itertools.product(range(n + 1), repeat=2):
        _, bounds = pooled({"a": (k, n), "b": (m, n)})
        covered += law[0][k] * law[1][m] * (bounds.low <= truth <= bounds.high)
    assert 0.93 < covered < 0.99, covered
