from __future__ import annotations

import math

import numpy as np
import pytest

from omni_loop.errors import InvalidInput
from omni_loop_sim_eval.power import (
    fisher_approximated,
    fisher_power,
    least,
    mcnemar_power,
    pairing,
    sequential_power,
)
from omni_loop_sim_eval.stats import mcnemar


def test_mcnemar_power_is_the_sum_over_all_outcomes() -> None:
    pair, n = pairing(0.5, 0.8, correlation=0.2), 23
    total = 0.0
    for a in range(n + 1):
        for b in range(n + 1 - a):
            if mcnemar(a, b) <= 0.05:
                ways = math.comb(n, a) * math.comb(n - a, b)
                total += ways * pair.only_a**a * pair.only_b**b * (1 - pair.differing) ** (n - a - b)
    assert mcnemar_power(pair, n) == pytest.approx(total, abs=1e-12)


def test_mcnemar_power_agrees_with_simulation() -> None:
    pair, rng = pairing(0.6, 0.8), np.random.default_rng(0)
    counts = rng.multinomial(60, [pair.only_a, pair.only_b, 1 - pair.differing], size=4000)
    seen = np.mean([mcnemar(int(a), int(b)) <= 0.05 for a, b, _ in counts])
    assert mcnemar_power(pair, 60) == pytest.approx(seen, abs=0.025)


def test_fisher_power_is_the_sum_over_scipys_test() -> None:
    stats = pytest.importorskip("scipy.stats")
    a, b, n = 0.3, 0.85, 14
    total = 0.0
    for k in range(n + 1):
        for m in range(n + 1):
            if stats.fisher_exact([[k, n - k], [m, n - m]]).pvalue <= 0.05:
                total += stats.binom.pmf(k, n, a) * stats.binom.pmf(m, n, b)
    assert fisher_power(a, b, n) == pytest.approx(total, abs=1e-9)


def test_sample_sizes_known_from_tables() -> None:
    """Fleiss, Levin and Paik (2003), table A.4 for alpha 0.05, power 0.8: 0.6 against 0.7 wants 376 of each run, with
    the correction for continuity, and 0.4 against 0.6 wants 107. Fisher's own comes close."""
    assert fisher_approximated(0.6, 0.7, 0.8) == 376
    assert fisher_approximated(0.4, 0.6, 0.8) == 107
    assert fisher_power(0.4, 0.6, 107) == pytest.approx(0.8, abs=0.02)
    n = least(lambda n: fisher_power(0.4, 0.9, n) >= 0.8)
    assert n is not None
    assert abs(n - fisher_approximated(0.4, 0.9, 0.8)) <= 2


def test_correlated_pairs_need_fewer_episodes() -> None:
    def needed(correlation: float) -> int:
        pair = pairing(0.6, 0.7, correlation=correlation)
        assert pair.correlation == pytest.approx(correlation)
        found = least(lambda n: mcnemar_power(pair, n) >= 0.8)
        assert found is not None
        assert mcnemar_power(pair, found) >= 0.8 > mcnemar_power(pair, found - 1)
        return found

    assert needed(0.0) > needed(0.4) > needed(0.7)
    assert least(lambda n: False) is None


def test_pairing_by_share_or_by_correlation() -> None:
    by_share = pairing(0.6, 0.7, differing=0.2)
    assert (by_share.only_a, by_share.only_b) == pytest.approx((0.05, 0.15))
    again = pairing(0.6, 0.7, correlation=by_share.correlation)
    assert again.only_b == pytest.approx(0.15)
    assert pairing(0.0, 1.0).differing == 1


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"a": 0.6, "b": 0.6}, "no difference to see"),
        ({"a": 60, "b": 0.7}, "--from: 60 is no success rate"),
        ({"a": 0.1, "b": 0.9, "correlation": 0.5}, r"--correlation: 0.5 is not possible.*from -1.00 to 0.11 is"),
        ({"a": 0.6, "b": 0.7, "differing": 0.05}, r"--discordant: .*from 0.1 to 0.7, not on 0.05"),
        ({"a": 0.6, "b": 0.7, "differing": 0.2, "correlation": 0.1}, "give one"),
    ],
)
def test_what_no_two_policies_can_do_is_refused(given: dict[str, float], says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        pairing(**given)


def test_sequential_power_grows_with_what_it_may_take() -> None:
    pair = pairing(0.5, 0.8)
    few, many = sequential_power(pair, 40), sequential_power(pair, 200)
    assert few[0] < many[0] > 0.95
    assert few[1] < many[1] < 100
