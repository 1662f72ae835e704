"""What solves Meta-World: the scripted policies that come with it, one for each task."""

from __future__ import annotations

import warnings

import numpy as np
from numpy.typing import NDArray

from .env import MetaWorld

from metaworld.policies import ENV_POLICY_MAP  # isort: skip


class MetaWorldExpert:
    """Acts on ``env``'s true state by the policy of its task; deterministic, and without a memory of the episode."""

    def __init__(self, env: MetaWorld) -> None:
        self._env, self._policy = env, ENV_POLICY_MAP[env.task]()

    def reset(self, seed: int) -> None:
        """Nothing to begin: the policies act on the present state alone."""

    def act(self) -> NDArray[np.float32]:
        """``float32[4]`` in -1..1 for the env's present state."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that a wish is larger than 1: it is clipped, on purpose
            action = self._policy.get_action(self._env.state)  # a copy: some policies change what they are given
        return np.clip(action, -1, 1).astype(np.float32)
