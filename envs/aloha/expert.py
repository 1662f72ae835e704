"""An expert for TransferCube: the grippers are led along waypoints in a simulation of their own, where they can be
dragged by hand (mocap), and the joint angles that this took are replayed in the real one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omni_loop.env import Env

from ..experts import readable
from .env import JOINTS, AlohaTransferCube

from gym_aloha.constants import ASSETS_DIR, DT  # isort: skip
from gym_aloha.tasks.sim_end_effector import TransferCubeEndEffectorTask  # isort: skip
from dm_control import mujoco  # isort: skip
from dm_control.rl import control  # isort: skip

Vector = NDArray[np.float64]

# How stiffly the grippers hang on what drags them. With gym-aloha's own values they lag behind and miss the cube: 2 of
# 20 episodes succeed instead of all.
_STIFF = (0.9, 0.95, 0.001, 0.5, 2.0)
_OPEN, _CLOSED = 1.0, 0.0
_STEPS = 400
_GRIPPERS = (6, 13)  # of the joints
_MEET = np.array([0.0, 0.5, 0.25])  # m, where the cube changes hands
_LEVEL = np.array([1.0, 0, 0, 0])


@dataclass(frozen=True, slots=True)
class Waypoint:
    """Where a gripper is at control step ``step``: m, quaternion, 0 closed to 1 open."""

    step: int
    position: Vector
    rotation: Vector
    gripper: float


class _Dragged(TransferCubeEndEffectorTask):  # type: ignore[misc]
    """The mocap simulation, with the cube where it is told and nothing rendered."""

    box: Vector = np.zeros(3)

    def initialize_episode(self, physics: Any) -> None:
        super().initialize_episode(physics)
        physics.data.qpos[16:23] = [*self.box, *_LEVEL]

    def get_observation(self, physics: Any) -> OrderedDict[str, Vector]:
        hands = [np.concatenate([physics.data.mocap_pos[i], physics.data.mocap_quat[i]]) for i in (0, 1)]
        return OrderedDict(qpos=self.get_qpos(physics), left=hands[0], right=hands[1])


class AlohaExpert:
    """Plans an episode at its first action (0.6 s), then replays it."""

    def __init__(self, env: AlohaTransferCube) -> None:
        self._env = env
        physics = mujoco.Physics.from_xml_path(str(ASSETS_DIR / "bimanual_viperx_end_effector_transfer_cube.xml"))
        physics.model.eq_solimp[:] = _STIFF
        self._task = _Dragged()
        self._dragged = control.Environment(
            physics, self._task, float("inf"), control_timestep=DT, flat_observation=False
        )
        self._joints: list[NDArray[np.float32]] = []
        self._next = 0

    def reset(self, seed: int) -> None:
        self._joints, self._next = [], 0

    def act(self) -> NDArray[np.float32]:
        if not self._joints:
            self._joints = self._plan(self._env.box_position)
        action = self._joints[min(self._next, len(self._joints) - 1)]
        self._next += 1
        return action.copy()

    def _plan(self, box: Vector) -> list[NDArray[np.float32]]:
        """The actions of an episode whose cube begins at ``box``."""
        self._task.box = box
        seen = self._dragged.reset().observation
        left, right = left_way(seen["left"]), right_way(seen["right"], box)
        joints: list[NDArray[np.float32]] = []
        for step in range(_STEPS):
            hands = at(left, step), at(right, step)
            seen = self._dragged.step(np.concatenate(hands)).observation
            action = np.asarray(seen["qpos"], np.float64)
            for gripper, hand in zip(_GRIPPERS, hands, strict=True):
                action[gripper] = hand[7]  # as commanded: the fingers of the other simulation never squeeze
            joints.append(np.clip(action, -np.pi, np.pi).astype(np.float32).reshape(JOINTS))
        return joints


def for_env(env: Env) -> AlohaExpert:
    """A registry entry."""
    return AlohaExpert(readable(env, AlohaTransferCube))


def left_way(start: Vector) -> list[Waypoint]:
    """Of the arm that takes the cube over: to its side, around it, close, and back a little."""
    across = turned(np.array([1.0, 0, 0]), 90)
    ready, around = _MEET + shift(-0.1, 0, -0.02), _MEET + shift(0.02, 0, -0.02)
    return [
        Waypoint(0, start[:3], start[3:], _CLOSED),
        Waypoint(100, ready, across, _OPEN),
        Waypoint(260, around, across, _OPEN),
        Waypoint(310, around, across, _CLOSED),
        Waypoint(360, ready, _LEVEL, _CLOSED),
        Waypoint(400, ready, _LEVEL, _CLOSED),
    ]


def right_way(start: Vector, box: Vector) -> list[Waypoint]:
    """Of the arm that brings the cube: above it, down, close, to the meeting place, and away once it is taken."""
    down = product(start[3:], turned(np.array([0, 1.0, 0]), -60))
    low, away = box + shift(0, 0, -0.015), _MEET + shift(0.1, 0, 0)
    return [
        Waypoint(0, start[:3], start[3:], _CLOSED),
        Waypoint(90, box + shift(0, 0, 0.08), down, _OPEN),
        Waypoint(130, low, down, _OPEN),
        Waypoint(170, low, down, _CLOSED),
        Waypoint(200, _MEET + shift(0.05, 0, 0), down, _CLOSED),
        Waypoint(220, _MEET, down, _CLOSED),
        Waypoint(310, _MEET, down, _OPEN),
        Waypoint(360, away, down, _OPEN),
        Waypoint(400, away, down, _OPEN),
    ]


def at(way: Sequence[Waypoint], step: int) -> Vector:
    """``float64[8]`` between two waypoints: position, quaternion (MuJoCo normalises it), gripper."""
    for a, b in pairwise(way):
        if step <= b.step:
            share = (step - a.step) / (b.step - a.step)
            return np.concatenate(
                [
                    a.position + share * (b.position - a.position),
                    a.rotation + share * (b.rotation - a.rotation),
                    [a.gripper + share * (b.gripper - a.gripper)],
                ]
            )
    last = way[-1]
    return np.concatenate([last.position, last.rotation, [last.gripper]])


def shift(x: float, y: float, z: float) -> Vector:
    return np.array([x, y, z])


def turned(axis: Vector, degrees: float) -> Vector:
    """The quaternion of a turn about ``axis``."""
    half = np.deg2rad(degrees) / 2
    return np.array([np.cos(half), *(np.sin(half) * axis)])


def product(a: Vector, b: Vector) -> Vector:
    """Of two quaternions: first ``b``, then ``a``."""
    w, x, y, z = a
    return np.array([[w, -x, -y, -z], [x, w, -z, y], [y, z, w, -x], [z, -y, x, w]]) @ b
