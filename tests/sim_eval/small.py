"""Envs that another process finds by module, and a server for them: shards are tested with real processes."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omni_loop.env import EnvStep
from omni_loop.serve.background import BackgroundServer
from omni_loop.types import Array, ArraySpec
from omni_loop_sim_eval.suite import EvalSuite

from .toy import ToyEnv, draw, toy_suite

HERE = __name__
TESTS = Path(__file__).parents[1]  # on the path of a process that finds these modules, in another folder than the root
IMAGE = ArraySpec("image", "uint8", (8, 8, 3), low=0, high=255)
AGENT = ArraySpec("agent_pos", "float32", (2, 2), unit="px")


class SmallEnv(ToyEnv):
    """The toy env with the observations the toy server takes."""

    name = "small"
    observations = (IMAGE, AGENT)

    def _array(self, key: str) -> Array:
        if key == "image":
            return draw(self.position, 8)
        return np.clip(np.stack([self.position, self.position]), 0, 512).astype(np.float32)


class FrailEnv(SmallEnv):
    """Dies as it is told ``how`` in the third step of episode ``seed``: as often as ``times`` says, counted by files in
    ``folder``, which outlive the process."""

    name = "frail"

    def __init__(self, how: str, seed: int, folder: str, times: int = 1, max_steps: int = 10) -> None:
        super().__init__(max_steps)
        self._how, self._ill, self._folder, self._times = how, seed, Path(folder), times
        self._seed = -1

    def _reset(self, seed: int) -> None:
        super()._reset(seed)
        self._seed = seed

    def _step(self, action: NDArray[np.float32]) -> EnvStep:
        if self._seed == self._ill and self._steps == 2 and len(list(self._folder.iterdir())) < self._times:
            (self._folder / f"{os.getpid()}-{time.monotonic_ns()}").touch()
            if self._how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if self._how == "hangs":
                time.sleep(600)
            raise RuntimeError("the physics exploded")
        return super()._step(action)


class SmallServer(BackgroundServer):
    module = "omni_loop.testing.toy_server"


def small_suite(**fields: Any) -> EvalSuite:
    base = {
        "env": f"{HERE}:SmallEnv", "keys": ["image", "agent_pos"], "max_steps": 10, "state_keys": [],
        "first_seed": 10, "predictions": {"episodes": 0},
    }  # fmt: skip
    return toy_suite(**(base | fields))
