"""Demonstrations of PushT as LeRobot's env shows it: the agent's position and the T's eight corners, no frames.

omni-loop demos lerobot-pusht --out data/lerobot-pusht
omni-loop train policy --from data/lerobot-pusht --name lerobot-pusht
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from omni_loop.training.demos import Demos
from omni_loop.types import Array

from ..pusht.demos import KINDS, PushTDemos, Split
from ..pusht.env import PushT
from ..pusht.geometry import keypoints

#: Of our corners, in gym-pusht's order: shape by shape, as its physics keeps them.
ORDER = (0, 1, 2, 3, 7, 6, 4, 5)


def corners(poses: NDArray[np.floating]) -> NDArray[np.float32]:
    """``environment_state float32[n, 16]``, px, of poses ``[n, 3]``."""
    return keypoints(poses)[:, ORDER].reshape(len(poses), 16)


@dataclass(frozen=True)
class LeRobotPushTDemos(PushTDemos):
    """The expert's episodes; as :class:`omni_loop.training.lerobot_set.Observed` says what LeRobot's env gave."""

    env: str = PushT.name
    prompt: str = "push the T onto the goal"

    def observations(self, demos: Demos, rows: NDArray[np.int64]) -> dict[str, Array]:
        state = demos.state[rows]
        return {"state": state[:, :2], "environment_state": corners(state[:, 2:])}


LEROBOT_PUSHT_DEMOS = LeRobotPushTDemos(
    "lerobot-pusht",
    KINDS,
    {
        "train": Split({"expert": 160, "perturbed": 160}, {}, first_seed=1_100_000),
        "test": Split({"expert": 2, "perturbed": 2}, {}, first_seed=1_600_000),
    },
)
