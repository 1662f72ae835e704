"""The env ``imagined`` over the guide's world: the whole env contract, with an expert who succeeds."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from omni_loop import registry
from omni_loop.env import BaseEnv, Env, EnvStep
from omni_loop.testing.env_contract import Act, EnvContract
from omni_loop.types import Array, ArraySpec
from omni_loop_worlds.imagined import Seen, Verdict
from omni_loop_worlds.imagined.env import Imagined

from .blocks import module


class Table(BaseEnv):
    """A camera over the guide's table: what first frames are taken from."""

    name, control_hz = "table", 10.0
    observations = (ArraySpec("top", "uint8", (32, 32, 3), low=0, high=255),)
    action = ArraySpec("action", "float32", (2,), "px", 0, 512)

    def __init__(self, max_steps: int = 40) -> None:
        super().__init__(max_steps)

    def _reset(self, seed: int) -> None:
        self.place = np.random.default_rng(seed).uniform(60, 200, 2)

    def _step(self, action: NDArray[np.float32]) -> EnvStep:
        raise NotImplementedError("nobody steps a camera")

    def _array(self, key: str) -> Array:
        frame: Array = module("my_world.py").draw(self.place)
        return frame

    def _render(self) -> NDArray[np.uint8]:
        return self._array("top")


def in_the_middle(seen: Seen) -> Verdict:
    away = float(np.linalg.norm(module("my_world.py").find(seen.frame) - 256))
    return Verdict(-away, away < 20, {"nearness": 1 / (1 + away)})


in_the_middle.score = "nearness"  # type: ignore[attr-defined]


class TestImaginedTable(EnvContract):
    @pytest.fixture(autouse=True)
    def _table(self, world_address: str) -> Iterator[None]:
        self.address = world_address
        with registry.registered(registry.ENVS, "table", Table):
            yield

    def make_env(self) -> Env:
        judge = f"{in_the_middle.__module__}:in_the_middle"
        made = Imagined(40, world="puck", address=self.address, start="table", image="top", agent="", judge=judge)
        assert made.score == "nearness"
        return made

    def make_expert(self, env: Env, seed: int) -> Act:
        return lambda: np.full(2, 256, np.float32)
