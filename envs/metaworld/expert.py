"""What solves Meta-World: the scripted policies that come with it, one for each task, and one of our own."""

from __future__ import annotations

import warnings
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from omni_loop.env import Env

from ..experts import readable
from .env import MetaWorld  # its modules prepare what metaworld imports

from metaworld.policies import ENV_POLICY_MAP  # isort: skip


class _Policy(Protocol):
    def get_action(self, obs: NDArray[np.float64]) -> NDArray[np.floating]:
        """``[4]``, not clipped, for ``obs[39]``."""


class DoorOpen:
    """Over the handle, down behind it, pull. Meta-World's own comes down too early when the door is on the left, and
    then pushes against the handle from outside for the rest of the episode."""

    def get_action(self, obs: NDArray[np.float64]) -> NDArray[np.floating]:
        hand, handle = obs[:3], obs[4:7]
        return np.append(25 * (self._target(hand, handle) - hand), 1.0)

    def _target(self, hand: NDArray[np.float64], handle: NDArray[np.float64]) -> NDArray[np.float64]:
        behind, low = hand[0] > handle[0] - 0.02, hand[2] < handle[2] + 0.08
        start, by = handle, (-0.05, 0.0, 0.0)  # pull
        if not behind and low and np.linalg.norm(hand[:2] - handle[:2]) < 0.13:
            start, by = hand, (-0.05, 0.0, 0.2)  # before the handle: up
        elif not behind:
            by = (0.04, 0.02, 0.15)  # over it
        elif hand[2] > handle[2] + 0.04:
            by = (0.01, 0.02, 0.0)  # down
        target: NDArray[np.float64] = start + np.array(by)
        return target


_OWN: dict[str, type[_Policy]] = {"door-open-v3": DoorOpen}


class MetaWorldExpert:
    """Acts on the true state of ``env``, which must be a :class:`.env.MetaWorld`, by the policy of its task;
    deterministic, and without a memory of the episode."""

    def __init__(self, env: Env) -> None:
        self._env: MetaWorld = readable(env, MetaWorld)
        task = self._env.task
        self._policy: _Policy = _OWN.get(task, ENV_POLICY_MAP[task])()

    def reset(self, seed: int) -> None:
        """Nothing to begin: the policies act on the present state alone."""

    def act(self) -> NDArray[np.float32]:
        """``float32[4]`` in -1..1 for the env's present state."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that a wish is larger than 1: it is clipped, on purpose
            action = self._policy.get_action(self._env.state)  # a copy: some policies change what they are given
        return np.clip(action, -1, 1).astype(np.float32)
