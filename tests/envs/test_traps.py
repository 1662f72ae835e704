"""Traps of simulators that cost others days; each a test. Those of one adapter stand in its own tests."""

from __future__ import annotations

from dataclasses import replace
from importlib import metadata
from typing import Any

import cv2
import gymnasium
import numpy as np
import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from omni_loop.env import BaseEnv
from omni_loop.errors import MissingExtra
from omni_loop_envs import headless
from omni_loop_envs.pusht.env import PushT
from omni_loop_envs.pusht.simulator import FRAME_SIZE, PushTSimulator


def installed(distribution: str) -> bool:
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True


@pytest.mark.parametrize(("one", "other"), [("pygame", "pygame-ce"), ("opencv-python-headless", "opencv-python")])
def test_two_packages_do_not_overwrite_each_others_files(one: str, other: str) -> None:
    """Both write the same modules, and which one wins is chance."""
    assert installed(one)
    assert not installed(other)


def test_mujoco_is_below_3_9() -> None:
    """4.0 breaks gymnasium-robotics."""
    assert Version(metadata.version("mujoco")) < Version("3.9")
    asked = [Requirement(line) for line in metadata.requires("omni-loop") or ()]
    assert all("3.9" not in r.specifier and "4.0" not in r.specifier for r in asked if r.name == "mujoco")


def test_gym_pusht_draws_no_64_px_frame_for_people() -> None:
    """The line it marks the action with is thinner than a pixel there: whoever wants 64 resizes."""
    size: Any = {"visualization_width": 64, "visualization_height": 64}
    env = gymnasium.make("gym_pusht/PushT-v0", obs_type="state", render_mode="rgb_array", **size)
    env.reset(seed=1)
    env.step(np.array([256.0, 256.0]))
    with pytest.raises(cv2.error):
        env.render()
    assert FRAME_SIZE == 96
    assert PushT().reset(3_000_000, keys=("image",))["image"].shape == (96, 96, 3)


def test_a_t_that_is_placed_by_hand_is_drawn_where_it_is() -> None:
    """pymunk keeps the shapes of a body where they were until they are indexed again."""
    table, same = PushTSimulator(), PushTSimulator()
    table.reset(3_000_000)
    same.reset(3_000_001)
    table.frame()
    state = np.array([100, 100, 300, 200, 1.2])
    table.place(state)
    same.place(state)
    assert table.frame().tobytes() == same.frame().tobytes()
    shape = next(iter(table.env.block.shapes))
    before = shape.bb
    table.env.space.reindex_shapes_for_body(table.env.block)
    assert shape.bb == before


def test_gym_pusht_forgets_the_last_episodes_action() -> None:
    """It goes on drawing it for people."""
    used, fresh = PushT(), PushT()
    used.reset(3_000_000, keys=())
    used.step(np.array([30, 400], np.float32), keys=())
    used.reset(3_000_001, keys=())
    fresh.reset(3_000_001, keys=())
    assert used.render().tobytes() == fresh.render().tobytes()


def test_a_frame_of_fetch_does_not_move_the_simulation() -> None:
    """The simulator's own render runs its dynamics forward, on which the next step would start."""
    fetch = pytest.importorskip("omni_loop_envs.fetch.env")
    try:
        headless.backend()
    except MissingExtra as e:
        pytest.skip(e.text)
    looked, blind = fetch.FetchPush(), fetch.FetchPush(images=False)
    action = np.array([1, -1, -0.5, 0], np.float32)
    for env in (looked, blind):
        env.reset(3_000_000, keys=())
    for _ in range(5):
        looked.render()
        looked.observe(("image",))
        a, b = (env.step(action, keys=("state",)).arrays["state"] for env in (looked, blind))
        assert a.tobytes() == b.tobytes()
    looked.close()


@pytest.mark.parametrize("low_high", [(-1, 1), (0, 512), (2, 6), (None, None)])
def test_holding_still_is_within_the_bounds(low_high: tuple[float | None, float | None]) -> None:
    class Env(PushT):
        action = replace(PushT.action, low=low_high[0], high=low_high[1])

    held = BaseEnv.hold(Env())
    assert held.dtype == np.float32
    assert held.tolist() == ([4, 4] if low_high == (2, 6) else [0, 0])


def test_holding_still_at_pusht_is_where_the_agent_is() -> None:
    """Zero would send it to a corner, through the T."""
    env = PushT()
    before = env.reset(3_000_000, keys=("agent_pos", "block_pose"))
    for _ in range(5):
        after = env.step(env.hold(), keys=("agent_pos", "block_pose")).arrays
    assert np.abs(after["agent_pos"][1] - before["agent_pos"][1]).max() < 1
    assert after["block_pose"] == pytest.approx(before["block_pose"], abs=1)
