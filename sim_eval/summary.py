"""The machine-readable half of a report: ``summary.json`` and ``episodes.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from omni_loop.errors import ConfigError

from .episodes import EpisodeResult, Outcome, Tick
from .runner import Run
from .stats import Paired, interval, paired, spread


def summarise(run: Run) -> dict[str, Any]:
    """Numbers of the run; times in ms. Ticks that carried predicted frames are kept apart: they did more."""
    suite, results = run.suite, run.results
    n, k = len(results), run.successes
    ticks = [t for r in results for t in r.ticks if not t.frames]
    framed = [t for r in results for t in r.ticks if t.frames]
    bounds = interval(k, n, suite.interval)
    stages = sorted({name for t in ticks for name in t.stages_ms}, key=lambda s: _first(ticks, s))
    finished = [r for r in results if r.outcome in (Outcome.SUCCESS, Outcome.FAILURE)]
    return {
        "suite": suite.name,
        "env": suite.env,
        "pipeline": suite.pipeline,
        "observation_keys": list(suite.keys),
        "state_given": suite.gives_state,
        "first_seed": suite.first_seed,
        "seeds_unseen": suite.unseen,
        "episodes": n,
        "successes": k,
        "success_rate": k / n if n else 0.0,
        "ci95": [bounds.low, bounds.high],
        "interval": bounds.method,
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


def episode_rows(results: Sequence[EpisodeResult]) -> list[dict[str, Any]]:
    """One JSON row per episode."""
    return [
        {
            "episode": r.episode,
            "seed": r.seed,
            "outcome": str(r.outcome),
            "success": r.success,
            "steps": r.steps,
            "score": r.score,
            "ticks": len(r.ticks),
            "tick_ms": spread(t.round_trip_ms for t in r.ticks if not t.frames),
            "wall_s": r.wall_s,
            "reason": r.reason,
        }
        for r in results
    ]


def write(folder: Path, summary: dict[str, Any], results: Sequence[EpisodeResult]) -> None:
    """Write ``summary.json`` and ``episodes.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    (folder / "episodes.json").write_text(json.dumps(episode_rows(results), indent=1) + "\n")


def read(folder: Path) -> dict[int, bool]:
    """Success by seed of the run written to ``folder``.

    Raises:
        ConfigError: there is none, or it cannot be read.
    """
    try:
        rows = json.loads((folder / "episodes.json").read_text(encoding="utf-8"))
        return {int(row["seed"]): bool(row["success"]) for row in rows}
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(f"--against: {folder} holds no episodes.json: name a folder written by --out") from None
    except OSError as e:
        raise ConfigError(f"--against: cannot read {folder}/episodes.json: {e.strerror}") from None
    except (ValueError, KeyError, TypeError, RecursionError) as e:
        raise ConfigError(f"--against: {folder}/episodes.json is no table of episodes: {e}") from None


def against(results: Sequence[EpisodeResult], other: Mapping[int, bool]) -> Paired:
    """Compare this run (a) with another's success by seed (b)."""
    return paired({r.seed: r.success for r in results}, dict(other))
