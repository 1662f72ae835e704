from __future__ import annotations

import numpy as np
import pytest

from omni_loop.errors import InvalidInput, UnknownName
from omni_loop_sim_eval.stats import interval, mcnemar, paired, spread

METHODS = ("wilson", "clopper-pearson", "jeffreys")


@pytest.mark.parametrize(
    ("k", "n", "low", "high"),
    [  # of the measured tables this project cites, in percent, and Newcombe (1998), table I: 81/263 and 15/148
        (182, 200, 0.862, 0.942),
        (37, 40, 0.801, 0.974),
        (50, 50, 0.929, 1.0),
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_known_values(k: int, n: int, low: float, high: float) -> None:
    bounds = interval(k, n)
    decimals = 4 if round(low, 3) != low or round(high, 3) != high else 3
    assert (round(bounds.low, decimals), round(bounds.high, decimals)) == (low, high)


@pytest.mark.parametrize(
    ("k", "n", "low", "high"),
    [(81, 263, 0.2527, 0.3676), (15, 148, 0.0578, 0.1617), (0, 20, 0.0, 0.1684), (1, 29, 0.0009, 0.1776)],
)
def test_clopper_pearson_known_values(k: int, n: int, low: float, high: float) -> None:
    """Newcombe (1998), table I, method 5."""
    bounds = interval(k, n, "clopper-pearson")
    assert (round(bounds.low, 4), round(bounds.high, 4)) == (low, high)


@pytest.mark.parametrize("n", [1, 7, 50])
def test_agrees_with_scipy(n: int) -> None:
    stats = pytest.importorskip("scipy.stats")
    for k in range(n + 1):
        test = stats.binomtest(k, n)
        for method, theirs in (("wilson", "wilson"), ("clopper-pearson", "exact")):
            ours, want = interval(k, n, method), test.proportion_ci(0.95, theirs)
            assert ours.low == pytest.approx(want.low, abs=1e-9)
            assert ours.high == pytest.approx(want.high, abs=1e-9)
        jeffreys = interval(k, n, "jeffreys")
        want_low, want_high = stats.beta.ppf([0.025, 0.975], k + 0.5, n - k + 0.5)
        assert jeffreys.low == pytest.approx(want_low if k else 0, abs=1e-9)
        assert jeffreys.high == pytest.approx(want_high if k < n else 1, abs=1e-9)


@pytest.mark.parametrize("method", METHODS)
def test_intervals_are_symmetric_hold_the_rate_and_shrink(method: str) -> None:
    for n in (3, 20, 300):
        for k in range(0, n + 1, max(1, n // 10)):
            a, b = interval(k, n, method), interval(n - k, n, method)
            assert a.low == pytest.approx(1 - b.high, abs=1e-9)
            assert 0 <= a.low <= k / n <= a.high <= 1
    wide, narrow = interval(9, 10, method), interval(900, 1000, method)
    assert narrow.high - narrow.low < wide.high - wide.low
    assert interval(5, 10, method, level=0.99).low < interval(5, 10, method).low


def test_nothing_observed_says_nothing() -> None:
    assert (interval(0, 0).low, interval(0, 0).high) == (0, 1)


def test_bad_counts_and_names() -> None:
    with pytest.raises(InvalidInput, match="5 successes of 4 episodes"):
        interval(5, 4)
    with pytest.raises(UnknownName, match=r"'wilsen'. Did you mean 'wilson'"):
        interval(1, 2, "wilsen")
    with pytest.raises(InvalidInput, match="level"):
        interval(1, 2, level=95)
    with pytest.raises(InvalidInput, match="negative"):
        mcnemar(-1, 2)


@pytest.mark.parametrize(
    ("b", "c", "p"), [(0, 0, 1.0), (5, 5, 1.0), (1, 0, 1.0), (6, 0, 0.03125), (10, 2, 158 / 4096), (2, 10, 158 / 4096)]
)
def test_mcnemar_is_the_exact_binomial(b: int, c: int, p: float) -> None:
    assert mcnemar(b, c) == pytest.approx(p, abs=1e-12)
    scipy_stats = pytest.importorskip("scipy.stats")
    if b + c:
        assert mcnemar(b, c) == pytest.approx(scipy_stats.binomtest(b, b + c, 0.5).pvalue, abs=1e-12)


def test_mcnemar_of_many_pairs_neither_overflows_nor_loses_its_tail() -> None:
    assert mcnemar(1000, 1000) == 1.0
    assert 0 < mcnemar(700, 1300) < 1e-40


def test_paired_counts_common_seeds_only() -> None:
    a = {1: True, 2: True, 3: False, 4: False, 9: True}
    b = {1: True, 2: False, 3: True, 4: False, 8: True}
    found = paired(a, b)
    assert (found.both, found.only_a, found.only_b, found.neither, found.pairs) == (1, 1, 1, 1, 4)
    assert found.p == 1.0
    with pytest.raises(InvalidInput, match="no seed in common"):
        paired({1: True}, {2: True})


def test_spread() -> None:
    values = np.arange(101, dtype=float)
    assert spread(values) == {"p50": 50.0, "p99": 99.0, "mean": 50.0}
    assert spread([]) == {"p50": 0.0, "p99": 0.0, "mean": 0.0}
