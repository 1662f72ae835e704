"""A toy env and a toy server behind the client protocol: what the evaluator does is tested without a model."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from omni_loop.env import EVALUATION_SEED, BaseEnv, EnvStep
from omni_loop.errors import StageFailed, UnknownName
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
    Timings,
)
from omni_loop_sim_eval.suite import EvalSuite

GOAL = np.array([256.0, 256.0])
STRIDE = 20.0


class ToyEnv(BaseEnv):
    """A point walks at most 20 px a step towards its action; within 12 px of the middle it has succeeded."""

    name = "toy"
    control_hz = 10.0
    score = "closeness"
    action = ArraySpec("action", "float32", (2,), low=0, high=512)
    observations = (
        ArraySpec("image", "uint8", (32, 32, 3), low=0, high=255),
        ArraySpec("position", "float32", (2,), unit="px"),
        ArraySpec("goal", "float32", (2,), unit="px"),
    )

    def __init__(self, max_steps: int = 60) -> None:
        super().__init__(max_steps)
        self.position = np.zeros(2)

    def _reset(self, seed: int) -> None:
        angle = np.random.default_rng(seed).uniform(0, 2 * np.pi)
        self.position = GOAL + 150 * np.array([np.cos(angle), np.sin(angle)])

    def _step(self, action: NDArray[np.float32]) -> EnvStep:
        way = action - self.position
        self.position = self.position + way * min(1.0, STRIDE / max(float(np.linalg.norm(way)), 1e-9))
        distance = float(np.linalg.norm(self.position - GOAL))
        success = distance < 12
        return EnvStep({}, -distance, success, False, success, {"closeness": max(0.0, 1 - distance / 512)})

    def _array(self, key: str) -> Array:
        if key == "image":
            return draw(self.position)
        return (self.position if key == "position" else GOAL).astype(np.float32)

    def _render(self) -> NDArray[np.uint8]:
        return draw(self.position, 64)


class VersionedEnv(ToyEnv):
    """Found by its module: versions are of packages."""


def draw(position: NDArray[np.floating], size: int = 32) -> NDArray[np.uint8]:
    frame = np.full((size, size, 3), 240, np.uint8)
    x, y = np.clip(position / 512 * size, 2, size - 3).astype(int)
    frame[y - 2 : y + 3, x - 2 : x + 3] = (40, 90, 200)
    return frame


SPEC = SessionSpec(
    pipeline="toy",
    observations=tuple(replace(o, optional=o.name != "position") for o in ToyEnv.observations),
    action=ToyEnv.action,
    horizon=8,
    execution_horizon=4,
    control_hz=10,
    ops=(Op.INFER, Op.PREDICT),
    frame=ToyEnv.observations[0],
    max_predict=8,
)


def toy_suite(**fields: object) -> EvalSuite:
    base = {
        "name": "toy-suite", "env": "toy", "pipeline": "toy", "deployment": "toy", "keys": ["image", "position"],
        "state_keys": ["goal"], "episodes": 4, "max_steps": 60, "frame_key": "image", "first_seed": EVALUATION_SEED,
        "predictions": {"episodes": 2, "every": 2, "frames": 4, "keep": 2}, "time_limit_s": 5.0,
    }  # fmt: skip
    return EvalSuite.model_validate(base | fields)


@dataclass
class ToyServer:
    """Walks to the goal, except on ``lost`` seeds, where it walks away; ``broken(seed, tick)`` may raise or block."""

    lost: frozenset[int] = frozenset()
    broken: Callable[[int, int], None] = lambda seed, tick: None
    actions: Callable[[NDArray[np.float32]], NDArray[np.float32]] = lambda a: a
    refuse_close: bool = False
    revision: str = "toy@1"
    opened: list[int] = field(default_factory=list)
    options: list[Mapping[str, Scalar]] = field(default_factory=list)  # of the same sessions
    closed: int = 0
    clients: int = 0
    served: int = 0  # how often a command would have started a server
    heard: list[tuple[int, int, NDArray[np.float32] | None, tuple[str, ...]]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def connect(self) -> ToyClient:
        self.clients += 1
        return ToyClient(self)


class ToyClient:
    def __init__(self, server: ToyServer) -> None:
        self._server = server

    def open(
        self,
        pipeline: str,
        *,
        prompt: str = "",
        seed: int | None = None,
        keys: Sequence[str] = (),
        options: Mapping[str, Scalar] | None = None,
    ) -> ToySession:
        if pipeline != "toy":
            raise UnknownName(f"no pipeline is called {pipeline!r}. Did you mean 'toy'?")
        assert seed is not None
        with self._server.lock:
            self._server.opened.append(seed)
            self._server.options.append(dict(options or {}))
        return ToySession(self._server, seed)

    def close(self) -> None:
        self._server.clients -= 1


class ToySession:
    id = "toy-session"
    spec = SPEC

    def __init__(self, server: ToyServer, seed: int) -> None:
        self._server, self._seed, self._ticks, self._position = server, seed, 0, np.zeros(2)

    def infer(
        self,
        arrays: Mapping[str, Array],
        *,
        step: int,
        executed: NDArray[np.float32] | None = None,
        frames: int = 0,
        executed_through: int | None = None,
    ) -> TickResult:
        with self._server.lock:
            self._server.heard.append((self._seed, step, executed, tuple(arrays)))
        self._ticks += 1
        self._server.broken(self._seed, self._ticks - 1)
        self._position = arrays["position"].astype(np.float64)
        return self._tick(step, frames)

    def predict(self, actions: NDArray[np.float32] | None = None, *, steps: int = 0) -> TickResult:
        self._ticks += 1
        return self._tick(-1, steps)

    def _tick(self, step: int, frames: int) -> TickResult:
        target = np.zeros(2) if self._seed in self._server.lost else GOAL
        chunk = self._server.actions(np.tile(target, (SPEC.horizon, 1)).astype(np.float32))
        near = float(np.linalg.norm(self._position - target)) < 12  # judged first, like a context stage does
        predicted = []
        for _ in range(frames):
            way = target - self._position
            self._position = self._position + way * min(1.0, STRIDE / max(float(np.linalg.norm(way)), 1e-9))
            predicted.append(draw(self._position))
        return TickResult(
            seq=self._ticks,
            epoch=1,
            chunk=ActionChunk(self._ticks, step, chunk, 1, self._server.revision),
            frames=FramePrediction(self._ticks, step + 1, np.array(predicted), 1) if predicted else None,
            progress=Progress(self._ticks, step, 0.9 if near else 0.3, 0.8 if near else 0.1, 1),
            timings=Timings(2.0, 1.5, 0.1, {"context": 1.0, "act": 0.5}),
        )

    def close(self) -> None:
        if self._server.refuse_close:
            raise StageFailed("cannot close")
        self._server.closed += 1
