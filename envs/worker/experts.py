"""What solves tasks of robosuite and LIBERO: one controller that picks a thing up and, if there is a place for it, lets
it go over that.

It reads ``state`` and ``objects`` and steers the hand by displacements; the hand keeps looking down, as it begins.
"""

from __future__ import annotations

import re

import numpy as np
from numpy.typing import NDArray

from omni_loop.env import Env, Expert
from omni_loop.errors import Unsupported, nearest

from .env import WorkerEnv

Vector = NDArray[np.float64]

_REACH = 0.05  # m, of an action of 1
_OPEN, _CLOSED = -1.0, 1.0
_ABOVE = 0.12  # m, over a thing before going down to it
_NEAR = 0.012  # m, from a place that counts as reached
_DEPTH = 0.03  # m, from the top of a thing that fits between the fingers
_SLOW = 0.004  # m a step: a hand that is faster goes on beyond where it is to go down
_STILL = 0.001  # m a step, below which a hand that goes down has met something
_STOOD_STEPS, _GRASP_STEPS = 5, 12


class PickPlace:
    """Picks up the object called ``thing`` and lifts it by ``lift`` (m). With ``place`` it carries it over that object
    and lets go; without, it holds it. It is taken at its middle; where the height of the ``floor`` (m) is given, a tall
    one is taken as deep below its top as the fingers reach.

    Raises:
        Unsupported: ``env`` has no such objects.
    """

    def __init__(
        self, env: WorkerEnv, thing: str, place: str = "", floor: float | None = None, lift: float = 0.25
    ) -> None:
        self._env, self._floor, self._lift = env, floor, lift
        rows = objects(env)
        for name in (thing, place):
            if name and name not in rows:
                raise Unsupported(f"this task of {env.name!r} has no object {name!r}.{nearest(name, rows)}")
        self._thing, self._place = rows.index(thing), rows.index(place) if place else None
        self.reset(0)

    def reset(self, seed: int) -> None:
        self._phase, self._grasped, self._stood, self._top = "over", 0, 0, 0.0
        self._before: Vector = np.zeros(3)
        self._grasp = 0.0

    def act(self) -> NDArray[np.float32]:
        seen = self._env.observe(("state", "objects"))
        hand, poses = np.asarray(seen["state"][:3], np.float64), np.asarray(seen["objects"], np.float64)
        thing = poses[self._thing, :3]
        if self._floor is not None and self._phase in ("over", "down"):  # what is tall is taken near its top
            self._grasp = max(0.0, thing[2] - self._floor - _DEPTH)
        thing = thing + np.array([0, 0, self._grasp])
        if self._phase in ("over", "down"):
            return self._approach(hand, thing)
        if self._phase == "grasp":
            self._grasped += 1
            if self._grasped >= _GRASP_STEPS:
                self._phase, self._top = "lift", hand[2] + self._lift
            return _towards(hand, hand, _CLOSED)
        return self._carry(hand, thing, None if self._place is None else poses[self._place, :3])

    def _approach(self, hand: Vector, thing: Vector) -> NDArray[np.float32]:
        target = thing + np.array([0, 0, _ABOVE]) if self._phase == "over" else thing
        moved, self._before = float(np.linalg.norm(hand - self._before)), hand
        self._stood = self._stood + 1 if self._phase == "down" and moved < _STILL else 0
        near = float(np.linalg.norm(target - hand)) < _NEAR
        if self._phase == "over" and near and moved < _SLOW:
            self._phase = "down"
        elif self._phase == "down" and (near or self._stood >= _STOOD_STEPS):
            self._phase = "grasp"
        return _towards(hand, target, _OPEN)

    def _carry(self, hand: Vector, thing: Vector, place: Vector | None) -> NDArray[np.float32]:
        target = np.array([hand[0], hand[1], self._top])
        if self._phase == "lift" and hand[2] > self._top - 2 * _NEAR and place is not None:
            self._phase = "carry"
        elif self._phase == "carry" and place is not None:
            # The thing may hang beside the middle of the hand, and is to be over the place; the hand is not.
            target[:2] += (place - thing)[:2]
            if np.linalg.norm((place - thing)[:2]) < _NEAR:
                self._phase = "release"
        return _towards(hand, target, _OPEN if self._phase == "release" else _CLOSED)


def objects(env: WorkerEnv) -> list[str]:
    """What the rows of ``objects`` are called."""
    spec = next((spec for spec in env.observations if spec.name == "objects"), None)
    return [] if spec is None else spec.description.split(", ")


def _towards(hand: Vector, target: Vector, gripper: float) -> NDArray[np.float32]:
    step = np.clip(2.0 * (target - hand) / _REACH, -1, 1)
    return np.array([*step, 0, 0, 0, gripper], np.float32)


def robosuite(env: Env) -> Expert:
    """Of the task Lift. Raises :class:`Unsupported` for others, and for another env."""
    return PickPlace(_worker(env, "robosuite"), "cube")


def libero(env: Env) -> Expert:
    """Of ``libero_object``'s tasks: what the instruction names goes into the basket. Raises :class:`Unsupported` for
    others, and for another env."""
    known = _worker(env, "libero")
    found = re.fullmatch(r"pick (?:up )?the (.+) and place it in the basket", known.instruction.lower())
    if found is None:
        raise Unsupported("the expert of 'libero' solves libero_object: pick up something and place it in the basket")
    return PickPlace(known, f"{found[1].replace(' ', '_')}_1", "basket_1", floor=0.0)


def _worker(env: Env, name: str) -> WorkerEnv:
    if not isinstance(env, WorkerEnv) or env.name != name:
        raise Unsupported(f"the expert of {name!r} cannot read env {env.name!r}")
    return env
