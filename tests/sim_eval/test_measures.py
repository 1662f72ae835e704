"""Hand-computed measures of plays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from omni_loop_sim_eval.measures import Measure, Strength, agreements, calibrated, plain, strength
from omni_loop_sim_eval.play import Played, Said
from omni_loop_sim_eval.plays import Play
from omni_loop_sim_eval.plots import Axis, plot

SCORES = np.array([0.30, 0.34, 0.42, 0.35])


def played(place: str, step: int, *scores: float, success: bool = False) -> Play:
    return Play("p", place, 1, step, Played(np.array(scores), success))


@pytest.mark.parametrize(
    ("kind", "steps", "want"),
    [("gain", 3, 0.05), ("gain", 2, 0.12), ("best", 3, 0.12), ("rise", 3, 1), ("rise", 1, 0), ("gain", 9, 0.05)],
)
def test_measures_by_hand(kind: Any, steps: int, want: float) -> None:
    assert Measure(kind=kind, steps=steps, least=0.1).of(SCORES) == pytest.approx(want)


def test_an_episode_without_steps_gains_nothing() -> None:
    assert Measure().of(np.array([0.4])) == 0


def test_only_branches_played_in_both_places_count() -> None:
    made = strength(
        "p",
        Measure(steps=1),
        [played("whole", 0, 0, 0.9, 0.97, success=True), played("whole", 0, 0, 0.5, 0.2)],
        [],
        [played("branch", 3, 0.1, 0.2), played("branch", 5, 0.1, 0.4)],
        [played("imagined", 5, 0.1, 0.3), played("imagined", 9, 0, 1)],
    )
    assert list(made.real) == pytest.approx([0.3])
    assert list(made.imagined) == pytest.approx([0.2])
    row = made.row()
    assert (row["successes"], row["episodes"], row["success_rate"]) == (1, 2, 0.5)
    assert row["best_score"] == pytest.approx((0.97 + 0.5) / 2)
    assert row["imagined_best_score"] is None


def test_pairs_without_values_are_left_out() -> None:
    def one(name: str, won: bool, gain: float) -> Strength:
        return Strength(name, (won, won), (0.5, 0.6), (), (), (gain, gain), (gain, gain + 0.1))

    found = agreements([one("a", True, 0.3), one("b", False, 0.1), one("c", False, 0.0)])
    assert set(found) == {"branches", "success", "score", "real"}
    assert found["branches"].r == pytest.approx(1)
    assert np.isnan(found["score"].r), "all have one best score"
    assert plain(found["score"])["r"] is None


def test_calibration_is_over_all_ticks_of_all_plays() -> None:
    def play(*said: tuple[float, float, float]) -> Play:
        return Play("p", "whole", 0, 0, Played(np.zeros(1), False, tuple(Said(0, *s) for s in said)))

    made = calibrated([play((0.5, 0.1, 0.4)), play((0.9, 0.8, 0.96), (0.2, 0.6, 0.2))], success=0.95)
    assert made is not None
    done, progress = made
    assert done.n == 3
    assert done.base_rate == pytest.approx(1 / 3, abs=1e-9)
    assert done.brier == pytest.approx((0.01 + 0.04 + 0.36) / 3)
    assert progress.mae == pytest.approx((0.1 + 0.06 + 0) / 3)
    assert calibrated([play()], 0.95) is None


def test_axes_have_round_ticks_within() -> None:
    assert Axis("x", 0, 1).ticks() == [0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert Axis("x", -0.013, 0.021).ticks() == [-0.01, 0, 0.01, 0.02]
    assert Axis.around("x", [2, 2], 0.5) == Axis("x", 1.5, 2.5)


def test_plots_place_points_and_escape_names() -> None:
    svg = plot({"a": [(0, 0), (1, 1)], "b": [(0.5, 0.5)]}, Axis("<x>", 0, 1), Axis("y", 0, 1), diagonal=True)
    assert svg.count("<circle") == 3
    assert svg.count("<polyline") == 1
    assert 'cx="52.0" cy="256.0"' in svg, "the origin is at the lower left"
    assert "<x>" not in svg
