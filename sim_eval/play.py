"""One policy in closed loop in a place, the simulator or a world model, from a reset or from a branch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from omni_loop.env import Env
from omni_loop.errors import ConfigError, Reason, StageFailed
from omni_loop.types import Array, SessionSpec, TickResult

from .api import LoopSession
from .branches import Branch, score_of

Actions = NDArray[np.float32]
#: Score 0..1 of the points ``float32[p, 2]`` that a readout sees.
SceneScore = Callable[[NDArray[np.float32]], float]


class WorldSession(Protocol):
    """What is asked of a session of a world model."""

    @property
    def spec(self) -> SessionSpec: ...

    def recondition(self, arrays: Mapping[str, Any], *, executed: Any = None, first_step: int = 0) -> TickResult: ...

    def predict(self, actions: Any = None, *, steps: int = 0) -> TickResult: ...

    def close(self) -> None: ...


class Place(Protocol):
    """Where a policy acts. ``scores`` from the start on, one more than steps were executed."""

    scores: list[float]
    over: bool
    success: bool

    def observe(self) -> Mapping[str, Array]: ...

    def execute(self, actions: Actions) -> int:
        """Execute ``actions [n, action_dim]`` until the episode is over; how many were."""


@dataclass(frozen=True, slots=True)
class Said:
    """What the progress head said of an observation, and the score that was true then."""

    step: int
    progress: float
    done: float
    score: float


@dataclass(frozen=True, slots=True)
class Played:
    """``scores float[steps + 1]``, the first before any action."""

    scores: NDArray[np.float64]
    success: bool
    said: tuple[Said, ...] = ()


@dataclass
class InSimulator:
    """The env of ``seed``, after the branch's lead where there is one."""

    env: Env
    keys: tuple[str, ...]
    seed: int
    branch: Branch | None = None
    scores: list[float] = field(default_factory=list)
    over: bool = False
    success: bool = False

    def __post_init__(self) -> None:
        self.env.reset(self.seed, ())
        if self.branch is not None:
            for action in self.branch.lead:
                self.env.step(action, ())
            self.scores.append(self.branch.score)

    def observe(self) -> Mapping[str, Array]:
        return self.env.observe(self.keys)

    def execute(self, actions: Actions) -> int:
        for i, action in enumerate(actions):
            done = self.env.step(action, ())
            score = score_of(self.env, done.info)
            self.scores += [score] if self.scores else [score, score]  # said after a step: the first is the second
            self.success, self.over = done.success, done.success or done.done
            if self.over:
                return i + 1
        return len(actions)


@dataclass
class InWorld:
    """A world model that has been shown the branch's real steps. The policy sees predicted frames as ``image`` and the
    readout's first point, a step ago and now, as ``agent``; ``judge`` scores the readout's points, above ``success_at``
    the episode is over."""

    session: WorldSession
    branch: Branch
    keys: tuple[str, ...]
    judge: SceneScore
    image: str
    agent: str
    bounds: tuple[float, float]
    success_at: float = np.inf
    scores: list[float] = field(default_factory=list)
    over: bool = False
    success: bool = False

    def __post_init__(self) -> None:
        if unknown := sorted({*self.keys} - {self.image, self.agent}):
            raise ConfigError(f"a world model imagines no {unknown[0]!r}, only {self.image!r} and {self.agent!r}")
        shown, executed = self.branch.shown([self.image])
        self.session.recondition(shown, executed=executed, first_step=0)
        self.scores.append(self.branch.score)
        self._frame = shown[self.image][-1]
        self._agent = self.branch.run.arrays[self.agent][self.branch.step]

    def observe(self) -> Mapping[str, Array]:
        mine = {self.image: self._frame, self.agent: self._agent}
        return {key: mine[key] for key in self.keys}

    def execute(self, actions: Actions) -> int:
        done, most = 0, self.session.spec.max_predict
        while done < len(actions) and not self.over:
            done += self._some(actions[done : done + most])
        return done

    def _some(self, actions: Actions) -> int:
        frames, scene = predicted(self.session, actions)
        for i, points in enumerate(scene):
            self.scores.append(self.judge(points))
            now = np.clip(points[0], *self.bounds).astype(np.float32)
            self._frame, self._agent = frames[i], np.stack([self._agent[1], now])
            if self.scores[-1] > self.success_at:
                self.success = self.over = True
                return i + 1
        return len(actions)


def predicted(session: WorldSession, actions: Actions) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Frames ``uint8[n, h, w, 3]`` and scenes ``float32[n, points, 2]`` under ``actions [n, action_dim]``.

    Raises:
        StageFailed: other than ``n`` came, or no scenes.
    """
    made = session.predict(actions).frames
    if made is None or len(made.frames) != len(actions):
        count = 0 if made is None else len(made.frames)
        raise StageFailed(f"{len(actions)} frames were asked for, {count} came", reason=Reason.BAD_OUTPUT)
    if made.scene is None:
        raise StageFailed(f"pipeline {session.spec.pipeline!r} reads no scene", reason=Reason.BAD_OUTPUT)
    return made.frames, made.scene


def play(
    session: LoopSession, place: Place, steps: int, horizon: int | None = None, bounds: tuple[float, float] = (0, 0)
) -> Played:
    """Up to ``steps`` steps, ``horizon`` actions of a chunk at a time (None: the pipeline's), clipped to ``bounds``.
    What stands at the end is looked at once more, so that what the progress head says of success is heard."""
    horizon = horizon or session.spec.execution_horizon
    said: list[tuple[int, float, float]] = []
    executed: Actions | None = None
    done = 0
    while True:
        result = session.infer(place.observe(), step=done, executed=executed)
        if result.progress is not None:
            said.append((done, result.progress.progress, result.progress.done))
        if place.over or done >= steps:
            break
        if result.chunk is None or len(result.chunk.actions) < horizon:
            raise StageFailed("the server answered without enough actions", reason=Reason.BAD_OUTPUT)
        wanted = np.clip(result.chunk.actions[: min(horizon, steps - done)], *bounds).astype(np.float32)
        count = place.execute(wanted)
        executed, done = wanted[:count], done + count
    scores = np.array(place.scores)
    return Played(scores, place.success, tuple(Said(at, p, d, float(scores[at])) for at, p, d in said))
