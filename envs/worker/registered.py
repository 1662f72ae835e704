"""The envs of workers, as they are registered: ``worker``, ``robosuite`` and ``libero``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from omni_loop.errors import ConfigError
from omni_loop_envs import headless

from .env import WorkerEnv
from .environments import command
from .process import Limits


def worker(
    env: str,
    env_options: Mapping[str, Any] | None = None,
    max_steps: int | None = None,
    start_s: float = 300.0,
    answer_s: float = 120.0,
) -> WorkerEnv:
    """The registered env called ``env`` in a process of its own, made with ``env_options`` (and ``max_steps``, where
    that is given). A crash of its simulator is an error of an episode then, not the end of everything. What it gives is
    the same to the bit.

    ``start_s`` and ``answer_s``: longest time, in seconds, for being made and for any request after that.
    """
    given = {} if env_options is None else env_options
    if not isinstance(given, Mapping):
        raise _wrong("env_options", "worker", given, "a mapping")
    own = {} if max_steps is None else {"max_steps": max_steps}
    options = {"env": env, "options": {**given, **own}}
    return WorkerEnv(env, "project", options, limits=Limits(start_s, answer_s))


def robosuite(
    task: str = "Lift",
    robot: str = "Panda",
    images: bool = True,
    size: int = 128,
    camera: str = "agentview",
    max_steps: int = 200,
    start_s: float = 300.0,
    answer_s: float = 120.0,
) -> WorkerEnv:
    """A task of robosuite 1.5 with one arm and its default controller (OSC_POSE, 20 Hz).

    Success is the simulator's ``_check_success()``; it never ends an episode itself. Observations: ``state``
    float32[8] (hand's position in m, its rotation as axis times angle in rad, two fingers in m), ``objects``
    float32[n, 7] (position in m and quaternion xyzw; the spec's description names the rows), and with ``images``
    ``image`` (of ``camera``) and ``wrist``, uint8[size, size, 3]. An action is the hand's displacement (in 5 cm), its
    rotation (in 0.5 rad), and the gripper (1 closes), each within ±1.

    Raises:
        MissingExtra: its environment is not installed, or ``images`` are wanted where nothing can draw.
    """
    options = {"task": task, "robot": robot, "images": images, "size": size, "camera": camera, "max_steps": max_steps}
    return _simulator("robosuite", options, images, Limits(start_s, answer_s))


def libero(
    suite: str = "libero_spatial",
    task: str | int = 0,
    images: bool = True,
    size: int = 128,
    frames: str = "upright",
    instruction: str = "bddl",
    settle_steps: int = 10,
    max_steps: int = 300,
    start_s: float = 300.0,
    answer_s: float = 120.0,
) -> WorkerEnv:
    """A task of LIBERO, by number or name, of any suite of LIBERO or LIBERO-PRO that is bundled.

    A seed is the task's initial state number ``seed`` modulo their number (mostly 50), then ``settle_steps`` of doing
    nothing, as in LIBERO's own evaluation. Success is ``check_success()`` and ends the episode. The env's
    ``instruction`` is that of the task's bddl file, or of its name, as most policies were trained: "pick the soup" and
    "pick up the soup", say. Observations and actions are those of :func:`robosuite`. ``frames``: ``upright``; ``raw``,
    bottom row first as in LIBERO's data; or ``rotated``, raw turned by 180°, as policies trained on that mostly see it.

    Raises:
        MissingExtra: its environment is not installed, or ``images`` are wanted where nothing can draw.
    """
    if type(task) not in (str, int):
        raise _wrong("task", "libero", task, "a number or a name")
    options = {
        "suite": suite, "task": task, "images": images, "size": size, "frames": frames,
        "instruction": instruction, "settle_steps": settle_steps, "max_steps": max_steps,
    }  # fmt: skip
    return _simulator("libero", options, images, Limits(start_s, answer_s))


def _wrong(option: str, env: str, value: Any, wanted: str) -> ConfigError:
    return ConfigError(f"option {option!r} of {env!r} is {value!r:.64} ({type(value).__name__}); it must be {wanted}")


def _simulator(name: str, options: Mapping[str, Any], images: bool, limits: Limits) -> WorkerEnv:
    start = command(name)
    headless.prepare()
    if images:
        headless.backend()  # says what is missing, before a simulator fails at its import
    return WorkerEnv(name, name, options, command=start, environ=os.environ, limits=limits)
