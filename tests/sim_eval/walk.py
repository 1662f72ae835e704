"""A point that walks to the middle, policies of different speed, and a world model that knows how it walks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omni_loop.env import EVALUATION_SEED, BaseEnv, EnvStep
from omni_loop.messages import Scalar
from omni_loop.types import (
    ActionChunk,
    Array,
    ArraySpec,
    FramePrediction,
    Op,
    Progress,
    SessionSpec,
    TickResult,
)  # fmt: skip
from omni_loop_sim_eval.twin_config import TwinConfig, TwinPolicy

GOAL = np.array([256.0, 256.0])
STRIDE, NEAR = 8.0, 8.0  # px
SUCCESS = 1 - NEAR / 512
S = EVALUATION_SEED


def moved(position: NDArray[np.float64], action: NDArray[np.floating]) -> NDArray[np.float64]:
    way = action - position
    return position + way * min(1.0, STRIDE / max(float(np.linalg.norm(way)), 1e-9))


def closeness(points: NDArray[np.floating]) -> float:
    return max(0.0, 1 - float(np.linalg.norm(points[0] - GOAL)) / 512)


def draw(position: NDArray[np.float64]) -> NDArray[np.uint8]:
    """A grey picture whose first pixels are the position's bytes, so that a world model can read it exactly."""
    frame = np.full((16, 16, 3), 200, np.uint8)
    frame.reshape(-1)[:16] = np.frombuffer(position.astype("<f8").tobytes(), np.uint8)
    x, y = np.clip(position / 32, 2, 13).astype(int)
    frame[y - 1 : y + 2, x - 1 : x + 2] = (40, 90, 250)
    frame.reshape(-1)[:16] = np.frombuffer(position.astype("<f8").tobytes(), np.uint8)
    return frame


def where(frame: NDArray[np.uint8]) -> NDArray[np.float64]:
    return np.frombuffer(np.ascontiguousarray(frame).reshape(-1)[:16].tobytes(), "<f8").copy()


class WalkEnv(BaseEnv):
    """150 px from the middle at first; nearer than 8 px is success."""

    name = "walk"
    control_hz = 10.0
    score = "closeness"
    action = ArraySpec("action", "float32", (2,), low=0, high=512)
    observations = (
        ArraySpec("image", "uint8", (16, 16, 3), low=0, high=255),
        ArraySpec("agent_pos", "float32", (2, 2), unit="px", low=0, high=512),
    )

    def __init__(self, max_steps: int = 60) -> None:
        super().__init__(max_steps)
        self.position: NDArray[np.float64] = np.zeros(2)
        self._before: NDArray[np.float64] = self.position

    def hold(self) -> NDArray[np.float32]:
        return self.position.astype(np.float32)

    def _reset(self, seed: int) -> None:
        angle = np.random.default_rng(seed).uniform(0, 2 * np.pi)
        self.position = self._before = GOAL + 150 * np.array([np.cos(angle), np.sin(angle)])

    def _step(self, action: NDArray[np.float32]) -> EnvStep:
        self._before, self.position = self.position, moved(self.position, action)
        score = closeness(self.position[None])
        return EnvStep({}, score, score > SUCCESS, False, score > SUCCESS, {"closeness": score})

    def _array(self, key: str) -> Array:
        if key == "image":
            return draw(self.position)
        return np.stack([self._before, self.position]).astype(np.float32)

    def _render(self) -> NDArray[np.uint8]:
        return draw(self.position)


class WalkExpert:
    def __init__(self, env: Any) -> None:
        self.resets: list[int] = []

    def reset(self, seed: int) -> None:
        self.resets.append(seed)

    def act(self) -> NDArray[np.float32]:
        return GOAL.astype(np.float32)


def _spec(pipeline: str, ops: tuple[Op, ...]) -> SessionSpec:
    return SessionSpec(
        pipeline, WalkEnv.observations, WalkEnv.action, 8, 4, 10.0, ops, WalkEnv.observations[0], max_predict=8
    )


