"""The expert of LeRobot's PushT: ours, reading LeRobot's simulator."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from omni_loop.env import Env, Expert
from omni_loop.errors import Unsupported

from ..pusht.expert import PushTExpert


class _PushT:
    def __init__(self, simulator: Any) -> None:
        self._simulator, self._expert = simulator, PushTExpert()

    def reset(self, seed: int) -> None:
        self._expert.reset(seed)

    def act(self) -> NDArray[np.float32]:
        agent, block = self._simulator.agent.position, self._simulator.block
        return self._expert.act(np.array([*agent, *block.position, block.angle], np.float32))


def lerobot(env: Env) -> Expert:
    """The expert for ``env``, an env ``lerobot``. Unsupported: for its type there is none."""
    kind = getattr(env, "kind", "")
    if kind != "pusht":
        raise Unsupported(f"there is no expert for LeRobot's env {kind!r}; there is one for 'pusht'")
    return _PushT(env.simulator)  # type: ignore[attr-defined]
