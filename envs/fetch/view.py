"""How the Fetch scene is seen: from close by for a policy, from further away by people."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..drawing import Canvas, free_camera

IMAGE_SIZE = 96  # px, of what a policy sees
PICTURE_SIZE = 384  # px, for people; a multiple of 16, as video wants


class View:
    """Two cameras on ``model``. Nothing of OpenGL is loaded before the first frame."""

    def __init__(self, model: Any) -> None:
        self._goal_site = model.site("target0").id
        self._canvas = Canvas(model, PICTURE_SIZE, PICTURE_SIZE, _hide_handles)
        self._near = free_camera((1.33, 0.75, 0.5), 1.0, 135, -35)
        self._far = free_camera((1.3, 0.75, 0.55), 1.6, 140, -20)

    def image(self, data: Any, goal: NDArray[np.float64]) -> NDArray[np.uint8]:
        """``uint8[96, 96, 3]``: the table from close by, for a policy."""
        return self._draw(data, goal, self._near, IMAGE_SIZE)

    def picture(self, data: Any, goal: NDArray[np.float64]) -> NDArray[np.uint8]:
        """``uint8[384, 384, 3]``: robot and table, for people."""
        return self._draw(data, goal, self._far, PICTURE_SIZE)

    def close(self) -> None:
        """Free what the first frame made."""
        self._canvas.close()

    def _draw(self, data: Any, goal: NDArray[np.float64], camera: Any, size: int) -> NDArray[np.uint8]:
        def mark_the_goal(shown: Any) -> None:  # the simulator moves the mark when it renders, which it never does here
            shown.site_xpos[self._goal_site] = goal

        return self._canvas.draw(data, camera, size, size, mark_the_goal)


def _hide_handles(model: Any) -> None:
    """Long green axes, which the hand is dragged by, would cross the whole scene."""
    model.geom_rgba[model.geom_bodyid == model.body("robot0:mocap").id, 3] = 0
