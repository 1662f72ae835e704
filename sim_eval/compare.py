"""Two finished runs, paired by task and seed: both rates, their difference, and whether it may be chance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from omni_loop.errors import ConfigError, nearest

from .difference import Difference, holm, of
from .pooled import pooled
from .rows import Key, successes
from .sequential import confidence
from .stats import Interval, Paired, interval, paired
from .stored import StoredRun, refuse_others


@dataclass(frozen=True, slots=True)
class Side:
    """Of one run, over the episodes that both have."""

    successes: int
    episodes: int
    rate: float
    bounds: Interval


@dataclass(frozen=True, slots=True)
class Compared:
    """One task, or all together under the name "". ``adjusted``: p for the number of tasks (Holm); of all together p
    itself. ``only_a`` and ``only_b``: (task, seed) of the pairs that differ."""

    task: str
    a: Side
    b: Side
    pairs: Paired
    difference: Difference
    adjusted: float
    only_a: tuple[Key, ...]
    only_b: tuple[Key, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """``tasks``: one by one, where there are several. ``left_out``: episodes of a and of b that the other lacks.
    ``stopped``: the number of pairs was chosen while looking at them (:func:`any_time`)."""

    pooled: Compared
    tasks: tuple[Compared, ...]
    left_out: tuple[int, int]
    level: float
    method: str
    stopped: bool = False


def compare(a: StoredRun, b: StoredRun, level: float = 0.95, method: str = "wilson") -> Comparison:
    """Pair two runs.

    Raises:
        ConfigError: they cannot be paired: of another env, of other settings of it, or without an episode in common.
        OmniLoopError: no such level or method.
    """
    check(a, b)
    one, other = successes(a.rows), successes(b.rows)
    common = [row.key for row in a.rows if row.key in other]
    names = list(dict.fromkeys(task for task, _ in common))
    by_name = {name: [key for key in common if key[0] == name] for name in names}
    p = {name: paired({k: one[k] for k in keys}, other).p for name, keys in by_name.items()}
    adjusted = holm(p)
    each = tuple(
        _compared(name, {name: keys}, one, other, adjusted[name], level, method) for name, keys in by_name.items()
    )
    together = each[0] if len(each) == 1 else _compared("", by_name, one, other, None, level, method)
    left = (len(one) - len(common), len(other) - len(common))
    return Comparison(together, each if len(each) > 1 else (), left, level, method)


def any_time(found: Comparison) -> Comparison:
    """``found`` where somebody looked after every pair and stopped: the difference has its confidence sequence, right
    however that was decided. McNemar's p and Tango's interval are not, and are not shown then."""
    pairs = found.pooled.pairs
    difference = confidence(pairs.only_a, pairs.only_b, pairs.pairs, 1 - found.level)
    return replace(found, pooled=replace(found.pooled, difference=difference), stopped=True)


def check(a: StoredRun, b: StoredRun) -> None:
    """Refuse runs whose episodes of a seed are not the same episodes."""
    refuse_others(a.world(), b.world(), a.folder, b.folder)
    tasks = set(a.tasks) & set(b.tasks)
    if not tasks:
        hint = nearest(a.tasks[0], b.tasks)
        raise ConfigError(f"the runs cannot be paired: {b.folder} has no task {a.tasks[0]!r}.{hint}")
    if not successes(a.rows).keys() & successes(b.rows).keys():
        seeds = [sorted(row.seed for row in run.rows if row.task in tasks) for run in (a, b)]
        raise ConfigError(
            f"the runs cannot be paired: {a.folder} has seeds {seeds[0][0]} to {seeds[0][-1]}, "
            f"{b.folder} {seeds[1][0]} to {seeds[1][-1]}, and none in common"
        )


def _compared(
    task: str,
    keys: Mapping[str, Sequence[Key]],
    a: Mapping[Key, bool],
    b: Mapping[Key, bool],
    adjusted: float | None,
    level: float,
    method: str,
) -> Compared:
    every = [key for own in keys.values() for key in own]
    pairs = paired({key: a[key] for key in every}, {key: b[key] for key in every})
    return Compared(
        task,
        _side(keys, a, level, method),
        _side(keys, b, level, method),
        pairs,
        of(pairs, level),
        pairs.p if adjusted is None else adjusted,
        tuple(key for key in every if a[key] and not b[key]),
        tuple(key for key in every if b[key] and not a[key]),
    )


def _side(keys: Mapping[str, Sequence[Key]], found: Mapping[Key, bool], level: float, method: str) -> Side:
    counts = {name: (sum(found[key] for key in own), len(own)) for name, own in keys.items()}
    k, n = (sum(c[i] for c in counts.values()) for i in (0, 1))
    if len(counts) == 1:
        return Side(k, n, k / n, interval(k, n, method, level))
    rate, bounds = pooled(counts, method, level)
    return Side(k, n, rate, bounds)


def verdict(found: Compared, names: tuple[str, str], level: float) -> str:
    """One sentence that says no more than the pairs do."""
    d, p = found.difference, found.pairs.p
    points = f"{100 * abs(d.value):.1f} points"
    if p <= 1 - level + 1e-12:
        better, worse = names if d.value > 0 else names[::-1]
        return f"{better} succeeds more often than {worse}, by {points}."
    most = 100 * max(abs(d.low), abs(d.high))
    return f"No difference is shown. One of up to {most:.0f} points is not ruled out."


def to_json(found: Comparison, a: StoredRun, b: StoredRun) -> dict[str, Any]:
    """Everything of the comparison, for machines."""
    return {
        "a": _about(a),
        "b": _about(b),
        "level": found.level,
        "interval": found.method,
        "left_out": {"a": found.left_out[0], "b": found.left_out[1]},
        "pooled": _one(found.pooled, found.stopped),
        "tasks": [_one(task, found.stopped) for task in found.tasks],
    }


def _about(run: StoredRun) -> dict[str, Any]:
    return {
        "folder": str(run.folder),
        "suite": run.suite,
        "policy": run.policy,
        "policy_revision": run.summary.get("policy_revision", ""),
        "episodes": len(run.rows),
    }


def _one(found: Compared, stopped: bool) -> dict[str, Any]:
    def seeds(keys: Sequence[Key]) -> list[dict[str, Any]]:
        return [{"task": task, "seed": seed} for task, seed in keys]

    pairs = asdict(found.pairs)
    p = pairs.pop("p")
    tests = {} if stopped else {"p": p, "p_adjusted": found.adjusted}
    valid = {} if stopped and found.task else {"difference": asdict(found.difference)}
    return {
        "task": found.task,
        "a": asdict(found.a),
        "b": asdict(found.b),
        "pairs": pairs,
        **valid,
        **tests,
        "only_a": seeds(found.only_a),
        "only_b": seeds(found.only_b),
    }
