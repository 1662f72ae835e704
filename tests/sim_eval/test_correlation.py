"""Hand-computed agreements of evaluations."""

from __future__ import annotations

import math

import numpy as np
import pytest

from omni_loop.errors import InvalidInput
from omni_loop_sim_eval.correlation import agreement, fisher, mmrv, pearson


def test_pearson_by_hand() -> None:
    # Deviations (-1, 0, 1) and (-4/3, -1/3, 5/3): 3 / sqrt(2 * 42 / 9).
    assert pearson([1, 2, 3], [1, 2, 4]) == pytest.approx(3 / math.sqrt(2 * 42 / 9))
    assert pearson([0, 1], [5, 3]) == -1
    assert math.isnan(pearson([1, 2, 3], [0, 0, 0]))


def test_fisher_by_hand() -> None:
    # r = 0.8, n = 7: artanh 1.098612 -+ 1.959964 / 2.
    low, high = fisher(0.8, 7)
    assert low == pytest.approx(math.tanh(1.098612 - 0.979982), abs=1e-6)
    assert high == pytest.approx(math.tanh(1.098612 + 0.979982), abs=1e-6)
    assert fisher(0.99, 3) == (-1, 1), "three policies say nothing"
    assert fisher(math.nan, 9) == (-1, 1)


def test_rank_violation_by_hand() -> None:
    assert mmrv([0.1, 0.5, 0.9], [1, 2, 3]) == 0
    # 0.5 and 0.9 are swapped: each errs by 0.4, the first by nothing.
    assert mmrv([0.1, 0.5, 0.9], [1, 3, 2]) == pytest.approx((0 + 0.4 + 0.4) / 3)
    # Reversed: the largest violations are 0.8, 0.4 and 0.8.
    assert mmrv([0.1, 0.5, 0.9], [3, 2, 1]) == pytest.approx((0.8 + 0.4 + 0.8) / 3)
    # A tie is "not less": (1 < 1) is false where (0 < 0.9) is true, and as false as (0.9 < 0) the other way round.
    assert mmrv([0.0, 0.9], [1, 1]) == pytest.approx((0.9 + 0) / 2)
    assert mmrv([0.3, 0.3], [2, 2]) == 0


def test_rank_violation_is_the_published_sum_over_pairs() -> None:
    rng = np.random.default_rng(0)
    real, other = rng.random(6), rng.random(6)
    worst = [
        max(abs(real[i] - real[j]) * float((other[i] < other[j]) != (real[i] < real[j])) for j in range(6))
        for i in range(6)
    ]
    assert mmrv(real, other) == pytest.approx(sum(worst) / 6)


def test_agreement_is_of_means_and_says_how_sure_it_is() -> None:
    real = [[0, 0, 0, 1], [0, 1, 0, 1], [1, 1, 1, 1], [1, 1, 1, 0]]
    other = [[0.1, 0.2], [0.4, 0.5], [0.9, 0.8], [0.7, 0.8]]
    found = agreement(real, other)
    assert found.r == pytest.approx(pearson([0.25, 0.5, 1, 0.75], [0.15, 0.45, 0.85, 0.75]))
    assert (found.n, found.mmrv) == (4, 0)
    assert found.low < found.sampled_low < found.r < found.sampled_high <= 1
    assert agreement(real, other) == found, "the same numbers again"


def test_drawing_starts_together_keeps_what_they_share() -> None:
    hard = np.array([0.0, 0.9, 0.1, 1.0, 0.2, 0.8])  # the start decides, not the policy
    real = [hard + 0.00, hard + 0.01, hard + 0.02, hard + 0.03]
    alone, together = agreement(real, real), agreement(real, real, paired=True)
    assert together.sampled_low == pytest.approx(1)
    assert alone.sampled_low < 0.9


@pytest.mark.parametrize(("a", "b"), [([1], [1]), ([1, 2], [1, 2, 3]), ([[1, 2]], [[1, 2]])])
def test_lists_that_cannot_be_compared_are_refused(a: list[float], b: list[float]) -> None:
    with pytest.raises(InvalidInput, match="two lists of one length"):
        mmrv(a, b)


def test_policies_must_match() -> None:
    with pytest.raises(InvalidInput, match="2 policies on one side, 1"):
        agreement([[1], [2]], [[1]])
    with pytest.raises(InvalidInput, match="without episodes"):
        agreement([[1], []], [[1], [2]])
    with pytest.raises(InvalidInput, match="as many on both sides"):
        agreement([[1], [2]], [[1, 2], [2, 3]], paired=True)
