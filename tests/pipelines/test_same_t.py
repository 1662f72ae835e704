"""The world plug-in and the env plug-in never import each other, but mean the same T."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from omni_loop_envs.pusht.geometry import keypoints
from omni_loop_worlds.scene import pose_points


@pytest.mark.parametrize("pose", [(0.0, 0.0, 0.0), (256.0, 256.0, np.pi / 4), (100.0, 400.0, -2.5)])
def test_keypoints_of_a_pose_agree(pose: tuple[float, float, float]) -> None:
    ours, theirs = pose_points(torch.tensor(pose)), keypoints(np.array(pose))
    assert np.allclose(ours.numpy(), theirs, atol=1e-3)
