"""Frames of a MuJoCo scene, drawn in software and off screen.

The simulation is not touched: its positions are copied into data of the canvas's own. (A simulator's own ``render``
may run its dynamics forward, on which the next step would start.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import headless

headless.prepare()  # before mujoco is imported

import mujoco  # noqa: E402

MAX_GEOMS = 2000


class Canvas:
    """Draws ``model`` (a ``mujoco.MjModel``) in frames up to ``width`` x ``height`` px.

    Nothing of OpenGL is loaded before the first frame, and that is where :class:`MissingExtra` is raised on a machine
    without it. ``prepare`` is called once before that, to change how the model looks.
    """

    def __init__(self, model: Any, width: int, height: int, prepare: Callable[[Any], None] | None = None) -> None:
        self._model, self._width, self._height, self._prepare = model, width, height, prepare
        self._gl: Any = None
        self._context: Any = None

    def draw(
        self,
        data: Any,
        camera: Any,
        width: int,
        height: int,
        change: Callable[[Any], None] | None = None,
    ) -> NDArray[np.uint8]:
        """``uint8[height, width, 3]``: the scene of ``data`` (a ``mujoco.MjData``) as ``camera`` sees it. ``change``
        may alter the copy that is drawn: where a goal's mark stands, say."""
        if self._gl is None:
            self._open()
        self._gl.make_current()
        shown = self._data
        shown.qpos[:], shown.mocap_pos[:], shown.mocap_quat[:] = data.qpos, data.mocap_pos, data.mocap_quat
        mujoco.mj_kinematics(self._model, shown)
        mujoco.mj_comPos(self._model, shown)
        mujoco.mj_camlight(self._model, shown)
        if change is not None:
            change(shown)
        everything = mujoco.mjtCatBit.mjCAT_ALL.value
        mujoco.mjv_updateScene(self._model, shown, self._options, None, camera, everything, self._scene)
        frame, window = np.empty((height, width, 3), np.uint8), mujoco.MjrRect(0, 0, width, height)
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN.value, self._context)
        mujoco.mjr_render(window, self._scene, self._context)
        mujoco.mjr_readPixels(frame, None, window, self._context)
        return np.ascontiguousarray(frame[::-1])

    def close(self) -> None:
        """Free what the first frame made; a second call does nothing."""
        if self._gl is not None:
            self._gl.make_current()
            self._context.free()
            self._gl.free()
            self._gl = None

    def _open(self) -> None:
        gl = headless.open_gl(self._width, self._height)
        headless.draw_fast(self._model)
        if self._prepare is not None:
            self._prepare(self._model)
        self._model.vis.global_.offwidth, self._model.vis.global_.offheight = self._width, self._height
        gl.make_current()
        self._data, self._options = mujoco.MjData(self._model), mujoco.MjvOption()
        self._scene = mujoco.MjvScene(self._model, maxgeom=MAX_GEOMS)
        self._context = mujoco.MjrContext(self._model, mujoco.mjtFontScale.mjFONTSCALE_100.value)
        self._gl = gl


def free_camera(lookat: tuple[float, float, float], distance: float, azimuth: float, elevation: float) -> Any:
    """A camera that looks at a point (m), from ``distance`` (m) and two angles (degrees)."""
    camera = mujoco.MjvCamera()
    camera.lookat[:] = lookat
    camera.distance, camera.azimuth, camera.elevation = distance, azimuth, elevation
    return camera


def fixed_camera(model: Any, name: str) -> Any:
    """The camera called ``name`` in ``model``."""
    camera = mujoco.MjvCamera()
    camera.type, camera.fixedcamid = mujoco.mjtCamera.mjCAMERA_FIXED.value, model.camera(name).id
    return camera
