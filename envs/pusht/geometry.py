"""The T of PushT: outline, keypoints, poses.

All lengths are simulator pixels of the 512 x 512 table. A *pose* is ``[x, y, angle]`` with the angle in
radians; a *state* is ``[agent_x, agent_y, x, y, angle]``.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

TABLE = 512.0
GOAL_POSE: Array = np.array([256.0, 256.0, np.pi / 4])

#: The outline of the T in its own frame, counter-clockwise, and eight keypoints on it: ``[8, 2]``.
OUTLINE: Array = np.array(
    [(-60, 0), (60, 0), (60, 30), (15, 30), (15, 120), (-15, 120), (-15, 30), (-60, 30)], dtype=np.float64
)
KEYPOINTS: Array = np.array(
    [(-60, 0), (60, 0), (60, 30), (-60, 30), (15, 120), (-15, 120), (15, 30), (-15, 30)], dtype=np.float64
)


def rotation(angle: float) -> Array:
    """``[2, 2]`` rotation by ``angle`` radians."""
    c, s = np.cos(angle), np.sin(angle)
    return np.array([[c, -s], [s, c]])


def to_world(points: Array, pose: Array) -> Array:
    """Points ``[n, 2]`` of the T's frame, at ``pose``, in table pixels."""
    return points @ rotation(float(pose[2])).T + pose[:2]


def keypoints(poses: NDArray[np.floating]) -> NDArray[np.float32]:
    """Keypoints ``float32[..., 8, 2]`` in table pixels of poses ``[..., 3]``."""
    poses = np.asarray(poses, dtype=np.float64)
    c, s = np.cos(poses[..., 2]), np.sin(poses[..., 2])
    turn = np.stack([np.stack([c, -s], -1), np.stack([s, c], -1)], -2)
    points: Array = np.einsum("...ij,kj->...ki", turn, KEYPOINTS) + poses[..., None, :2]
    return points.astype(np.float32)


GOAL_KEYPOINTS: Array = to_world(KEYPOINTS, GOAL_POSE)


def goal_distance(pose: Array) -> float:
    """Mean distance in pixels of the keypoints at ``pose`` to the goal's."""
    return float(np.linalg.norm(to_world(KEYPOINTS, pose) - GOAL_KEYPOINTS, axis=1).mean())


def contact_points(spacing: float = 12.0) -> list[tuple[Array, Array]]:
    """Places on the outline where a push can start: ``(point, outward normal)`` in the T's frame."""
    found: list[tuple[Array, Array]] = []
    for i, start in enumerate(OUTLINE):
        edge = OUTLINE[(i + 1) % len(OUTLINE)] - start
        length = float(np.linalg.norm(edge))
        along = edge / length
        normal = np.array([along[1], -along[0]])
        offsets = np.arange(min(6.0, length / 2), length - 4, spacing)
        found.extend((start + along * offset, normal) for offset in offsets)
    return found
