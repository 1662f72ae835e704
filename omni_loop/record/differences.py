"""What a replay found: tick by tick, episode by episode."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..types import Op, PlanSummary, TickResult
from .table import Tick

MEASURED = ("chunk", "frames", "scene", "progress", "plan")


@dataclass(frozen=True, slots=True)
class Difference:
    """One replayed tick against the recorded one: largest absolute differences (None: nothing to compare; infinite: one
    of the two is missing or of another shape). ``chunk`` and ``scene`` are in units of the action, ``frames`` in grey
    levels, ``plan`` in units of the cost. ``other``: what is no array and is another, and how."""

    seq: int
    op: Op
    step: int
    chunk: float | None = None
    frames: float | None = None
    progress: float | None = None
    revision: tuple[str, str] | None = None  # recorded, now
    error: str = ""
    scene: float | None = None
    plan: float | None = None
    other: str = ""

    def exact(self, tolerance: float = 0.0, pixels: float = 0.0) -> bool:
        """Whether chunk, scene, progress and plan agree within ``tolerance`` and frames within ``pixels``, and all else
        is the same."""
        near = all(d is None or d <= tolerance for d in (self.chunk, self.scene, self.progress, self.plan))
        same = not (self.revision or self.error or self.other)
        return near and same and (self.frames is None or self.frames <= pixels)


@dataclass(slots=True)
class EpisodeReport:
    """``index``: its number in the recording. ``skipped``: why the rest of it, or all, was not replayed; empty: it was,
    to its end. ``unit``: of its actions."""

    name: str
    session: str
    recorded: int
    ticks: list[Difference] = field(default_factory=list)
    skipped: str = ""
    index: int = 0
    unit: str = ""

    def worst(self, of: str) -> float | None:
        """The largest difference ``of`` one of :data:`MEASURED`; None: there was none to compare."""
        found = [d for tick in self.ticks if (d := getattr(tick, of)) is not None]
        return max(found, default=None)

    def differing(self, tolerance: float, pixels: float) -> list[Difference]:
        return [tick for tick in self.ticks if not tick.exact(tolerance, pixels)]


@dataclass(slots=True)
class Report:
    """A whole replay. ``exact``: every recorded tick was replayed, and none differs by more than was allowed.
    ``missing``: what was recorded and is not here."""

    episodes: list[EpisodeReport]
    tolerance: float
    pixels: float
    missing: Sequence[str] = ()

    @property
    def ticks(self) -> int:
        return sum(len(episode.ticks) for episode in self.episodes)

    @property
    def differing(self) -> int:
        return sum(len(episode.differing(self.tolerance, self.pixels)) for episode in self.episodes)

    @property
    def exact(self) -> bool:
        whole = all(not e.skipped and len(e.ticks) == e.recorded for e in self.episodes)
        return self.differing == 0 and whole and not self.missing

    def as_json(self) -> dict[str, Any]:
        """Everything, with only the ticks that differ; what is infinite is the text "missing"."""
        episodes = []
        for episode in self.episodes:
            worst = {of: _number(episode.worst(of)) for of in MEASURED}
            differing = [
                {k: _number(v) if isinstance(v, float) else v for k, v in asdict(tick).items()}
                for tick in episode.differing(self.tolerance, self.pixels)
            ]
            about = {"index": episode.index, "episode": episode.name, "session": episode.session}
            counts = {"recorded": episode.recorded, "replayed": len(episode.ticks), "skipped": episode.skipped}
            episodes.append({**about, **counts, "worst": worst, "differing": differing})
        return {
            "exact": self.exact,
            "ticks": self.ticks,
            "differing": self.differing,
            "tolerance": self.tolerance,
            "pixels": self.pixels,
            "missing": list(self.missing),
            "episodes": episodes,
        }


def compare(tick: Tick, now: TickResult, other: str = "") -> Difference:
    """``now`` against what was recorded; ``other``: what was another before it."""
    was, revision, error = tick.result, None, ""
    chunk = _far(_chunk(was), _chunk(now))
    frames = _far(_frames(was), _frames(now)) if tick.frames_kept else None
    if was.chunk and now.chunk and not _same_policy(was.chunk.policy_revision, now.chunk.policy_revision):
        revision = was.chunk.policy_revision, now.chunk.policy_revision
    if (was.frames_error is None) != (now.frames_error is None):
        error = f"frames: {now.frames_error.text}" if now.frames_error else "frames failed when it was recorded"
    scene = _far(_scene(was), _scene(now)) if tick.frames_kept else None
    if not other and was.epoch != now.epoch:
        other = f"answered in epoch {was.epoch}, now in {now.epoch}"
    found = Difference(tick.seq, tick.op, tick.step, chunk, frames, _progress(was, now), revision, error)
    return replace(found, scene=scene, plan=_plan(was.plan, now.plan), other=other)


def _same_policy(recorded: str, now: str) -> bool:
    """Older recordings name the stage alone that gave the chunk, not those behind the ``+``."""
    return recorded == now or ("+" not in recorded and now.startswith(f"{recorded}+"))


_Labelled = tuple[int, NDArray[Any]] | None  # first step and array


def _chunk(result: TickResult) -> _Labelled:
    return None if result.chunk is None else (result.chunk.first_step, result.chunk.actions)


def _frames(result: TickResult) -> _Labelled:
    return None if result.frames is None else (result.frames.first_step, result.frames.frames)


def _scene(result: TickResult) -> _Labelled:
    frames = result.frames
    return None if frames is None or frames.scene is None else (frames.first_step, frames.scene)


def _plan(was: PlanSummary | None, now: PlanSummary | None) -> float | None:
    """Costs are compared; of another search they are not comparable. ``seq`` only counts messages."""
    if was is None and now is None:
        return None
    if (
        was is None
        or now is None
        or replace(was, seq=0, cost=0, first_cost=0) != replace(now, seq=0, cost=0, first_cost=0)
    ):
        return math.inf
    return max(abs(was.cost - now.cost), abs(was.first_cost - now.first_cost))


def _progress(was: TickResult, now: TickResult) -> float | None:
    if was.progress is None and now.progress is None:
        return None
    if was.progress is None or now.progress is None or was.progress.step != now.progress.step:
        return math.inf
    return max(abs(was.progress.progress - now.progress.progress), abs(was.progress.done - now.progress.done))


def _far(was: _Labelled, now: _Labelled) -> float | None:
    if was is None and now is None:
        return None
    if was is None or now is None or was[0] != now[0] or was[1].shape != now[1].shape:
        return math.inf
    if np.array_equal(was[1], now[1]):
        return 0.0
    return float(np.abs(was[1].astype(np.float64) - now[1].astype(np.float64)).max())


def _number(value: float | None) -> float | str | None:
    return "missing" if value is not None and math.isinf(value) else value
