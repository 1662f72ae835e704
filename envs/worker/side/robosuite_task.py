"""robosuite 1.5: any task for one arm."""

from __future__ import annotations

from typing import Any

import numpy as np

from .adapter import WorkerError, unknown
from .arm import ArmTask


class RobosuiteTask(ArmTask):
    """``task`` as robosuite calls it, with ``robot`` and its default controller at 20 Hz.

    A reset makes the scene anew, as robosuite does by default: the size of Lift's cube belongs to the episode, too.
    """

    def __init__(self, task: str, robot: str, images: bool, size: int, camera: str, max_steps: int) -> None:
        super().__init__(images, size, camera)
        import robosuite

        if task not in robosuite.ALL_ENVIRONMENTS:
            raise unknown("task of robosuite", task, robosuite.ALL_ENVIRONMENTS)
        if task.startswith("TwoArm"):
            raise WorkerError(f"task {task!r} is for two arms; this env has one", "failed_precondition", "unsupported")
        if robot not in robosuite.ALL_ROBOTS:
            raise unknown("robot of robosuite", robot, robosuite.ALL_ROBOTS)
        self._env = robosuite.make(
            task,
            robots=robot,
            controller_configs=robosuite.load_composite_controller_config(controller="BASIC", robot=robot),
            has_renderer=False,
            has_offscreen_renderer=False,
            use_camera_obs=False,
            renderer="mujoco",
            control_freq=20,
            ignore_done=True,
            seed=0,
        )
        if self._env.action_dim != 7:
            raise WorkerError(f"robot {robot!r} takes {self._env.action_dim} numbers; this env gives 7")
        self.spec = self._describe("robosuite", max_steps, "", ("robosuite", "mujoco"))

    def _begin(self, seed: int) -> dict[str, Any]:
        # In place: samplers keep the generator they were made with.
        self._env.rng.bit_generator.state = np.random.default_rng(seed).bit_generator.state
        seen: dict[str, Any] = self._env.reset()
        self._bodies = self._objects()
        return seen

    def _succeeded(self) -> bool:
        return bool(self._env._check_success())

    def _objects(self) -> dict[str, int]:
        model = self._env.sim.model
        return {thing.name: model.body_name2id(thing.root_body) for thing in self._env.model.mujoco_objects}
