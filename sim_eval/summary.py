"""The machine-readable half of a report: ``summary.json`` and the rows of :mod:`rows`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from . import rows
from .pooled import pooled
from .results import EpisodeResult, Outcome, Tick
from .rows import Key, Row, by_task
from .runner import Run
from .stats import Paired, interval, paired, spread
from .suite import EvalSuite


def summarise(run: Run) -> dict[str, Any]:
    """Numbers of the run; times in ms. Ticks that carried predicted frames are kept apart: they did more."""
    suite, results = run.suite, run.results
    n, k = len(results), run.successes
    every = [rows.row_of(r) for r in results]
    by_name = tasks(every, suite.interval)
    _, bounds = pooled({name: (t["successes"], t["episodes"]) for name, t in by_name.items()}, suite.interval)
    ticks = [t for r in results for t in r.ticks if not t.frames]
    framed = [t for r in results for t in r.ticks if t.frames]
    stages = sorted({name for t in ticks for name in t.stages_ms}, key=lambda s: _first(ticks, s))
    finished = [r for r in results if r.outcome in (Outcome.SUCCESS, Outcome.FAILURE)]
    return {
        "suite": suite.name,
        "env": suite.env,
        "pipeline": suite.pipeline,
        "observation_keys": list(suite.keys),
        "state_given": suite.gives_state,
        "delay_steps": suite.delay_steps,
        "action_repeat": suite.action_repeat,
        "first_seed": suite.first_seed,
        "seeds_unseen": suite.unseen,
        "episodes": n,
        "successes": k,
        "success_rate": k / n if n else 0.0,
        "ci95": [bounds.low, bounds.high],
        "interval": bounds.method,
        "tasks": by_name,
        "deadline_misses": sum(row.deadline_misses for row in every),
        "errors": sum(r.outcome == Outcome.ERROR for r in results),
        "timeouts": sum(r.outcome == Outcome.TIMEOUT for r in results),
        "steps": spread(r.steps for r in finished),
        "score": spread(r.score for r in finished),
        "ticks": len(ticks) + len(framed),
        "tick_ms": spread(t.round_trip_ms for t in ticks),
        "overhead_ms": spread(t.overhead_ms for t in ticks),
        "model_ms": spread(t.model_ms for t in ticks),
        "transport_ms": spread(t.transport_ms for t in ticks),
        "stages_ms": {name: spread(t.stages_ms[name] for t in ticks if name in t.stages_ms) for name in stages},
        "framed_tick_ms": spread(t.round_trip_ms for t in framed),
        "policy_revision": next((r.policy_revision for r in results if r.policy_revision), ""),
        "version": metadata.version("omni-loop"),
        "wall_s": run.wall_s,
    }


def _first(ticks: Sequence[Tick], stage: str) -> int:
    """Position of a stage in the first tick that has it: the order in which stages run."""
    return next(list(t.stages_ms).index(stage) for t in ticks if stage in t.stages_ms)


def tasks(every: Iterable[Row], method: str) -> dict[str, dict[str, Any]]:
    """Success of every task, with an interval."""
    found: dict[str, dict[str, Any]] = {}
    for name, own in by_task(every).items():
        n, k = len(own), sum(row.success for row in own)
        bounds = interval(k, n, method)
        found[name] = {
            "episodes": n,
            "successes": k,
            "success_rate": k / n,
            "ci95": [bounds.low, bounds.high],
            "steps": spread(row.steps for row in own),
            "tick_p50_ms": spread(row.tick_p50_ms for row in own if row.ticks)["p50"],
            "deadline_misses": sum(row.deadline_misses for row in own),
        }
    return found


def write(folder: Path, summary: dict[str, Any], results: Sequence[EpisodeResult]) -> None:
    """Write ``summary.json``, ``episodes.json`` and ``episodes.parquet``."""
    rows.write(folder, [rows.row_of(r) for r in results])
    (folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")


def expected(suite: EvalSuite) -> dict[Key, bool]:
    """The keys that a run of ``suite`` will have, to see before it runs whether it can be paired."""
    return {(name, suite.first_seed + i): False for name in suite.task_names for i in range(suite.episodes)}


def against(results: Sequence[EpisodeResult], other: Mapping[Key, bool]) -> Paired:
    """Compare this run (a) with another's success by task and seed (b)."""
    return paired(rows.successes(rows.row_of(r) for r in results), other)
