"""An expert for pick-and-place: above the cube, down, close, carry."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .env import GOAL, GRIPPER, OBJECT

_ABOVE = np.array([0.0, 0.0, 0.08])  # m over the cube, from where the fingers come down around it
_ARRIVED, _AROUND = 0.02, 0.012  # m
_CLOSING = 5  # steps until the fingers hold
_LOST = 0.05  # m between gripper and cube: it has slipped, begin again
_OPEN, _CLOSED = 1.0, -1.0


class FetchExpert:
    """Acts on the true state; deterministic. ``reset`` begins an episode."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._phase, self._closing = "above", 0

    def act(self, state: NDArray[np.floating]) -> NDArray[np.float32]:
        """Action ``float32[4]`` in -1..1 for ``state[28]`` (see :class:`.env.FetchPickPlace`)."""
        gripper, cube, goal = (np.asarray(state[part], np.float64) for part in (GRIPPER, OBJECT, GOAL))
        if self._phase in ("close", "carry") and np.linalg.norm(cube - gripper) > _LOST:
            self.reset()
        if self._phase == "above":
            step = cube + _ABOVE - gripper
            if np.linalg.norm(step) < _ARRIVED:
                self._phase = "down"
            return _action(10 * step, _OPEN)
        if self._phase == "down":
            step = cube - gripper
            if np.linalg.norm(step) < _AROUND:
                self._phase = "close"
            return _action(10 * step, _OPEN)
        if self._phase == "close":
            self._closing += 1
            if self._closing >= _CLOSING:
                self._phase = "carry"
            return _action(np.zeros(3), _CLOSED)
        return _action(8 * (goal - cube), _CLOSED)


def _action(step: NDArray[np.float64], fingers: float) -> NDArray[np.float32]:
    return np.clip([*step, fingers], -1, 1).astype(np.float32)
