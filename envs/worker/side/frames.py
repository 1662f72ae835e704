"""Frames of a robosuite scene, drawn off screen; the simulation is only read."""

from __future__ import annotations

from typing import Any

import mujoco
import numpy as np

from .adapter import WorkerError, unknown
from .wire import Array

MAX_GEOMS = 10_000


class Canvas:
    """Draws the scene of one ``mujoco.MjModel`` in frames up to ``width`` x ``height`` px. OpenGL is opened here."""

    def __init__(self, model: Any, width: int, height: int) -> None:
        # The shadow map and smooth edges take a software renderer most of a frame's time.
        model.vis.quality.shadowsize = model.vis.quality.offsamples = 0
        model.light_castshadow[:] = 0
        model.vis.global_.offwidth, model.vis.global_.offheight = width, height
        try:
            self._gl = mujoco.GLContext(width, height)
        except Exception as e:  # whatever PyOpenGL raises where it can draw nothing
            text = f"images need OSMesa or EGL, which does not work here ({e}): apt-get install libosmesa6"
            raise WorkerError(text, "failed_precondition", "missing_extra") from e
        self._gl.make_current()
        self._model, self._options = model, mujoco.MjvOption()
        self._options.geomgroup[0] = 0  # robosuite's shapes for collisions
        self._camera = mujoco.MjvCamera()
        self._camera.type = mujoco.mjtCamera.mjCAMERA_FIXED
        self._scene = mujoco.MjvScene(model, maxgeom=MAX_GEOMS)
        self._context = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_100)
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self._context)

    def draw(self, data: Any, camera: str, width: int, height: int) -> Array:
        """``uint8[height, width, 3]``, top row first."""
        self._gl.make_current()
        self._camera.fixedcamid = camera_id(self._model, camera)
        everything = mujoco.mjtCatBit.mjCAT_ALL
        mujoco.mjv_updateScene(self._model, data, self._options, None, self._camera, everything, self._scene)
        frame, window = np.empty((height, width, 3), np.uint8), mujoco.MjrRect(0, 0, width, height)
        mujoco.mjr_render(window, self._scene, self._context)
        mujoco.mjr_readPixels(frame, None, window, self._context)
        return np.ascontiguousarray(frame[::-1])

    def close(self) -> None:
        self._gl.make_current()
        self._context.free()
        self._gl.free()


def camera_id(model: Any, name: str) -> int:
    """Of the camera called ``name``; refused when there is none."""
    names = [model.camera(i).name for i in range(model.ncam)]
    if name not in names:
        raise unknown("camera", name, names)
    return names.index(name)
