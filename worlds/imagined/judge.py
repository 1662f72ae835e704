"""Who says what an imagined frame is worth: a pure function of what was imagined, so that branches need no copies.

``Coverage`` judges PushT as its simulator does, from the readout's points; ``Progress`` asks the context model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from omni_loop.errors import Unsupported
from omni_loop.registry import missing_extra

from ..context.perceive import INSTRUCTION
from ..scene import KEYPOINTS, pose_points

if TYPE_CHECKING:
    from ..judge import Judge as ContextJudge

GOAL_POSE = (256.0, 256.0, np.pi / 4)  # px, px, rad
SUCCESS = 0.95  # coverage above which gym-pusht calls it one
_BAR, _STEM = (0, 1, 2, 3), (4, 5, 7, 6)  # keypoints around the T's two rectangles


@dataclass(frozen=True, slots=True)
class Seen:
    """One imagined step. ``action float32[action_dim]`` led to ``frame uint8[h, w, 3]``; ``scene float32[points, 2]``
    is the readout of it, where the pipeline has one; ``progress`` and ``done`` what its context model said, if it did.
    """

    step: int
    action: NDArray[np.float32]
    frame: NDArray[np.uint8]
    scene: NDArray[np.float32] | None = None
    progress: float | None = None
    done: float | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """``success`` ends the episode; ``info`` travels in the step's info."""

    reward: float = 0.0
    success: bool = False
    info: Mapping[str, float] = field(default_factory=dict)


class Judge(Protocol):
    """Called from several threads by a vector env. An attribute ``score``, if it has one, names the entry of ``info``
    that says how near success is."""

    def __call__(self, seen: Seen) -> Verdict: ...


def indifferent(seen: Seen) -> Verdict:
    """Reward 0, never over."""
    return Verdict()


class Coverage:
    """PushT: how much of the goal the T covers that fits the readout's points (agent, eight keypoints) best.

    Reward and success are gym-pusht's; ``misfit`` is how far the points are from that T, in px, root mean square: a
    world model whose T has lost its shape shows here.
    """

    score = "coverage"

    def __init__(self) -> None:
        try:
            from shapely.geometry import Polygon
        except ModuleNotFoundError as e:
            raise missing_extra(e, "judging coverage ") from e
        self._polygon = Polygon
        self._goal = self._shape(pose_points(torch.tensor(GOAL_POSE)).numpy())

    def __call__(self, seen: Seen) -> Verdict:
        """Raises Unsupported when the pipeline reads no scene."""
        coverage, misfit = self.read(seen.scene)
        info = {"coverage": coverage, "misfit": misfit}
        return Verdict(min(coverage / SUCCESS, 1.0), coverage > SUCCESS, info)

    def read(self, scene: NDArray[np.floating] | None) -> tuple[float, float]:
        """Coverage and misfit of ``scene [9, 2]``, px. Raises Unsupported when it is not one."""
        if scene is None or len(scene) != 1 + len(KEYPOINTS):
            raise Unsupported("this pipeline reads no T from its frames, so that its coverage cannot be judged")
        points = fitted(scene[1:])
        coverage = float(self._goal.intersection(self._shape(points)).area / self._goal.area)
        return coverage, float(np.sqrt(np.square(scene[1:] - points).sum(1).mean()))

    def _shape(self, points: NDArray[np.floating]) -> Any:
        return self._polygon(points[list(_BAR)]).union(self._polygon(points[list(_STEM)]))


@cache
def _coverage() -> Coverage:
    return Coverage()


def scene_coverage(scene: NDArray[np.floating]) -> float:
    """PushT's score as the readout sees it: coverage by the T that fits ``scene float32[9, 2]`` best, 0..1."""
    return _coverage().read(scene)[0]


def fitted(points: NDArray[np.floating]) -> NDArray[np.float64]:
    """Keypoints ``[8, 2]`` of the rigid T nearest to ``points [8, 2]`` in the sense of least squares (Kabsch 1976)."""
    shape, points = KEYPOINTS.numpy().astype(np.float64), np.asarray(points, np.float64)
    at, to = shape.mean(0), points.mean(0)
    a, b = shape - at, points - to
    angle = np.arctan2((a[:, 0] * b[:, 1] - a[:, 1] * b[:, 0]).sum(), (a * b).sum())
    c, s = np.cos(angle), np.sin(angle)
    return a @ np.array([[c, s], [-s, c]]) + to


class Progress:
    """What the context model thinks of each frame: the pipeline's own, where it says, else the one at ``checkpoints``
    (none: the shipped one), which reads a frame as the tick behind its instruction. Reward is the progress, 0..1;
    a probability of done above ``done`` is success."""

    score = "progress"

    def __init__(self, checkpoints: str = "", done: float = 0.5) -> None:
        self._checkpoints, self._done = checkpoints, done
        self._own: tuple[ContextJudge, torch.Tensor] | None = None

    def __call__(self, seen: Seen) -> Verdict:
        progress, done = seen.progress, seen.done
        if progress is None or done is None:
            progress, done = self._read(seen)
        return Verdict(progress, done > self._done, {"progress": progress, "done": done})

    def _read(self, seen: Seen) -> tuple[float, float]:
        from ..stages.plan import judge_of
        from ..stages.shared import checkpoint, codec_of, encode, images_of, to_unit

        if self._own is None:
            judge = judge_of(self._checkpoints, "cpu")
            self._own = judge, judge.past(INSTRUCTION)
        judge, past = self._own
        codec = codec_of(checkpoint("codec", self._checkpoints), "cpu")
        latents = encode(codec, images_of(codec, seen.frame[None]))
        reading = judge.read(past, latents, to_unit(seen.action[None, None]))
        return float(reading.progress[0]), float(reading.done[0])
