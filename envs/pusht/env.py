"""PushT as an env: push the T onto its goal within ``max_steps`` control steps of 0.1 s."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from omni_loop.env import BaseEnv, EnvStep
from omni_loop.types import Array, ArraySpec

from .simulator import FRAME_SIZE, PushTSimulator

_RENDER_SIZE = 384  # px; a multiple of 16, as video wants


class PushT(BaseEnv):
    """Success is a coverage above 0.95, which ends the episode. A frame costs 4 ms, a step 0.5 ms."""

    name = "pusht"
    packages = ("gym-pusht", "pymunk", "shapely")
    control_hz = 10.0
    score = "coverage"
    action = ArraySpec("action", "float32", (2,), unit="px", low=0, high=512, description="where the agent should go")
    observations = (
        ArraySpec("image", "uint8", (FRAME_SIZE, FRAME_SIZE, 3), unit="RGB", low=0, high=255),
        ArraySpec(
            "agent_pos", "float32", (2, 2), unit="px", low=0, high=512,
            description="position at the previous and at this control step; twice the same at step 0",
        ),
        ArraySpec("block_pose", "float32", (3,), unit="px, px, rad", description="x, y and angle of the T"),
    )  # fmt: skip

    def __init__(self, max_steps: int = 300) -> None:
        super().__init__(max_steps)
        self._sim = PushTSimulator()
        self._sim.env.visualization_width = self._sim.env.visualization_height = _RENDER_SIZE
        self._agent: NDArray[np.float32] = np.zeros((2, 2), np.float32)

    @property
    def state(self) -> NDArray[np.float32]:
        """``float32[5]``: what the expert acts on."""
        return self._sim.state

    def hold(self) -> NDArray[np.float32]:
        return np.array(self._agent[1])

    def _reset(self, seed: int) -> None:
        state = self._sim.reset(seed)
        self._sim.env._last_action = None  # gym-pusht would go on drawing the last episode's action
        self._agent = np.stack([state[:2], state[:2]])

    def _step(self, action: NDArray[np.float32]) -> EnvStep:
        info = self._sim.step(action)
        self._agent = np.stack([self._agent[1], self._sim.state[:2]])
        success, coverage = bool(info["is_success"]), float(info["coverage"])
        return EnvStep({}, min(coverage / 0.95, 1.0), success, False, success, {"coverage": coverage})

    def _array(self, key: str) -> Array:
        make: dict[str, Callable[[], Array]] = {
            "image": self._sim.frame,
            "agent_pos": self._agent.copy,
            "block_pose": lambda: self._sim.state[2:],
        }
        return make[key]()

    def _render(self) -> NDArray[np.uint8]:
        return np.ascontiguousarray(self._sim.env.render())

    def _close(self) -> None:
        self._sim.env.close()
