"""What robosuite 1.4 (LIBERO) and 1.5 have in common: one arm, a hand, objects, two cameras."""

from __future__ import annotations

import random
from importlib.metadata import version
from typing import Any

import numpy as np

from .adapter import Outcome, Spec, WorkerError, array_spec
from .frames import Canvas, camera_id
from .wire import Array

PICTURE = 384  # px, of a frame for people
WRIST = "robot0_eye_in_hand"
ACTION = array_spec(
    "action",
    "float32",
    (7,),
    low=-1,
    high=1,
    description="hand: displacement in x, y, z (in 5 cm), rotation (axis times angle, in 0.5 rad); gripper: 1 closes",
)


class ArmTask:
    """Base of the two adapters, which make ``self._env`` (robosuite's own class) and say what success is."""

    spec: Spec

    def __init__(self, images: bool, size: int, camera: str) -> None:
        if not 16 <= size <= 1024:
            raise WorkerError(f"size is {size}, wanted 16 to 1024 px")
        self._images, self._size, self._camera = images, size, camera
        self._env: Any = None
        self._seen: dict[str, Any] = {}
        self._canvas: Canvas | None = None
        self._bodies: dict[str, int] = {}

    # What adapters fill in.

    def _begin(self, seed: int) -> dict[str, Any]:
        """Begin the episode of ``seed``, with the random numbers seeded; returns the simulator's observation."""
        raise NotImplementedError

    def _succeeded(self) -> bool:
        raise NotImplementedError

    def _objects(self) -> dict[str, int]:
        """Body numbers of what can be looked at, by name; the same names in every episode."""
        raise NotImplementedError

    ends_with_success = False

    # The adapter's interface.

    def reset(self, seed: int, keys: tuple[str, ...]) -> dict[str, Array]:
        random.seed(seed)
        np.random.seed(seed % 2**32)
        self._forget_scene()
        self._seen = self._begin(seed)
        return self.observe(keys)

    def step(self, action: Array, keys: tuple[str, ...]) -> tuple[Outcome, dict[str, Array]]:
        self._seen, reward, _, _ = self._env.step(np.asarray(action, np.float64))
        success = self._succeeded()
        outcome = Outcome(float(reward), success and self.ends_with_success, False, success)
        return outcome, self.observe(keys)

    def observe(self, keys: tuple[str, ...]) -> dict[str, Array]:
        return {key: self._array(key) for key in keys}

    def render(self) -> Array:
        if not self._images:
            raise WorkerError("the env was made without images", "failed_precondition", "unsupported")
        return self._draw(self._camera, PICTURE)

    def hold(self) -> Array:
        return np.zeros(7, np.float32)

    def close(self) -> None:
        self._forget_scene()
        self._env.close()

    # Parts.

    def _describe(self, name: str, max_steps: int, instruction: str, packages: tuple[str, ...]) -> Spec:
        """The spec, once ``self._env`` is made. A first step is taken: at it numba compiles robosuite's controllers,
        for a minute on a busy machine, which belongs to the start."""
        self.reset(0, ())
        self.step(self.hold(), ())
        names = tuple(self._bodies)
        observations = [
            array_spec(
                "state",
                "float32",
                (8,),
                unit="m, rad, m",
                description="hand: position, rotation (axis times angle); two fingers",
            ),
            array_spec(
                "objects",
                "float32",
                (len(names), 7),
                unit="m, quaternion xyzw",
                description=", ".join(names),
            ),
        ]
        if self._images:
            camera_id(self._env.sim.model._model, self._camera)
            shape = (self._size, self._size, 3)
            observations[:0] = [
                array_spec(key, "uint8", shape, unit="RGB", low=0, high=255, description=f"camera {camera}")
                for key, camera in (("image", self._camera), ("wrist", WRIST))
            ]
        versions = {package: version(package) for package in packages}
        hz = float(self._env.control_freq)
        return Spec(name, observations, ACTION, hz, int(max_steps), None, instruction, versions)

    def _array(self, key: str) -> Array:
        if key == "state":
            return state_of(self._seen)
        if key == "objects":
            data, bodies = self._env.sim.data, list(self._bodies.values())
            poses = np.concatenate([data.body_xpos[bodies], data.body_xquat[bodies][:, [1, 2, 3, 0]]], axis=1)
            return np.ascontiguousarray(poses, np.float32)
        return self._framed(self._draw(self._camera if key == "image" else WRIST, self._size))

    def _framed(self, frame: Array) -> Array:
        """The frame as a policy is to see it."""
        return frame

    def _draw(self, camera: str, size: int) -> Array:
        if self._canvas is None:
            side = max(self._size, PICTURE)
            self._canvas = Canvas(self._env.sim.model._model, side, side)
        return self._canvas.draw(self._env.sim.data._data, camera, size, size)

    def _forget_scene(self) -> None:
        """A reset makes a new model; what was drawn of the old one goes."""
        if self._canvas is not None:
            self._canvas.close()
            self._canvas = None


def state_of(seen: dict[str, Any]) -> Array:
    """``float32[8]``: position of the hand, its rotation as axis times angle, the fingers; as openpi's LIBERO clients
    and LeRobot make it, so that their policies can be evaluated."""
    quaternion = np.asarray(seen["robot0_eef_quat"], np.float64)
    w = np.clip(quaternion[3], -1.0, 1.0)
    length = np.sqrt(1.0 - w * w)
    turned = np.zeros(3) if length < 1e-9 else quaternion[:3] * 2.0 * np.arccos(w) / length
    parts = (seen["robot0_eef_pos"], turned, seen["robot0_gripper_qpos"])
    joined: Array = np.concatenate(parts).astype(np.float32)
    return joined
