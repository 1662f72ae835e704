from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from omni_loop.errors import InvalidInput
from omni_loop_sim_eval.power import pairing, survival
from omni_loop_sim_eval.sequential import (
    SequentialTest,
    confidence,
    log_wealth,
    log_wealth_against,
    replay,
    undecided,
)
from omni_loop_sim_eval.stats import mcnemar


def test_wealth_is_the_mixture_of_coins_over_the_fair_one() -> None:
    integrate = pytest.importorskip("scipy.integrate")
    for a, b in ((0, 0), (1, 0), (3, 2), (9, 1), (20, 31)):
        # Beta(1/2, 1/2) over theta = sin(x)^2 is uniform over x.
        mean, _ = integrate.quad(lambda x: (2 * math.sin(x) ** 2) ** a * (2 * math.cos(x) ** 2) ** b, 0, math.pi / 2)  # noqa: B023
        assert math.exp(log_wealth(a, b)) == pytest.approx(mean / (math.pi / 2), rel=1e-9)
    assert log_wealth(0, 0) == pytest.approx(0)


@pytest.mark.parametrize("m", [-0.9, -0.3, 0.0, 0.5])
def test_the_bets_are_fair_against_what_they_bet_against(m: float) -> None:
    """Over all sequences of 4 pairs with mean m the mean fortune is what it was: 1. Exact."""
    for only_b in (0.0, 0.03):
        p = {1: max(m, 0) + only_b, -1: max(-m, 0) + only_b}
        if sum(p.values()) > 1:
            continue
        p[0] = 1 - sum(p.values())
        mean = 0.0
        for a in range(5):
            for b in range(5 - a):
                ways = math.factorial(4) / math.factorial(a) / math.factorial(b) / math.factorial(4 - a - b)
                weight = ways * p[1] ** a * p[-1] ** b * p[0] ** (4 - a - b)
                mean += weight * math.exp(log_wealth_against(a, b, 4, m)) if weight else 0
        assert mean == pytest.approx(1, abs=1e-9)


def test_confidence_sequence_leaves_out_zero_exactly_when_the_test_decides() -> None:
    for a in range(14):
        for b in range(6):
            seen = confidence(a, b, a + b + 7)
            assert (seen.low > 0 or seen.high < 0) == (log_wealth(a, b) >= math.log(20)), (a, b)
            assert log_wealth_against(a, b, a + b + 7, 0.0) == pytest.approx(log_wealth(a, b), abs=1e-9)


def test_confidence_sequence_is_one_interval() -> None:
    """What is won grows away from the difference seen, so that its two edges are all there is."""
    for a, b, n in ((5, 2, 20), (0, 9, 9), (30, 28, 100), (0, 0, 15)):
        seen = (a - b) / n
        for side in (-1.0, 1.0):
            grid = [seen + (side * 0.999 - seen) * i / 100 for i in range(101)]
            won = [log_wealth_against(a, b, n, m) for m in grid if -1 < m < 1]
            assert won[0] <= 1e-9
            won = [max(w, 0.0) for w in won]  # below 1 nothing was won, and no alpha asks for it
            assert all(x <= y + 1e-9 for x, y in itertools.pairwise(won))


def test_seven_of_seven_decide_and_the_verdict_stays() -> None:
    test = SequentialTest()
    states = [test.add(True, False) for _ in range(7)]
    assert [bool(s.verdict) for s in states] == [False] * 6 + [True]
    assert states[-1].verdict == "a"
    assert states[-1].p == pytest.approx(1 / math.exp(log_wealth(7, 0)))
    after = [test.add(False, True) for _ in range(20)][-1]
    assert (after.verdict, after.p) == ("a", states[-1].p), "valid at any time, so also at the best one"
    assert (after.pairs, after.only_a, after.only_b, after.both) == (27, 7, 20, 0)
    assert replay([(False, True)] * 50)[-1].verdict == "b"
    assert len(replay([(True, True)] * 50)) == 50


def test_same_within_a_margin() -> None:
    states = replay([(True, True)] * 2000, margin=0.1)
    assert states[-1].verdict == "same"
    assert 30 < states[-1].pairs < 200
    assert abs(confidence(0, 0, states[-1].pairs).high) < 0.1
    assert not replay([(True, True)] * 2000)[-1].verdict


def test_false_verdicts_stay_below_alpha_however_often_one_looks() -> None:
    """2000 comparisons of equal policies, looked at after each of 400 pairs. McNemar looked at as often is not so."""
    rng = np.random.default_rng(0)
    for share, alpha in ((0.5, 0.05), (0.1, 0.05), (0.5, 0.2)):
        wrong = 0
        for _ in range(1000):
            differ = rng.random(400) < share
            sides = rng.random(int(differ.sum())) < 0.5
            a = np.cumsum(sides)
            n = np.arange(1, len(a) + 1)
            wrong += bool(len(a)) and max(map(log_wealth, a.tolist(), (n - a).tolist())) >= math.log(1 / alpha)
        assert wrong / 1000 <= alpha, (share, alpha)
        assert wrong / 1000 > alpha / 20, "a test that never rejects would pass, too"
        exact = 1 - undecided(0.5, 400, alpha)[-1]
        assert exact <= alpha, "the same by the exact law"


def test_mcnemar_looked_at_after_every_pair_errs_far_more_often() -> None:
    """What this test is for: the exact probability of p <= 0.05 at any of 60 looks at a fair coin."""
    law = np.array([1.0])
    for n in range(1, 61):
        law = (np.append(law, 0) + np.append(0, law)) / 2
        law[[mcnemar(k, n - k) <= 0.05 for k in range(n + 1)]] = 0
    assert 1 - law.sum() > 0.15
    assert 1 - undecided(0.5, 60)[-1] < 0.05


def test_the_confidence_sequence_covers_at_all_times_at_once() -> None:
    rng = np.random.default_rng(1)
    only_a, only_b, runs, missed = 0.3, 0.1, 200, 0
    for _ in range(runs):
        drawn = rng.choice([1, -1, 0], size=300, p=[only_a, only_b, 1 - only_a - only_b])
        a, b = np.cumsum(drawn == 1), np.cumsum(drawn == -1)
        # Not covered is: enough was won against the truth.
        missed += any(
            log_wealth_against(int(a[t]), int(b[t]), t + 1, only_a - only_b) >= math.log(20) for t in range(300)
        )
    assert missed / runs <= 0.05


def test_survival_agrees_with_simulation_and_saves_episodes() -> None:
    """PushT at its two training budgets, 40 against 91 %: decided after 17 of 200 pairs on average."""
    pair, rng, most = pairing(0.4, 0.91), np.random.default_rng(2), 200
    alive = survival(pair, most)
    stops = []
    for _ in range(400):
        u = rng.random(most)
        states = replay([(x < pair.only_a, pair.only_a <= x < pair.differing) for x in u])
        assert states[-1].verdict == "b"
        stops.append(states[-1].pairs)
    mean = alive[:-1].sum()
    assert mean == pytest.approx(16.6, abs=0.1)
    assert np.mean(stops) == pytest.approx(mean, abs=4 * np.std(stops) / 20)
    assert alive[-1] < 1e-9


def test_bad_settings_are_refused() -> None:
    with pytest.raises(InvalidInput, match="alpha is 5"):
        SequentialTest(alpha=5)
    with pytest.raises(InvalidInput, match="margin is 1"):
        SequentialTest(margin=1)
