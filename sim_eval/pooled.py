"""One success rate over several tasks, with an interval for these tasks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import NormalDist

from omni_loop.errors import InvalidInput

from .stats import Interval, interval

LEAST = 5  # episodes of a task before its own spread is believed


def pooled(tasks: Mapping[str, tuple[int, int]], method: str = "wilson", level: float = 0.95) -> tuple[float, Interval]:
    """Successes of all episodes by their number, and an interval; ``tasks``: (successes, episodes) by name.

    Tasks are taken as given: the interval is for more episodes of these very tasks, as many of each, and says nothing
    about other tasks. ``wilson`` is the stratified Wilson interval, as narrow as differing tasks allow; with one task,
    tasks that all came out the same, or fewer than :data:`LEAST` episodes of one, it is Wilson's own: what three
    episodes have in common says little of how a task spreads. The other methods take all episodes as of one task, which
    is on the safe side: their number of successes spreads less than a binomial (Hoeffding).

    Sources:
        Yan and Su, "Stratified Wilson and Newcombe confidence intervals for multiple binomial proportions",
        Statistics in Biopharmaceutical Research 2 (2010) 329-335; here the strata's weights are their shares of the
        episodes, and the variances that combine them are those of Wilson's interval, which never vanish.
        Hoeffding, "On the distribution of the number of successes in independent trials", Ann. Math. Stat. 27 (1956).
    """
    k, n = (sum(counts[i] for counts in tasks.values()) for i in (0, 1))
    if not tasks:
        raise InvalidInput("no task to pool")
    strata = [(k_, n_) for k_, n_ in tasks.values() if n_]
    plain = interval(k, n, method, level)
    if method != "wilson" or len(strata) < 2 or min(n_ for _, n_ in strata) < LEAST:
        return (k / n if n else 0.0), plain
    z = NormalDist().inv_cdf((1 + level) / 2)
    weights = [n_ / n for _, n_ in strata]
    errors = [math.sqrt((k_ / n_) * (1 - k_ / n_) / n_ + (z / (2 * n_)) ** 2) for k_, n_ in strata]
    within = z * math.sqrt(sum((w * e) ** 2 for w, e in zip(weights, errors, strict=True)))
    # Each task's interval at this smaller z, and their sum has z.
    smaller = within / sum(w * e for w, e in zip(weights, errors, strict=True))
    each = [interval(k_, n_, "wilson", 2 * NormalDist().cdf(smaller) - 1) for k_, n_ in strata]
    low = sum(w * i.low for w, i in zip(weights, each, strict=True))
    high = sum(w * i.high for w, i in zip(weights, each, strict=True))
    return k / n, Interval(low, high, "stratified wilson", level)