@dataclass
class Walkers:
    """Serves policies that walk ``speed`` times a stride towards the middle, and the world model. ``drift`` px are
    added to every imagined step. ``served`` counts servers, ``infers`` calls of policies."""

    drift: float = 0.0
    served: list[str] = field(default_factory=list)
    infers: int = 0
    open_sessions: int = 0

    @contextmanager
    def __call__(self, policy: TwinPolicy | None) -> Iterator[Any]:
        self.served.append("world" if policy is None else policy.name)
        yield self if policy is None else _Policy(self, float(policy.stage_options["act"]["speed"]))

    def open(self, pipeline: str, *, seed: int | None = None) -> WorldSession:
        self.open_sessions += 1
        return WorldSession(self)


class WorldSession:
    spec = _spec("walk-world", (Op.RECONDITION, Op.PREDICT))

    def __init__(self, walkers: Walkers) -> None:
        self._walkers = walkers
        self._at: NDArray[np.float64] = np.zeros(2)

    def recondition(self, arrays: Mapping[str, Any], *, executed: Any = None, first_step: int = 0) -> TickResult:
        frames = arrays["image"]
        assert len(executed) == len(frames) - 1
        for before, after, action in zip(frames, frames[1:], executed, strict=False):
            np.testing.assert_allclose(moved(where(before), action), where(after), atol=1e-9)
        self._at = where(frames[-1])
        return TickResult(0, 1)

    def predict(self, actions: Any = None, *, steps: int = 0) -> TickResult:
        assert len(actions) <= self.spec.max_predict
        made = []
        for action in actions:
            self._at = moved(self._at, action) + self._walkers.drift
            made.append(self._at)
        frames = np.stack([draw(at) for at in made])
        return TickResult(1, 1, frames=FramePrediction(1, 1, frames, 1, np.stack(made)[:, None].astype(np.float32)))

    def close(self) -> None:
        self._walkers.open_sessions -= 1


class _Policy:
    def __init__(self, walkers: Walkers, speed: float) -> None:
        self.walkers, self.speed = walkers, speed

    def open(
        self,
        pipeline: str,
        *,
        prompt: str = "",
        seed: int | None = None,
        keys: Sequence[str] = (),
        options: Mapping[str, Scalar] | None = None,
    ) -> PolicySession:
        assert seed is not None
        return PolicySession(self)

    def close(self) -> None:
        return None


class PolicySession:
    id, spec = "walker", _spec("walk", (Op.INFER,))

    def __init__(self, policy: _Policy) -> None:
        self._policy = policy

    def infer(
        self,
        arrays: Mapping[str, Array],
        *,
        step: int,
        executed: Any = None,
        frames: int = 0,
        executed_through: int | None = None,
    ) -> TickResult:
        self._policy.walkers.infers += 1
        at = arrays["agent_pos"][1].astype(np.float64)
        np.testing.assert_allclose(at, where(arrays["image"]), atol=1e-3)
        way = GOAL - at
        way *= self._policy.speed * STRIDE / max(float(np.linalg.norm(way)), 1e-9)
        actions = at + way * np.arange(1, 9)[:, None]
        score = closeness(at[None])
        said = Progress(1, step, score, 0.9 if score > SUCCESS else 0.1, 1)
        return TickResult(1, 1, ActionChunk(1, step, actions.astype(np.float32), 1), progress=said)

    def predict(self, actions: Any = None, *, steps: int = 0) -> TickResult:
        raise NotImplementedError

    def close(self) -> None:
        return None


def config(**fields: Any) -> TwinConfig:
    speeds = {"runs": 1.0, "walks": 0.6, "creeps": 0.2, "flees": -0.5}
    policies = [
        {"name": name, "deployment": "walk", "stage_options": {"act": {"speed": speed}}}
        for name, speed in speeds.items()
    ]
    base: dict[str, Any] = {
        "name": "walk", "suite": "walk", "world": "walk-world", "world_deployment": "walk", "success": SUCCESS,
        "episodes": 3, "imagined_episodes": 2, "imagined_steps": 40, "runs": 3, "per_run": 2, "seen": 3, "steps": 6,
        "measure": {"kind": "gain", "steps": 6}, "policies": [*policies, {"name": "hold", "bound": "hold"}],
    }  # fmt: skip
    return TwinConfig.model_validate(base | fields)
