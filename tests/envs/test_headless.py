from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from omni_loop.errors import MissingExtra
from omni_loop_envs import headless


@pytest.fixture(autouse=True)
def _nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MUJOCO_GL", "LP_NUM_THREADS"):  # first set, so that what a test leaves there is undone
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def on_this_machine(monkeypatch: pytest.MonkeyPatch, *libraries: str) -> None:
    monkeypatch.setattr(headless, "find_library", lambda name: f"lib{name}.so" if name in libraries else None)


@pytest.mark.parametrize(
    ("libraries", "chosen"), [(("OSMesa", "EGL"), "osmesa"), (("EGL",), "egl"), (("OSMesa",), "osmesa"), ((), None)]
)
def test_what_the_machine_has_is_chosen(
    monkeypatch: pytest.MonkeyPatch, libraries: tuple[str, ...], chosen: str | None
) -> None:
    on_this_machine(monkeypatch, *libraries)
    assert headless.prepare() == chosen
    assert os.environ.get("MUJOCO_GL") == chosen
    assert os.environ["LP_NUM_THREADS"] == "1"


def test_what_is_named_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    on_this_machine(monkeypatch, "OSMesa", "EGL")
    monkeypatch.setenv("LP_NUM_THREADS", "4")
    for name in ("egl", "glfw"):
        monkeypatch.setenv("MUJOCO_GL", name)
        assert headless.prepare() == name
        assert os.environ["MUJOCO_GL"] == name
    assert os.environ["LP_NUM_THREADS"] == "4"
    assert headless.backend() == "osmesa", "a window's OpenGL is no use off screen"
    monkeypatch.setenv("MUJOCO_GL", "EGL ")
    assert headless.backend() == "egl"


def test_what_is_named_and_missing_is_said_before_an_import_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    on_this_machine(monkeypatch, "OSMesa")
    monkeypatch.setenv("MUJOCO_GL", "egl")
    with pytest.raises(MissingExtra, match=r"need EGL, which is not on this machine: apt-get install libegl1, or"):
        headless.prepare()


def test_a_machine_that_cannot_draw_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    on_this_machine(monkeypatch)
    with pytest.raises(MissingExtra, match=r"OSMesa or EGL.*apt-get install libosmesa6 \(or libegl1\), or use"):
        headless.open_gl(8, 8)


def test_a_library_that_is_no_use_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    on_this_machine(monkeypatch, "OSMesa")
    monkeypatch.setitem(sys.modules, "mujoco.osmesa", None)  # its import fails
    with pytest.raises(MissingExtra, match=r"osmesa does not work here.*apt-get install libosmesa6"):
        headless.open_gl(8, 8)


def test_software_gl_spends_no_time_on_the_shadow_map() -> None:
    quality = SimpleNamespace(shadowsize=4096, offsamples=4)
    model = SimpleNamespace(vis=SimpleNamespace(quality=quality), light_castshadow=np.ones(3, bool))
    headless.draw_fast(model)
    assert (quality.shadowsize, quality.offsamples) == (0, 0)
    assert not model.light_castshadow.any()


def test_drawing_sets_itself_up_in_a_fresh_process() -> None:
    """Nobody has to know of MUJOCO_GL: importing the drawing is enough, and a frame comes out."""
    try:
        headless.backend()
    except MissingExtra as e:
        pytest.skip(e.text)
    code = """
import os
os.environ.pop("MUJOCO_GL", None)
from omni_loop_envs.drawing import Canvas, free_camera
import mujoco
assert os.environ["MUJOCO_GL"] in ("osmesa", "egl"), os.environ["MUJOCO_GL"]
model = mujoco.MjModel.from_xml_string(
    "<mujoco><worldbody><light pos='0 0 3'/><geom type='box' size='.2 .2 .2' rgba='1 0 0 1'/></worldbody></mujoco>"
)
data = mujoco.MjData(model)
canvas = Canvas(model, 32, 32)
frame = canvas.draw(data, free_camera((0, 0, 0), 1.0, 45, -30), 32, 24)
assert frame.shape == (24, 32, 3) and frame[12, 16, 0] > 2 * frame[12, 16, 1], frame[12, 16]
assert mujoco.GLContext.__module__.endswith(os.environ["MUJOCO_GL"]), mujoco.GLContext.__module__
canvas.close()
canvas.close()
os._exit(0)  # EGL prints errors at exit
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
