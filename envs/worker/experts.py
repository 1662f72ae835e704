"""What solves tasks of robosuite and LIBERO: one controller that picks a thing up, and puts it into another if there is
one to put it into.

It reads ``state`` and ``objects`` and steers the hand by displacements; the hand keeps looking down, as it begins.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from omni_loop.env import Env, Expert
from omni_loop.errors import Unsupported, nearest

from .env import WorkerEnv

_REACH = 0.05  # m, of an action of 1
_OPEN, _CLOSED = -1.0, 1.0
_ABOVE = 0.12  # m, over a thing before going down to it
_NEAR = 0.012  # m, from a place that counts as reached
_GRASP_STEPS, _RELEASE_STEPS = 12, 10

Vector = NDArray[np.float64]


class PickPlace:
    """Picks up the object called ``thing``, ``grasp`` above its middle (m); carries it over ``place`` and lets go there.
    Without ``place`` it lifts and holds it."""

    def __init__(self, env: WorkerEnv, thing: str, place: str = "", grasp: float = 0.0, carry: float = 0.25) -> None:
        self._env, self._grasp, self._carry = env, grasp, carry
        rows = objects(env)
        for name in (thing, place):
            if name and name not in rows:
                raise Unsupported(f"this task of {env.name!r} has no object {name!r}.{nearest(name, rows)}")
        self._thing, self._place = rows.index(thing), rows.index(place) if place else None
        self.reset(0)

    def reset(self, seed: int) -> None:
        self._phase, self._waited = "over", 0
        self._top = -np.inf

    def act(self) -> NDArray[np.float32]:
        seen = self._env.observe(("state", "objects"))
        hand, poses = np.asarray(seen["state"][:3], np.float64), np.asarray(seen["objects"], np.float64)
        thing = poses[self._thing, :3] + np.array([0, 0, self._grasp])
        place = None if self._place is None else poses[self._place, :3]
        return getattr(self, f"_{self._phase}")(hand, thing, place)  # type: ignore[no-any-return]

    def _over(self, hand: Vector, thing: Vector, place: Vector | None) -> NDArray[np.float32]:
        target = thing + np.array([0, 0, _ABOVE])
        if np.linalg.norm(target - hand) < _NEAR:
            self._phase = "down"
        return _towards(hand, target, _OPEN)

    def _down(self, hand: Vector, thing: Vector, place: Vector | None) -> NDArray[np.float32]:
        if np.linalg.norm(thing - hand) < _NEAR:
            self._phase, self._waited = "grasp", 0
        return _towards(hand, thing, _OPEN)

    def _grasp_(self, hand: Vector, thing: Vector, place: Vector | None) -> NDArray[np.float32]:
        self._waited += 1
        if self._waited >= _GRASP_STEPS:
            self._phase, self._top = "lift", hand[2] + self._carry
        return _towards(hand, hand, _CLOSED)

    def _lift(self, hand: Vector, thing: Vector, place: Vector | None) -> NDArray[np.float32]:
        if hand[2] > self._top - 2 * _NEAR and place is not None:
            self._phase = "carry_"
        return _towards(hand, np.array([hand[0], hand[1], self._top]), _CLOSED)

    def _carry_(self, hand: Vector, thing: Vector, place: Vector | None) -> NDArray[np.float32]:
        assert place is not None
        # It may hang beside the middle of the hand: the thing is to be over the place, not the hand.
        target = np.array([*(place + hand - thing)[:2], self._top])
        if np.linalg.norm(target - hand) < 2 * _NEAR:
            self._phase, self._waited = "release", 0
        return _towards(hand, target, _CLOSED)

    def _release(self, hand: Vector, thing: Vector, place: Vector | None) -> NDArray[np.float32]:
        return _towards(hand, hand, _OPEN)


def objects(env: WorkerEnv) -> list[str]:
    """What the rows of ``objects`` are called."""
    spec = next((spec for spec in env.observations if spec.name == "objects"), None)
    return [] if spec is None else spec.description.split(", ")


def _towards(hand: Vector, target: Vector, gripper: float) -> NDArray[np.float32]:
    step = np.clip(2.0 * (target - hand) / _REACH, -1, 1)
    return np.array([*step, 0, 0, 0, gripper], np.float32)


def robosuite(env: Env) -> Expert:
    """Of the tasks Lift and PickPlaceCan. Raises :class:`Unsupported` for others, and for another env."""
    known = _worker(env, "robosuite")
    return PickPlace(known, "cube")


def libero(env: Env) -> Expert:
    """Of ``libero_object``'s tasks: the thing that the instruction names goes into the basket. Raises
    :class:`Unsupported` for others, and for another env."""
    known = _worker(env, "libero")
    thing = known.instruction.lower().removeprefix("pick up the ").partition(" and place it in the basket")
    name = f"{thing[0].replace(' ', '_')}_1"
    if not thing[1]:
        raise Unsupported(
            "the expert of 'libero' solves tasks of libero_object: pick up ... and place it in the basket"
        )
    return PickPlace(known, name, "basket_1")


def _worker(env: Env, name: str) -> WorkerEnv:
    if not isinstance(env, WorkerEnv) or env.name != name:
        raise Unsupported(f"the expert of {name!r} cannot read env {env.name!r}")
    return env
