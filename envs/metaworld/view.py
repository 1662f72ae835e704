"""How Meta-World is seen: from close by for a policy, from further away by people. Both from its camera ``corner2``,
which hangs upside down there and is turned upright here."""

from __future__ import annotations

from typing import Any

import mujoco
import numpy as np
from numpy.typing import NDArray

from ..drawing import Canvas, fixed_camera

IMAGE_SIZE = 64  # px, of what a policy sees
PICTURE_SIZE = 384  # px, for people; a multiple of 16, as video wants
_FAR, _NEAR = "corner2", "corner3"  # the second camera is put where the first looks from, but closer
_CLOSE_BY = (0.75, 0.075, 0.7)  # m


class View:
    """Two cameras on ``model``. Nothing of OpenGL is loaded before the first frame."""

    def __init__(self, model: Any) -> None:
        self._canvas = Canvas(model, PICTURE_SIZE, PICTURE_SIZE, _aim)
        self._near, self._far = fixed_camera(model, _NEAR), fixed_camera(model, _FAR)

    def image(self, data: Any) -> NDArray[np.uint8]:
        """``uint8[64, 64, 3]``: hand and object, for a policy."""
        return self._canvas.draw(data, self._near, IMAGE_SIZE, IMAGE_SIZE)

    def picture(self, data: Any) -> NDArray[np.uint8]:
        """``uint8[384, 384, 3]``: robot and table, for people."""
        return self._canvas.draw(data, self._far, PICTURE_SIZE, PICTURE_SIZE)

    def close(self) -> None:
        """Free what the first frame made."""
        self._canvas.close()


def _aim(model: Any) -> None:
    model.mat_reflectance[:] = 0  # the floor's, for which the scene is drawn twice; from close by none is seen
    far, near = model.camera(_FAR).id, model.camera(_NEAR).id
    upright = np.zeros(4)
    mujoco.mju_mulQuat(upright, model.cam_quat[far], np.array([0.0, 0.0, 0.0, 1.0]))  # half a turn about its axis
    model.cam_quat[far] = model.cam_quat[near] = upright
    model.cam_fovy[near] = model.cam_fovy[far]
    model.cam_pos[near] = _CLOSE_BY
