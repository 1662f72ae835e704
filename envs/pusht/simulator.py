"""gym-pusht as this package uses it: state in, state and 96 x 96 frames out."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # the table is drawn off screen

from gym_pusht.envs.pusht import PushTEnv, pymunk_to_shapely  # after the driver is chosen

FRAME_SIZE = 96  # gym-pusht's own observation size; 64 makes its marker drawing fail


def steady(env: Any) -> None:
    """Let gym-pusht's ``env`` measure the coverage to the same bit in every process: the T's two parts are a set, whose
    order is that of their addresses, and the last bits of an area depend on the order."""

    def coverage() -> float:
        parts = sorted(env.block.shapes, key=lambda part: part.get_vertices())
        goal = pymunk_to_shapely(env.get_goal_pose_body(env.goal_pose), parts)
        return float(goal.intersection(pymunk_to_shapely(env.block, parts)).area / goal.area)

    env._get_coverage = coverage


class PushTSimulator:
    """One PushT table. ``state`` is ``float32[5]``; ``frame()`` is ``uint8[96, 96, 3]``."""

    def __init__(self) -> None:
        self.env = PushTEnv(obs_type="state", render_mode="rgb_array")
        steady(self.env)

    def reset(self, seed: int) -> NDArray[np.float32]:
        self.env.reset(seed=seed)
        return self.state

    def place(self, state: NDArray[np.floating]) -> None:
        """Put agent and T at ``state`` without stepping the physics; for drawing any scene."""
        env = self.env
        env.block.angle = float(state[4])
        env.block.position = (float(state[2]), float(state[3]))
        env.agent.position = (float(state[0]), float(state[1]))
        env.space.reindex_shapes_for_body(env.block)
        env.space.reindex_shapes_for_body(env.agent)

    def step(self, action: NDArray[np.floating]) -> dict[str, Any]:
        """One control step (0.1 s); returns the environment's info with ``coverage`` and ``is_success``."""
        *_, info = self.env.step(np.asarray(action, np.float64))
        return dict(info)

    @property
    def state(self) -> NDArray[np.float32]:
        agent, block = self.env.agent.position, self.env.block
        return np.array([*agent, *block.position, block.angle], np.float32)

    @property
    def coverage(self) -> float:
        """Part of the goal that the T covers, 0..1; success is above 0.95."""
        return float(self.env._get_coverage())

    def frame(self) -> NDArray[np.uint8]:
        return np.ascontiguousarray(self.env._render())
