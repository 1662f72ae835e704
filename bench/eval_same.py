"""Whether a result depends on how many envs run at a time, and what a run costs."""

from __future__ import annotations

from typing import Any

from omni_loop_sim_eval.episodes import EpisodeResult

from .eval_runs import Ran, Runs, runs
from .rows import Bar, Bench, Measured

_WORKERS = (1, 2, 5)
_META = "metaworld-state"

BENCH: Bench[Runs] = Bench("same", runs)


def outcome(result: EpisodeResult) -> tuple[Any, ...]:
    """What is a function of (task, episode, seed): how it ended, its score, and every action to the bit."""
    actions = result.actions
    return str(result.outcome), result.steps, result.score, actions.shape, actions.tobytes()


def differing(runs_: list[Ran]) -> int:
    """Episodes that are not the same in all of ``runs_``; one that is missing in a run is not the same."""
    seen: dict[tuple[str, int], list[tuple[Any, ...]]] = {}
    for ran in runs_:
        for result in ran.results:
            seen.setdefault((result.task, result.seed), []).append(outcome(result))
    return sum(len(found) != len(runs_) or len(set(found)) > 1 for found in seen.values())


def _same(runs_: Runs, suite: str, episodes: int) -> Measured:
    return Measured(differing([runs_.run(suite, episodes, "--workers", str(n)) for n in _WORKERS]))


@BENCH.row("episodes", Bar("ours", "<=", 0), group="same_outcomes")
def same_pusht(runs_: Runs) -> Measured:
    """Of 20 episodes of pusht-state, those that differ (outcome, steps, score, actions) between 1, 2 and 5 envs."""
    return _same(runs_, "pusht-state", 20)


@BENCH.row("episodes", Bar("ours", "<=", 0), group="same_outcomes")
def same_metaworld(runs_: Runs) -> Measured:
    """The same of 60 episodes of metaworld-state, 10 of each task."""
    return _same(runs_, _META, 10)


@BENCH.row("CPU s", Bar("ours", "<=", 90), group="cost")
def metaworld_cpu_s(runs_: Runs) -> Measured:
    """300 episodes of metaworld-state through gRPC on two shards: CPU of command, server and shards, start-up too."""
    return Measured(runs_.run(_META, 50, "--workers", "2").cpu_s)
