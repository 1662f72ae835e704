"""MuJoCo draws off screen and in software: which OpenGL it uses, and the settings that make a frame cheap.

MuJoCo, dm_control and gymnasium look at ``MUJOCO_GL`` when they are first imported: call :func:`prepare` before that:

    from omni_loop_envs import headless

    headless.prepare()
    import mujoco  # noqa: E402

Frames are best drawn by :class:`.drawing.Canvas`, which needs no such care and leaves the simulation alone.
"""

from __future__ import annotations

import os
from ctypes.util import find_library
from typing import Any

from omni_loop.errors import MissingExtra

# OSMesa first: EGL in software costs the same and prints errors when the process ends.
_LIBRARIES = {"osmesa": "OSMesa", "egl": "EGL"}
_PACKAGES = {"osmesa": "libosmesa6", "egl": "libegl1"}


def prepare() -> str | None:
    """Make what is imported next draw off screen; returns ``MUJOCO_GL``, or None where nothing can draw.

    A ``MUJOCO_GL`` that is set already is kept. Where nothing can draw nothing is set: a simulator that is asked for
    its state alone needs no OpenGL, and :func:`backend` says what is missing to whoever wants a frame.

    Raises:
        MissingExtra: ``MUJOCO_GL`` names OSMesa or EGL and that is not on this machine: importing mujoco would fail.
    """
    # Threads of the software renderer: more than one is slower for frames this small.
    os.environ.setdefault("LP_NUM_THREADS", "1")
    named = os.environ.get("MUJOCO_GL", "").strip().lower()
    if named:
        return backend() if named in _LIBRARIES else named
    found = next((name for name, library in _LIBRARIES.items() if find_library(library)), None)
    if found is not None:
        os.environ["MUJOCO_GL"] = found
    return found


def backend() -> str:
    """``osmesa`` or ``egl``: what ``MUJOCO_GL`` names, or else what the machine has.

    Raises:
        MissingExtra: it has neither; the text names the package to install.
    """
    wanted = os.environ.get("MUJOCO_GL", "").strip().lower()
    candidates = [wanted] if wanted in _LIBRARIES else list(_LIBRARIES)
    for name in candidates:
        if find_library(_LIBRARIES[name]):
            return name
    raise MissingExtra(
        f"images of MuJoCo scenes need {' or '.join(_LIBRARIES[name] for name in candidates)}, which is not on this "
        f"machine: apt-get install {' (or '.join(_PACKAGES[name] for name in candidates)}"
        f"{')' * (len(candidates) - 1)}, or use the state alone"
    )


def open_gl(width: int, height: int) -> Any:
    """An OpenGL context of ``width`` x ``height`` px without a window. Raises MissingExtra where there can be none."""
    name = backend()
    os.environ.setdefault("LP_NUM_THREADS", "1")
    try:
        if name == "osmesa":
            from mujoco.osmesa import GLContext
        else:
            from mujoco.egl import GLContext
        return GLContext(width, height)
    except (ImportError, RuntimeError, AttributeError) as e:  # what PyOpenGL raises for a library that is no use
        raise MissingExtra(
            f"images of MuJoCo scenes: {name} does not work here ({e}): apt-get install libosmesa6"
        ) from e


def can_draw() -> bool:
    """Whether this machine has what draws without a screen."""
    try:
        open_gl(8, 8).free()
    except MissingExtra:
        return False
    return True


def draw_fast(model: Any) -> None:
    """Leave out what takes a software renderer most of a frame's time: the shadow map and smooth edges.

    ``model``: a ``mujoco.MjModel`` of which nothing was drawn yet (what is set here is read when its first context is
    made). Meta-World's frames take 12 ms so, and 106 ms otherwise; what is simulated stays the same.
    """
    model.vis.quality.shadowsize = 0
    model.vis.quality.offsamples = 0
    model.light_castshadow[:] = 0
