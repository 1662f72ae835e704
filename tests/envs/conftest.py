"""MuJoCo is told how to draw before any test of a simulator imports it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from omni_loop_envs import headless
from omni_loop_envs.drawable import drawable

headless.prepare()


@pytest.fixture
def blind(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine that cannot draw."""
    monkeypatch.setenv("MUJOCO_GL", "")
    monkeypatch.setattr(headless, "find_library", lambda name: None)
    drawable.cache_clear()
    yield
    drawable.cache_clear()
