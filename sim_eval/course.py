"""An episode under way: steps its env, asks its session, and notes what happened, also of one that breaks."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omni_loop.env import Env
from omni_loop.errors import ConfigError, OmniLoopError, nearest
from omni_loop.types import Array, TickResult

from .api import LoopSession
from .results import Prediction, Tick
from .suite import EvalSuite

Action = NDArray[np.float32]


class EpisodeTimeout(Exception):
    """The episode took longer than its time limit."""


class EnvDied(Exception):
    """The env broke where it must not: its process is gone, or its library raised something of its own."""


class Course:
    """One episode of ``suite`` in ``env``. ``over`` once the env has ended it, ``success`` by the env's verdict."""

    def __init__(self, env: Env, suite: EvalSuite, seed: int, deadline: float) -> None:
        self.env, self.suite, self.seed = env, suite, seed
        self._deadline = deadline  # of time.monotonic()
        self.actions: list[Action] = []  # executed, one a control step
        self.ticks: list[Tick] = []
        self.predictions: list[Prediction] = []
        self.score = 0.0
        self.misses = 0
        self.revision = ""
        self.notes: list[str] = []  # what went wrong without ending the episode
        self.over = self.success = False

    def reset(self, keys: Collection[str]) -> Mapping[str, Array]:
        with must_live():
            return self.env.reset(self.seed, keys)

    def observe(self, keys: Collection[str]) -> Mapping[str, Array]:
        with must_live():
            return self.env.observe(keys)

    def clip(self, actions: Action) -> Action:
        """``actions`` within the env's bounds."""
        return np.clip(actions, self.env.action.low, self.env.action.high).astype(np.float32)

    def step(self, action: Action) -> None:
        """One control step.

        Raises:
            EpisodeTimeout, EnvDied; ConfigError: the env reports no score of the name it says.
        """
        if time.monotonic() > self._deadline:
            raise EpisodeTimeout(f"more than {self.suite.time_limit_s:g} s")
        with must_live():
            done = self.env.step(action, keys=())
        self.actions.append(action)
        if self.env.score is not None:
            self.score = max(self.score, _score(self.env, done.info))
        self.success = done.success
        self.over = done.success or done.done

    def infer(
        self,
        session: LoopSession,
        arrays: Mapping[str, Array],
        step: int,
        executed: Action | None,
        frames: int = 0,
        **more: Any,
    ) -> TickResult:
        """One observation's round trip, timed."""
        began = time.perf_counter()
        result = session.infer(arrays, step=step, executed=executed, frames=frames, **more)
        round_trip = (time.perf_counter() - began) * 1e3
        t = result.timings
        self.ticks.append(Tick(step, round_trip, t.total_ms, t.model_ms, t.queue_ms, dict(t.stages_ms), bool(frames)))
        return result


@contextmanager
def must_live() -> Iterator[None]:
    """What a simulator raises that is no answer of its own ends it: nobody knows in which state it is left."""
    try:
        yield
    except OmniLoopError as e:
        if not e.retryable:
            raise
        raise EnvDied(f"{e.reason}: {e.text}") from e
    except Exception as e:
        raise EnvDied(f"{type(e).__name__}: {e}") from e


def _score(env: Env, info: Mapping[str, float]) -> float:
    key = str(env.score)
    if key not in info:
        raise ConfigError(f"env {env.name!r} reports no score {key!r}.{nearest(key, info)}")
    return float(info[key])
