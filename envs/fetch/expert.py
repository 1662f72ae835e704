"""Experts of the Fetch tasks. Each acts on the true state, deterministically; ``reset`` begins an episode."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..experts import expert_of
from .env import GOAL, GRIPPER, OBJECT, REACH_GOAL, FetchPickPlace, FetchPush, FetchReach

_ABOVE = np.array([0.0, 0.0, 0.08])  # m over the cube, from where the fingers come down around it
_ARRIVED, _AROUND = 0.02, 0.012  # m
_CLOSING = 5  # steps until the fingers hold
_LOST = 0.05  # m between gripper and cube: it has slipped, begin again
_OPEN, _CLOSED = 1.0, -1.0

_BEHIND, _OVER = 0.07, 0.07  # m from the cube's middle: where a push begins, and how high the hand travels there
_CLEAR = 0.05  # m above the cube's middle: the hand may move sideways
_BESIDE, _LEVEL, _ASTRAY = 0.012, 0.015, 0.04  # m
_ASIDE = 0.018  # m off the line of the push: the cube would turn away
_PUSHED = 0.02  # m from the goal
Vector = NDArray[np.float64]


class FetchExpert:
    """Pick-and-place: above the cube, down, close, carry."""

    def __init__(self) -> None:
        self.reset()

    def reset(self, seed: int = 0) -> None:
        self._phase, self._closing = "above", 0

    def act(self, state: NDArray[np.floating]) -> NDArray[np.float32]:
        """Action ``float32[4]`` in -1..1 for ``state[28]`` (see :class:`.env.FetchPickPlace`)."""
        gripper, cube, goal = _parts(state)
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


class PushExpert:
    """Push: over the cube to behind it, down, and along the line to the goal, anew whenever the hand has left it."""

    def __init__(self) -> None:
        self.reset()

    def reset(self, seed: int = 0) -> None:
        self._phase = "over"

    def act(self, state: NDArray[np.floating]) -> NDArray[np.float32]:
        """Action ``float32[4]`` in -1..1 for ``state[28]`` (see :class:`.env.FetchPush`)."""
        gripper, cube, goal = _parts(state)
        way = (goal - cube) * np.array([1, 1, 0])
        distance = float(np.linalg.norm(way))
        if distance < _PUSHED:
            return np.zeros(4, np.float32)
        along = way / distance
        behind = cube - along * _BEHIND
        if self._phase == "over":
            return self._go_over(gripper, cube, behind)
        if self._phase == "down":
            if abs(gripper[2] - cube[2]) < _LEVEL:
                self._phase = "push"
            if np.linalg.norm((gripper - behind)[:2]) > _ASTRAY:
                self._phase = "over"
            return _action(10 * (behind - gripper), _CLOSED)
        return self._push(gripper, cube, along, distance)

    def _go_over(self, gripper: Vector, cube: Vector, behind: Vector) -> NDArray[np.float32]:
        above = behind + np.array([0, 0, _OVER])
        if np.linalg.norm((gripper - above)[:2]) < _BESIDE:
            self._phase = "down"
        elif gripper[2] < cube[2] + _CLEAR:
            return _action(np.array([0, 0, 1.0]), _CLOSED)
        return _action(10 * (above - gripper), _CLOSED)

    def _push(self, gripper: Vector, cube: Vector, along: Vector, distance: float) -> NDArray[np.float32]:
        off = (gripper - cube) * np.array([1, 1, 0])
        aside = off - (off @ along) * along
        if np.linalg.norm(aside) > _ASIDE or off @ along > 0:
            self._phase = "over"
        speed = min(1.0, max(0.12, 6 * distance))  # slower towards the goal, where the cube would slide on
        step = along * speed - 12 * aside
        step[2] = 10 * (cube[2] - gripper[2])
        return _action(step, _CLOSED)


class ReachExpert:
    """Reach: straight to the goal."""

    def reset(self, seed: int = 0) -> None:
        return None

    def act(self, state: NDArray[np.floating]) -> NDArray[np.float32]:
        """Action ``float32[4]`` in -1..1 for ``state[13]`` (see :class:`.env.FetchReach`)."""
        return _action(10 * np.asarray(state[REACH_GOAL] - state[GRIPPER], np.float64), 0.0)


pick_place = expert_of(FetchPickPlace, FetchExpert)
push = expert_of(FetchPush, PushExpert)
reach = expert_of(FetchReach, ReachExpert)


def _parts(state: NDArray[np.floating]) -> tuple[Vector, Vector, Vector]:
    """Gripper, cube and goal, in m."""
    gripper, cube, goal = (np.asarray(state[part], np.float64) for part in (GRIPPER, OBJECT, GOAL))
    return gripper, cube, goal


def _action(step: Vector, fingers: float) -> NDArray[np.float32]:
    return np.clip([*step, fingers], -1, 1).astype(np.float32)
