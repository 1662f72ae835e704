"""What a replay found: tick by tick, episode by episode."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..types import Op, TickResult
from .table import Tick


@dataclass(frozen=True, slots=True)
class Difference:
    """One replayed tick against the recorded one: largest absolute differences (None: nothing to compare; infinite: one
    of the two is missing or of another shape). ``chunk`` is in units of the action, ``frames`` in grey levels."""

    seq: int
    op: Op
    step: int
    chunk: float | None = None
    frames: float | None = None
    progress: float | None = None
    revision: tuple[str, str] | None = None  # recorded, now
    error: str = ""

    def exact(self, tolerance: float = 0.0, pixels: float = 0.0) -> bool:
        """Whether chunk and progress agree within ``tolerance`` and frames within ``pixels``, under one revision."""
        near = all(d is None or d <= tolerance for d in (self.chunk, self.progress))
        return near and (self.frames is None or self.frames <= pixels) and not self.revision and not self.error


@dataclass(slots=True)
class EpisodeReport:
    """``skipped``: why the rest of it, or all, was not replayed; empty: it was, to its end."""

    name: str
    session: str
    recorded: int
    ticks: list[Difference] = field(default_factory=list)
    skipped: str = ""

    def worst(self, of: str) -> float | None:
        """The largest difference ``of`` chunk, frames or progress; None: there was none to compare."""
        found = [d for tick in self.ticks if (d := getattr(tick, of)) is not None]
        return max(found, default=None)

    def differing(self, tolerance: float, pixels: float) -> list[Difference]:
        return [tick for tick in self.ticks if not tick.exact(tolerance, pixels)]


@dataclass(slots=True)
class Report:
    """A whole replay. ``exact``: every recorded tick was replayed, and none differs by more than was allowed."""

    episodes: list[EpisodeReport]
    tolerance: float
    pixels: float

    @property
    def ticks(self) -> int:
        return sum(len(episode.ticks) for episode in self.episodes)

    @property
    def differing(self) -> int:
        return sum(len(episode.differing(self.tolerance, self.pixels)) for episode in self.episodes)

    @property
    def exact(self) -> bool:
        return self.differing == 0 and not any(episode.skipped for episode in self.episodes)

    def as_json(self) -> dict[str, Any]:
        """Everything, with only the ticks that differ; what is infinite is the text "missing"."""
        episodes = []
        for episode in self.episodes:
            worst = {of: _number(episode.worst(of)) for of in ("chunk", "frames", "progress")}
            differing = [
                {k: _number(v) if isinstance(v, float) else v for k, v in asdict(tick).items()}
                for tick in episode.differing(self.tolerance, self.pixels)
            ]
            about = {"episode": episode.name, "session": episode.session, "recorded": episode.recorded}
            counts = {"replayed": len(episode.ticks), "skipped": episode.skipped}
            episodes.append({**about, **counts, "worst": worst, "differing": differing})
        return {
            "exact": self.exact,
            "ticks": self.ticks,
            "differing": self.differing,
            "tolerance": self.tolerance,
            "pixels": self.pixels,
            "episodes": episodes,
        }


def compare(tick: Tick, now: TickResult) -> Difference:
    """``now`` against what was recorded."""
    was, revision, error = tick.result, None, ""
    chunk = _far(_chunk(was), _chunk(now))
    frames = _far(_frames(was), _frames(now)) if tick.frames_kept else None
    if was.chunk and now.chunk and was.chunk.policy_revision != now.chunk.policy_revision:
        revision = was.chunk.policy_revision, now.chunk.policy_revision
    if (was.frames_error is None) != (now.frames_error is None):
        error = f"frames: {now.frames_error.text}" if now.frames_error else "frames failed when it was recorded"
    return Difference(tick.seq, tick.op, tick.step, chunk, frames, _progress(was, now), revision, error)


_Labelled = tuple[int, NDArray[Any]] | None  # first step and array


def _chunk(result: TickResult) -> _Labelled:
    return None if result.chunk is None else (result.chunk.first_step, result.chunk.actions)


def _frames(result: TickResult) -> _Labelled:
    return None if result.frames is None else (result.frames.first_step, result.frames.frames)


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
