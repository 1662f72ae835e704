"""Hand-computed calibration."""

from __future__ import annotations

import numpy as np
import pytest

from omni_loop.errors import InvalidInput
from omni_loop_sim_eval.calibration import Bin, binned, reliability, tracking


def test_reliability_by_hand() -> None:
    said, true = [0.1, 0.1, 0.9, 0.7], [0, 1, 1, 0]
    found = reliability(said, true)
    assert found.brier == pytest.approx((0.01 + 0.81 + 0.01 + 0.49) / 4)
    assert found.base_rate == 0.5
    assert found.base_brier == 0.25
    # Bins: two said 0.1 (half true), one 0.9 (true), one 0.7 (false).
    assert found.ece == pytest.approx((2 * 0.4 + 0.1 + 0.7) / 4)
    assert [(b.low, b.n, b.true) for b in found.bins] == [(0.1, 2, 0.5), (0.7, 1, 0), (0.9, 1, 1)]
    # Called done: 0.9 and 0.7, of which one is; of two that are, one is called.
    assert (found.precision, found.recall, found.f1) == (0.5, 0.5, 0.5)


def test_who_says_what_is_true_is_calibrated_and_who_is_too_sure_is_not() -> None:
    rng = np.random.default_rng(0)
    p = rng.random(40_000)
    true = rng.random(40_000) < p
    assert reliability(p, true).ece < 0.01
    assert reliability(p, true).brier == pytest.approx(1 / 6, abs=0.005)  # E[p (1 - p)]
    assert reliability((p > 0.5).astype(float), true).ece == pytest.approx(0.25, abs=0.01)


def test_ends_belong_to_the_first_and_last_bin() -> None:
    assert binned([0, 1, 0.5], [0, 1, 1], bins=2) == (Bin(0, 0.5, 1, 0, 0), Bin(0.5, 1, 2, 0.75, 1))


def test_nothing_that_is_done_is_no_division_by_zero() -> None:
    found = reliability([0.1, 0.2], [0, 0])
    assert (found.base_brier, found.f1, found.recall, found.precision) == (0, 0, 0, 0)


def test_tracking_by_hand() -> None:
    found = tracking([0.2, 0.4, 0.9], [0.1, 0.5, 0.6])
    assert found.mae == pytest.approx(0.5 / 3)
    assert found.bias == pytest.approx(0.3 / 3)
    assert found.pearson == pytest.approx(np.corrcoef([0.2, 0.4, 0.9], [0.1, 0.5, 0.6])[0, 1])


@pytest.mark.parametrize(
    ("said", "true", "why"),
    [
        ([], [], "as many statements"),
        ([0.1], [0, 1], "as many statements"),
        ([1.2], [1], "what was said lies outside 0..1: 1.2"),
        ([0.2], [0.5], "outcomes are 0 or 1"),
        ([float("nan")], [0], "outside"),
    ],
)
def test_what_is_no_probability_is_refused(said: list[float], true: list[float], why: str) -> None:
    with pytest.raises(InvalidInput, match=why):
        reliability(said, true)
