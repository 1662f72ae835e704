"""The T's keypoints from its pose: what a client that knows the state gives instead of a frame."""

from __future__ import annotations

import torch
from torch import Tensor

#: Keypoints of the T in its own frame, table pixels, in the readout's order.
KEYPOINTS = torch.tensor(
    [(-60, 0), (60, 0), (60, 30), (-60, 30), (15, 120), (-15, 120), (15, 30), (-15, 30)], dtype=torch.float32
)


def pose_points(pose: Tensor) -> Tensor:
    """Keypoints ``[8, 2]`` in table pixels of ``pose [3]`` (x, y, angle in radians)."""
    c, s = pose[2].cos(), pose[2].sin()
    turn = torch.stack([torch.stack([c, -s]), torch.stack([s, c])])
    return KEYPOINTS @ turn.T + pose[:2]
