"""The controller that lerobot-env-so101 ships, as an expert."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from omni_loop.env import Env

from ..experts import readable
from .env import So101PickPlace

from lerobot_env_so101.scripted import PickPlaceController  # isort: skip


class So101Expert:
    """Hover, descend, close, lift, traverse, lower, open, retreat."""

    def __init__(self, env: So101PickPlace) -> None:
        self._env, self._controller = env, PickPlaceController()

    def reset(self, seed: int) -> None:
        self._controller.reset()

    def act(self) -> NDArray[np.float32]:
        native = np.asarray(self._controller.act(*self._env.places), np.float32)
        return np.array([*native[:3], 2 * native[3] - 1], np.float32).clip(-1, 1)


def for_env(env: Env) -> So101Expert:
    """A registry entry."""
    return So101Expert(readable(env, So101PickPlace))
