"""TransferCube of gym-aloha as an env: the right arm picks the cube up and the left one takes it over. Needs the extra
``aloha``."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omni_loop.env import BaseEnv, EnvStep
from omni_loop.errors import ConfigError, nearest
from omni_loop.types import Array, ArraySpec

from ..drawable import side
from ..drawing import Canvas, fixed_camera  # before what imports mujoco: it is told how to draw

from gym_aloha.constants import ASSETS_DIR, DT, normalize_puppet_gripper_position  # isort: skip
from gym_aloha.env import AlohaEnv  # isort: skip
from gym_aloha.tasks.sim import TransferCubeTask  # isort: skip
from dm_control import mujoco  # isort: skip
from dm_control.rl import control  # isort: skip

_SUCCESS = "is_success"
_CAMERA = "top"
_PICTURE = (640, 480)  # px, width and height, for people; multiples of 16, as video wants
_RESETTING = threading.Lock()  # gym-aloha hands the cube's place to its task in a global
JOINTS = 14


def told(physics: Any) -> NDArray[np.float64]:
    """The action that gym-aloha's arms carry out at present, ``float64[14]``."""
    arms = physics.data.ctrl.reshape(2, JOINTS // 2 + 1)  # six joints and two fingers
    return np.ravel([[*arm[:6], normalize_puppet_gripper_position(arm[6])] for arm in arms])


class _TransferCube(TransferCubeTask):  # type: ignore[misc]
    """gym-aloha renders three images of 640 x 480 at every step, 300 ms in software. Here nothing is drawn that nobody
    looks at."""

    def get_observation(self, physics: Any) -> OrderedDict[str, NDArray[np.float64]]:
        return OrderedDict(qpos=self.get_qpos(physics), env_state=self.get_env_state(physics))


class _Aloha(AlohaEnv):  # type: ignore[misc]
    def _make_env_task(self, task_name: str) -> Any:
        physics = mujoco.Physics.from_xml_path(str(ASSETS_DIR / "bimanual_viperx_transfer_cube.xml"))
        return control.Environment(physics, _TransferCube(), float("inf"), control_timestep=DT, flat_observation=False)

    def _format_raw_obs(self, raw_obs: Any) -> Any:
        return raw_obs


class AlohaTransferCube(BaseEnv):
    """Success, which ends the episode: the left gripper touches the cube, and the table does not. A control step of
    0.02 s costs 1.5 ms, an image 7 ms. The cube's place is drawn from the seed.

    Joints that are told to jump can make the simulation diverge. That ends the episode too, without success, and with
    ``diverged`` 1 in ``info``; what is observed then is what was before.
    """

    name = "aloha"
    packages = ("gym-aloha", "dm_control", "mujoco")
    control_hz = 50.0
    action = ArraySpec(
        "action", "float32", (JOINTS,), unit="rad", low=-np.pi, high=np.pi,
        description="for the left, then the right arm: where six joints should be, and the gripper: 0 closed, 1 open",
    )  # fmt: skip

    def __init__(self, max_steps: int = 300, image_width: int = 128, image_height: int = 96) -> None:
        super().__init__(max_steps)
        self._size = (side("image_width", image_width), side("image_height", image_height))
        self.observations = (
            ArraySpec("image", "uint8", (image_height, image_width, 3), unit="RGB", low=0, high=255),
            ArraySpec(
                "state", "float32", (JOINTS,), unit="rad",
                description="as the action: six joints and a gripper of the left, then of the right arm",
            ),
            ArraySpec("environment_state", "float32", (7,), unit="m", description="cube: position and quaternion"),
        )  # fmt: skip
        self._sim = _Aloha("transfer_cube", obs_type="pixels_agent_pos")
        self._seen: dict[str, NDArray[np.float64]] = {}
        model = self._physics.model.ptr
        self._camera = fixed_camera(model, _CAMERA)
        self._canvas = Canvas(model, max(image_width, _PICTURE[0]), max(image_height, _PICTURE[1]))

    @property
    def box_position(self) -> NDArray[np.float64]:
        """``float64[3]`` in m: where the cube is."""
        return self._seen["env_state"][:3].copy()

    def hold(self) -> NDArray[np.float32]:
        """Where the joints are told to be: told to be where they are, the arms would sink a little at every step."""
        return np.clip(told(self._physics), self.action.low, self.action.high).astype(np.float32)

    @property
    def _physics(self) -> Any:
        return self._sim._env.physics

    def _reset(self, seed: int) -> None:
        with _RESETTING:
            self._seen, _ = self._sim.reset(seed=seed)

    def _step(self, action: NDArray[np.float32]) -> EnvStep:
        before = self._physics.data.qpos.copy()
        try:
            self._seen, reward, terminated, truncated, info = self._sim.step(action.astype(np.float64))
        except control.PhysicsError:
            self._physics.data.qpos[:] = before  # so that it can still be drawn
            return EnvStep({}, 0.0, True, False, False, {"diverged": 1.0})
        if _SUCCESS not in info:
            raise ConfigError(f"env {self.name!r} reports no success key {_SUCCESS!r}.{nearest(_SUCCESS, info)}")
        return EnvStep({}, float(reward), bool(terminated), bool(truncated), bool(info[_SUCCESS]), {"diverged": 0.0})

    def _array(self, key: str) -> Array:
        make: dict[str, Callable[[], Array]] = {
            "image": lambda: self._draw(*self._size),
            "state": lambda: self._seen["qpos"].astype(np.float32),
            "environment_state": lambda: self._seen["env_state"].astype(np.float32),
        }
        return make[key]()

    def _render(self) -> NDArray[np.uint8]:
        return self._draw(*_PICTURE)

    def _draw(self, width: int, height: int) -> NDArray[np.uint8]:
        return self._canvas.draw(self._physics.data.ptr, self._camera, width, height)

    def _close(self) -> None:
        self._canvas.close()
        self._sim.close()
