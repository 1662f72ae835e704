"""Frames of a MuJoCo scene, drawn in software and off screen.

The simulation is not touched: its positions are copied into data of the view's own, where the goal's mark is put. (The
simulator's own ``render`` runs its dynamics forward, on which the next step would start.)
"""

from __future__ import annotations

import os
from ctypes.util import find_library
from typing import Any

import mujoco
import numpy as np
from numpy.typing import NDArray

from omni_loop.errors import MissingExtra

IMAGE_SIZE = 96  # px, of what a policy sees
PICTURE_SIZE = 384  # px, for people; a multiple of 16, as video wants
_LIBRARIES = {"osmesa": "OSMesa", "egl": "EGL"}


class View:
    """Two cameras on ``model``. Nothing of OpenGL is loaded before the first frame."""

    def __init__(self, model: Any) -> None:
        self._model, self._goal_site = model, model.site("target0").id
        self._data: Any = None
        self._gl: Any = None

    def image(self, data: Any, goal: NDArray[np.float64]) -> NDArray[np.uint8]:
        """``uint8[96, 96, 3]``: the table from close by, for a policy."""
        return self._draw(data, goal, self._camera((1.33, 0.75, 0.5), 1.0, 135, -35), IMAGE_SIZE)

    def picture(self, data: Any, goal: NDArray[np.float64]) -> NDArray[np.uint8]:
        """``uint8[384, 384, 3]``: robot and table, for people."""
        return self._draw(data, goal, self._camera((1.3, 0.75, 0.55), 1.6, 140, -20), PICTURE_SIZE)

    def close(self) -> None:
        """Free what the first frame made."""
        if self._gl is not None:
            self._gl.make_current()
            self._context.free()
            self._gl.free()
            self._gl = None

    def _camera(self, lookat: tuple[float, float, float], distance: float, azimuth: float, elevation: float) -> Any:
        camera = mujoco.MjvCamera()
        camera.lookat[:] = lookat
        camera.distance, camera.azimuth, camera.elevation = distance, azimuth, elevation
        return camera

    def _draw(self, data: Any, goal: NDArray[np.float64], camera: Any, size: int) -> NDArray[np.uint8]:
        if self._gl is None:
            self._open()
        self._gl.make_current()
        shown = self._data
        shown.qpos[:], shown.mocap_pos[:], shown.mocap_quat[:] = data.qpos, data.mocap_pos, data.mocap_quat
        mujoco.mj_kinematics(self._model, shown)
        mujoco.mj_camlight(self._model, shown)
        shown.site_xpos[self._goal_site] = goal
        everything = mujoco.mjtCatBit.mjCAT_ALL.value
        mujoco.mjv_updateScene(self._model, shown, self._options, None, camera, everything, self._scene)
        frame, window = np.empty((size, size, 3), np.uint8), mujoco.MjrRect(0, 0, size, size)
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN.value, self._context)
        mujoco.mjr_render(window, self._scene, self._context)
        mujoco.mjr_readPixels(frame, None, window, self._context)
        return np.ascontiguousarray(frame[::-1])

    def _open(self) -> None:
        # In software the shadow map takes most of the time of a frame; it and smooth edges are left out.
        quality, window = self._model.vis.quality, self._model.vis.global_
        quality.shadowsize = quality.offsamples = 0
        self._model.light_castshadow[:] = 0
        # Long green axes, which the hand is dragged by, would cross the whole scene.
        self._model.geom_rgba[self._model.geom_bodyid == self._model.body("robot0:mocap").id, 3] = 0
        window.offwidth = window.offheight = PICTURE_SIZE
        self._gl = open_gl(PICTURE_SIZE)
        self._gl.make_current()
        self._data, self._options = mujoco.MjData(self._model), mujoco.MjvOption()
        self._scene = mujoco.MjvScene(self._model, maxgeom=1000)
        self._context = mujoco.MjrContext(self._model, mujoco.mjtFontScale.mjFONTSCALE_100.value)


def backend() -> str:
    """``osmesa`` or ``egl``: what ``MUJOCO_GL`` names, or else what the machine has.

    Raises:
        MissingExtra: it has neither; the text says what to install.
    """
    wanted = os.environ.get("MUJOCO_GL", "").lower()
    candidates = [wanted] if wanted in _LIBRARIES else list(_LIBRARIES)
    for name in candidates:
        if find_library(_LIBRARIES[name]):
            return name
    raise MissingExtra(
        f"images of MuJoCo scenes need {' or '.join(_LIBRARIES[name] for name in candidates)}, which is not on this "
        "machine: apt-get install libosmesa6 (or libegl1), or use the state alone"
    )


def open_gl(size: int) -> Any:
    """An OpenGL context of ``size`` x ``size`` px without a window. Raises MissingExtra where there can be none."""
    name = backend()
    os.environ.setdefault("LP_NUM_THREADS", "1")  # threads of the software renderer: more are slower at this size
    try:
        if name == "osmesa":
            from mujoco.osmesa import GLContext
        else:
            from mujoco.egl import GLContext
        return GLContext(size, size)
    except (ImportError, RuntimeError, AttributeError) as e:  # what PyOpenGL raises for a library that is no use
        raise MissingExtra(
            f"images of MuJoCo scenes: {name} does not work here ({e}): apt-get install libosmesa6"
        ) from e
