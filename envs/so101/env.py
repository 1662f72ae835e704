"""PickPlace of lerobot-env-so101 as an env: lift the cube, put it down at the goal, let go.

Needs the extra ``so101``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omni_loop.env import BaseEnv, EnvStep
from omni_loop.errors import ConfigError, nearest
from omni_loop.types import Array, ArraySpec

from ..drawable import side
from ..drawing import Canvas, fixed_camera  # before what imports mujoco: it is told how to draw

from lerobot_env_so101.pick_place_env import SO101PickPlaceGymEnv  # isort: skip
from lerobot_env_so101.policy import DEFAULT_ACTION_SCALE  # isort: skip

_SUCCESS = "succeed"  # not is_success: who reads that sees 0 % and no error
_CAMERA = "front"
_PICTURE = 384  # px, for people; a multiple of 16, as video wants
ARM, ENVIRONMENT = 14, 6


class So101PickPlace(BaseEnv):
    """Success, which ends the episode: the cube was lifted by 3 cm, rests within 3 cm of the goal, and the jaw is open.
    A control step of 0.1 s costs 6 ms, an image 50 ms. Cube and goal are drawn from the seed; the goal is in
    ``environment_state`` alone, no image shows it.
    """

    name = "so101"
    packages = ("lerobot-env-so101", "mujoco")
    control_hz = 10.0
    action = ArraySpec(
        "action", "float32", (4,), low=-1, high=1,
        description="grasp point's displacement in x, y, z, in 2.5 cm; jaw: where it should be, -1 closed, 1 open",
    )  # fmt: skip

    def __init__(self, max_steps: int = 300, image_size: int = 96) -> None:
        super().__init__(max_steps)
        self._size = side("image_size", image_size)
        self.observations = (
            ArraySpec("image", "uint8", (image_size, image_size, 3), unit="RGB", low=0, high=255),
            ArraySpec(
                "state", "float32", (ARM,), unit="rad, rad/s, m",
                description="five joints, their velocities, the jaw's target in -1..1, the gripper's position",
            ),
            ArraySpec("environment_state", "float32", (ENVIRONMENT,), unit="m", description="cube; goal"),
            ArraySpec("grasp_point", "float32", (3,), unit="m", description="between the jaws: what an action moves"),
        )  # fmt: skip
        self._sim = SO101PickPlaceGymEnv(random_block_position=True, action_scale=DEFAULT_ACTION_SCALE)
        self._seen: dict[str, NDArray[np.float32]] = {}
        self._camera = fixed_camera(self._sim.model, _CAMERA)
        largest = max(image_size, _PICTURE)
        self._canvas = Canvas(self._sim.model, largest, largest)

    @property
    def places(self) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
        """Grasp point, cube and goal in m: what the expert acts on."""
        return self._sim.ik_point_pos.copy(), self._sim.data.sensor("block_pos").data.copy(), self._sim.goal_pos

    def hold(self) -> NDArray[np.float32]:
        return np.array([0, 0, 0, self._sim.get_gripper_pose()[0]], np.float32).clip(-1, 1)

    def _reset(self, seed: int) -> None:
        self._seen, _ = self._sim.reset(seed=seed)

    def _step(self, action: NDArray[np.float32]) -> EnvStep:
        native = np.array([*action[:3], (action[3] + 1) / 2], np.float32)  # its jaw goes from 0 to 1
        self._seen, reward, terminated, truncated, info = self._sim.step(native)
        if _SUCCESS not in info:
            raise ConfigError(f"env {self.name!r} reports no success key {_SUCCESS!r}.{nearest(_SUCCESS, info)}")
        return EnvStep({}, float(reward), bool(terminated), bool(truncated), bool(info[_SUCCESS]))

    def _array(self, key: str) -> Array:
        make: dict[str, Callable[[], Any]] = {
            "image": lambda: self._draw(self._size),
            "state": lambda: self._seen["agent_pos"],
            "environment_state": lambda: self._seen["environment_state"],
            "grasp_point": lambda: self._sim.ik_point_pos,
        }
        array = make[key]()
        return array if key == "image" else np.array(array, np.float32)

    def _render(self) -> NDArray[np.uint8]:
        return self._draw(_PICTURE)

    def _draw(self, size: int) -> NDArray[np.uint8]:
        return self._canvas.draw(self._sim.data, self._camera, size, size)

    def _close(self) -> None:
        self._canvas.close()
        self._sim.close()
