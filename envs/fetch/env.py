"""The Fetch tasks of gymnasium-robotics as envs: reach, push, or carry to a goal, within 50 control steps of 0.04 s."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omni_loop.env import BaseEnv, EnvStep
from omni_loop.errors import ConfigError, Unsupported, nearest
from omni_loop.types import Array, ArraySpec

from .view import IMAGE_SIZE, View  # before what imports mujoco: it is told how to draw

with contextlib.redirect_stderr(io.StringIO()):  # it prints a notice about other environments of the package
    from gymnasium_robotics.envs.fetch.pick_and_place import MujocoFetchPickAndPlaceEnv
    from gymnasium_robotics.envs.fetch.push import MujocoFetchPushEnv
    from gymnasium_robotics.envs.fetch.reach import MujocoFetchReachEnv

_SUCCESS = "is_success"

GRIPPER, OBJECT, GOAL = slice(0, 3), slice(3, 6), slice(25, 28)  # parts of the state where there is a cube
STATE = 28
ENVIRONMENT = np.r_[3:9, 11:20, 25:28]  # of the state, what is not the robot's own

REACH_GOAL = slice(10, 13)  # of the state without a cube
REACH_STATE = 13
REACH_ENVIRONMENT = np.r_[10:13]

_IMAGE = ArraySpec("image", "uint8", (IMAGE_SIZE, IMAGE_SIZE, 3), unit="RGB", low=0, high=255)
_WITH_CUBE = (
    _IMAGE,
    ArraySpec(
        "environment_state", "float32", (len(ENVIRONMENT),), unit="m, rad, m/step, rad/step",
        description="cube: position, from the gripper, rotation, velocities; goal",
    ),
    ArraySpec(
        "state", "float32", (STATE,), unit="m, rad, m/step, rad/step",
        description="gripper, cube, cube from the gripper, fingers, cube's rotation, velocities; goal",
    ),
)  # fmt: skip


class FetchEnv(BaseEnv):
    """What the tasks share. The simulator never ends an episode itself. A step costs about 1 ms, an image 4 ms.

    ``state`` is the simulator's observation, then its goal. ``environment_state`` is the part of it that is not the
    robot's: LeRobot's ACT and Diffusion want that, or an image, besides ``state``.

    Without ``images`` there is nothing to see; with them a first look needs OSMesa or EGL on the machine, and is
    :class:`MissingExtra` where there is neither. Whoever never looks needs none.
    """

    packages = ("gymnasium-robotics", "mujoco")
    control_hz = 25.0
    action = ArraySpec(
        "action", "float32", (4,), low=-1, high=1,
        description="gripper displacement in x, y, z, in 5 cm; fingers: 1 opens, -1 closes",
    )  # fmt: skip
    observations: tuple[ArraySpec, ...] = _WITH_CUBE
    _simulator: Callable[[], Any]
    _environment = ENVIRONMENT

    def __init__(self, max_steps: int = 50, images: bool = True) -> None:
        super().__init__(max_steps)
        if not images:
            self.observations = tuple(spec for spec in self.observations if spec.name != "image")
        self._sim = type(self)._simulator()
        self._view = View(self._sim.model) if images else None
        _observe_late(self._sim)

    @property
    def state(self) -> NDArray[np.float32]:
        """``float32[28]``, of reach ``float32[13]``: what the expert acts on."""
        seen = type(self._sim)._get_obs(self._sim)
        state: NDArray[np.float32] = np.concatenate([seen["observation"], seen["desired_goal"]]).astype(np.float32)
        return state

    def _reset(self, seed: int) -> None:
        self._sim.reset(seed=seed)

    def _step(self, action: NDArray[np.float32]) -> EnvStep:
        _, reward, terminated, truncated, info = self._sim.step(action)
        if _SUCCESS not in info:
            raise ConfigError(f"env {self.name!r} reports no success key {_SUCCESS!r}.{nearest(_SUCCESS, info)}")
        return EnvStep({}, float(reward), bool(terminated), bool(truncated), bool(info[_SUCCESS] > 0.5))

    def _array(self, key: str) -> Array:
        make: dict[str, Callable[[], Array]] = {
            "image": lambda: self._look().image(self._sim.data, self._sim.goal),
            "environment_state": lambda: self.state[self._environment],
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


def _observe_late(sim: Any) -> None:
    """Let a step of ``sim`` compute of its observation only what it reads itself: where cube or gripper are. The rest
    takes nearly as long as the physics, and a policy looks at one step of ten."""
    site = "object0" if sim.has_object else "robot0:grip"

    def where() -> dict[str, NDArray[np.float64]]:
        return {"achieved_goal": sim._utils.get_site_xpos(sim.model, sim.data, site)}

    sim._get_obs = where


class FetchPickPlace(FetchEnv):
    """FetchPickAndPlace-v4. Success, at any step: the cube is within 5 cm of the goal, which lies on the table or up to
    45 cm above it."""

    name = "fetch-pick-place"
    _simulator = MujocoFetchPickAndPlaceEnv


class FetchPush(FetchEnv):
    """FetchPush-v4. Success, at any step: the cube, pushed with closed fingers, is within 5 cm of a goal on the
    table."""

    name = "fetch-push"
    _simulator = MujocoFetchPushEnv


class FetchReach(FetchEnv):
    """FetchReach-v4. Success, at any step: the gripper is within 5 cm of a goal in the air."""

    name = "fetch-reach"
    observations = (
        _IMAGE,
        ArraySpec("environment_state", "float32", (len(REACH_ENVIRONMENT),), unit="m", description="goal"),
        ArraySpec(
            "state", "float32", (REACH_STATE,), unit="m, m/step", description="gripper, fingers, velocities; goal"
        ),
    )
    _simulator = MujocoFetchReachEnv
    _environment = REACH_ENVIRONMENT
