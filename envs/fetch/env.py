"""FetchPickAndPlace-v4 of gymnasium-robotics as an env: carry a cube to a goal, within 50 control steps of 0.04 s."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from omni_loop.env import BaseEnv, EnvStep
from omni_loop.errors import ConfigError, Unsupported, nearest
from omni_loop.types import Array, ArraySpec

from .view import IMAGE_SIZE, View

with contextlib.redirect_stderr(io.StringIO()):  # it prints a notice about other environments of the package
    from gymnasium_robotics.envs.fetch.pick_and_place import MujocoFetchPickAndPlaceEnv

_SUCCESS = "is_success"

GRIPPER, OBJECT, GOAL = slice(0, 3), slice(3, 6), slice(25, 28)  # parts of the state
STATE = 28
ENVIRONMENT = np.r_[3:9, 11:20, 25:28]  # of the state, what is not the robot's own


class FetchPickPlace(BaseEnv):
    """Success, at any step: the cube is within 5 cm of the goal, which lies on the table or up to 45 cm above it. The
    simulator never ends an episode itself. A step costs about 1 ms, an image 4 ms.

    ``state`` is the simulator's observation, then its goal. ``environment_state`` is the part of it that is not the
    robot's: LeRobot's ACT and Diffusion want that, or an image, besides ``state``.

    Without ``images`` there is nothing to see; with them a first look needs OSMesa or EGL on the machine, and is
    :class:`MissingExtra` where there is neither. Whoever never looks needs none.
    """

    name = "fetch-pick-place"
    control_hz = 25.0
    action = ArraySpec(
        "action", "float32", (4,), low=-1, high=1,
        description="gripper displacement in x, y, z, in 5 cm; fingers: 1 opens, -1 closes",
    )  # fmt: skip
    observations: tuple[ArraySpec, ...] = (
        ArraySpec("image", "uint8", (IMAGE_SIZE, IMAGE_SIZE, 3), unit="RGB", low=0, high=255),
        ArraySpec(
            "environment_state", "float32", (len(ENVIRONMENT),), unit="m, rad, m/step, rad/step",
            description="cube: position, from the gripper, rotation, velocities; goal",
        ),
        ArraySpec(
            "state", "float32", (STATE,), unit="m, rad, m/step, rad/step",
            description="gripper, cube, cube from the gripper, fingers, cube's rotation, velocities; goal",
        ),
    )  # fmt: skip

    def __init__(self, max_steps: int = 50, images: bool = True) -> None:
        super().__init__(max_steps)
        if not images:
            self.observations = tuple(spec for spec in self.observations if spec.name != "image")
        self._sim = MujocoFetchPickAndPlaceEnv()
        self._view = View(self._sim.model) if images else None
        self._seen: dict[str, NDArray[np.float64]] = {}

    @property
    def state(self) -> NDArray[np.float32]:
        """``float32[28]``: what the expert acts on."""
        return np.concatenate([self._seen["observation"], self._seen["desired_goal"]]).astype(np.float32)

    def _reset(self, seed: int) -> None:
        self._seen, _ = self._sim.reset(seed=seed)

    def _step(self, action: NDArray[np.float32]) -> EnvStep:
        self._seen, reward, terminated, truncated, info = self._sim.step(action)
        if _SUCCESS not in info:
            raise ConfigError(f"env {self.name!r} reports no success key {_SUCCESS!r}.{nearest(_SUCCESS, info)}")
        return EnvStep({}, float(reward), bool(terminated), bool(truncated), bool(info[_SUCCESS] > 0.5))

    def _array(self, key: str) -> Array:
        make: dict[str, Callable[[], Array]] = {
            "image": lambda: self._look().image(self._sim.data, self._sim.goal),
            "environment_state": lambda: self.state[ENVIRONMENT],
            "state": lambda: self.state,
        }
        return make[key]()

    def _render(self) -> NDArray[np.uint8]:
        return self._look().picture(self._sim.data, self._sim.goal)

    def _look(self) -> View:
        if self._view is None:
            raise Unsupported(f"env {self.name!r} was made without images")
        return self._view

    def _close(self) -> None:
        if self._view is not None:
            self._view.close()
        self._sim.close()
