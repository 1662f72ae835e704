"""Meta-World as an env: fifty tasks for one arm, at 80 control steps a second."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from omni_loop.env import BaseEnv, EnvStep
from omni_loop.errors import Unsupported
from omni_loop.types import Array, ArraySpec

from .simulator import HIGHEST_REWARD, STATE, Simulator
from .view import IMAGE_SIZE, View

GRIPPER = slice(0, 4)  # of the state


class MetaWorld(BaseEnv):
    """``task`` is a name of MT50, as ``"door-open-v3"``; another is :class:`UnknownName`. Success is the task's own, at
    any step; the simulator never ends an episode itself. A step costs about 0.5 ms, an image 8 ms.

    The state's 39 numbers are hand (x, y, z), opening of the fingers (0..1) and up to two objects (x, y, z and a
    quaternion each; zeros where there are fewer): first now, then a control step ago; then the goal (x, y, z).

    Without ``images`` there is nothing to see; with them a first look needs OSMesa or EGL on the machine, and is
    :class:`MissingExtra` where there is neither. Whoever never looks needs none.
    """

    name = "metaworld"
    packages = ("metaworld", "mujoco")
    control_hz = 80.0
    score = "reward"  # the task's shaped reward over its highest
    action = ArraySpec(
        "action", "float32", (4,), low=-1, high=1,
        description="hand displacement in x, y, z, in cm; fingers: 1 closes, -1 opens",
    )  # fmt: skip
    observations: tuple[ArraySpec, ...] = (
        ArraySpec("image", "uint8", (IMAGE_SIZE, IMAGE_SIZE, 3), unit="RGB", low=0, high=255),
        ArraySpec("gripper", "float32", (4,), unit="m, m, m, 1", description="hand's position; fingers' opening"),
        ArraySpec(
            "state", "float32", (STATE,), unit="m, 1",
            description="hand, fingers and objects now and a control step ago; goal",
        ),
    )  # fmt: skip

    def __init__(self, max_steps: int = 500, task: str = "reach-v3", images: bool = True) -> None:
        super().__init__(max_steps)
        if not images:
            self.observations = tuple(spec for spec in self.observations if spec.name != "image")
        self._sim = Simulator(task, max_steps)
        self._view = View(self._sim.model) if images else None

    @property
    def task(self) -> str:
        return self._sim.task

    @property
    def state(self) -> NDArray[np.float64]:
        """``float64[39]``: what the expert acts on; not rounded to what a policy sees."""
        return self._sim.seen.copy()

    def _reset(self, seed: int) -> None:
        self._sim.reset(seed)

    def _step(self, action: NDArray[np.float32]) -> EnvStep:
        reward, success = self._sim.step(action)
        return EnvStep({}, reward, False, False, success, {"reward": reward / HIGHEST_REWARD})

    def _array(self, key: str) -> Array:
        make: dict[str, Callable[[], Array]] = {
            "image": lambda: self._look().image(self._sim.data),
            "gripper": lambda: self._sim.seen[GRIPPER].astype(np.float32),
            "state": lambda: self._sim.seen.astype(np.float32),
        }
        return make[key]()

    def _render(self) -> NDArray[np.uint8]:
        return self._look().picture(self._sim.data)

    def _look(self) -> View:
        if self._view is None:
            raise Unsupported(f"env {self.name!r} was made without images")
        return self._view

    def _close(self) -> None:
        if self._view is not None:
            self._view.close()
        self._sim.close()
