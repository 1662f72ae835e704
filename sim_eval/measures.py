"""What the plays of a twin experiment say: every policy's figures in both places, and how well they agree."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from omni_loop.config import Count, Section

from .calibration import Reliability, Tracking, reliability, tracking
from .correlation import Agreement, agreement
from .plays import Play
from .stats import interval


class Measure(Section):
    """How a few steps from a branch are scored. ``gain``: score after ``steps`` steps minus the branch's; ``best``: the
    highest until then, instead; ``rise``: 1 if it rose by ``least`` or more at any step until then, else 0 (success at
    a lower bar)."""

    kind: Literal["gain", "best", "rise"] = "gain"
    steps: Count = 16
    least: Annotated[float, Field(gt=0, le=1)] = 0.05

    def of(self, scores: NDArray[np.float64]) -> float:
        """``scores [n + 1]`` from the branch on; an episode that ended keeps its last score."""
        ahead = scores[1 : self.steps + 1] - scores[0]
        if not len(ahead):
            return 0.0
        if self.kind == "gain":
            return float(ahead[-1])
        return float(ahead.max()) if self.kind == "best" else float(ahead.max() >= self.least)


@dataclass(frozen=True)
class Strength:
    """What a policy did: success of whole episodes in the simulator and in the world model, the mean best score there,
    and the measure from branches, one value a branch, in both."""

    name: str
    whole: tuple[bool, ...]
    whole_score: tuple[float, ...]
    imagined_whole: tuple[bool, ...]
    imagined_whole_score: tuple[float, ...]
    real: tuple[float, ...]
    imagined: tuple[float, ...]

    def row(self) -> dict[str, Any]:
        k, n = sum(self.whole), len(self.whole)
        bounds = interval(k, n)
        return {
            "policy": self.name,
            "episodes": n,
            "successes": k,
            "success_rate": _mean(self.whole),
            "success_ci95": [round(bounds.low, 4), round(bounds.high, 4)],
            "best_score": _mean(self.whole_score),
            "imagined_episodes": len(self.imagined_whole),
            "imagined_successes": sum(self.imagined_whole),
            "imagined_best_score": _mean(self.imagined_whole_score),
            "branches": len(self.real),
            "real_measure": _mean(self.real),
            "imagined_measure": _mean(self.imagined),
        }


def _mean(values: Sequence[float]) -> float | None:
    return round(float(np.mean(values)), 4) if len(values) else None


def strength(
    name: str,
    measure: Measure,
    whole: Sequence[Play],
    imagined_whole: Sequence[Play],
    real: Sequence[Play],
    imagined: Sequence[Play],
) -> Strength:
    """Only branches that were played in both places count."""
    both = {(p.seed, p.step) for p in real} & {(p.seed, p.step) for p in imagined}
    here, there = (
        tuple(measure.of(p.played.scores) for p in side if (p.seed, p.step) in both) for side in (real, imagined)
    )

    def best(plays: Sequence[Play]) -> tuple[float, ...]:
        return tuple(float(p.played.scores.max()) for p in plays)

    def won(plays: Sequence[Play]) -> tuple[bool, ...]:
        return tuple(p.played.success for p in plays)

    return Strength(name, won(whole), best(whole), won(imagined_whole), best(imagined_whole), here, there)


#: What is held against what, by name: (title, of the simulator, of the world model, whether of the same branches).
PAIRS = {
    "branches": ("the measure from the same branches, in both", "real", "imagined", True),
    "success": ("success of whole real episodes, the measure imagined", "whole", "imagined", False),
    "score": ("best score of whole real episodes, the measure imagined", "whole_score", "imagined", False),
    "real": ("success of whole real episodes, the measure in the simulator", "whole", "real", False),
    "whole": ("success of whole episodes, in both", "whole", "imagined_whole", False),
}


def agreements(policies: Sequence[Strength]) -> dict[str, Agreement]:
    """Of every pair for which all policies have values."""
    found = {}
    for name, (_, ours, theirs, paired) in PAIRS.items():
        real, other = ([getattr(p, side) for p in policies] for side in (ours, theirs))
        if all(len(v) for v in (*real, *other)):
            found[name] = agreement(real, other, paired=paired)
    return found


def calibrated(plays: Iterable[Play], success: float) -> tuple[Reliability, Tracking] | None:
    """The progress head over all ticks of ``plays``; None when it said nothing. Done is a score above ``success``."""
    said = [s for p in plays for s in p.played.said]
    if not said:
        return None
    score = np.clip([s.score for s in said], 0, 1)
    done = reliability([s.done for s in said], (score > success).astype(float))
    return done, tracking(np.clip([s.progress for s in said], 0, 1), score)


def plain(made: Agreement | Reliability | Tracking) -> dict[str, Any]:
    """As JSON has it: NaN is null."""

    def value(v: Any) -> Any:
        if isinstance(v, float):
            return None if np.isnan(v) else round(v, 4)
        if isinstance(v, dict):
            return {k: value(x) for k, x in v.items()}
        return [value(x) for x in v] if isinstance(v, (list, tuple)) else v

    out: dict[str, Any] = value(asdict(made))
    return out
