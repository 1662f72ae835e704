"""What an env of gymnasium calls holding still, and a frame of it where nothing can draw."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from omni_loop.errors import ConfigError, MissingExtra, OmniLoopError
from omni_loop_envs.generic.env import Generic

SEED = 3_000_000
PUSHT: Mapping[str, Any] = {
    "id": "gym_pusht/PushT-v0",
    "import": "gym_pusht",
    "kwargs": {"obs_type": "pixels_agent_pos"},
    "observations": {"agent": "agent_pos"},
    "success": "is_success",
}
REACH: Mapping[str, Any] = {
    "id": "FetchReach-v4",
    "import": "gymnasium_robotics",
    "observations": {"state": "observation"},
    "success": "is_success",
    "control_hz": 25,
}


def pusht(**action: Any) -> Generic:
    return Generic(300, **PUSHT, action=action)


@pytest.mark.parametrize(
    ("said", "held"),
    [({}, [0, 0]), ({"hold": 256}, [256, 256]), ({"hold": [1, 2.5]}, [1, 2.5])],
)
def test_holding_is_zero_or_what_the_suite_says(said: dict[str, Any], held: list[float]) -> None:
    env = pusht(**said)
    env.reset(SEED)
    assert env.hold().dtype == np.float32
    assert env.hold().tolist() == held


@pytest.mark.parametrize("said", [{}, {"low": -1, "high": 1}, {"low": 0, "high": 512}])
def test_a_place_is_held_where_it_is(said: dict[str, Any]) -> None:
    """Also where a policy's actions are rescaled to the environment's own."""
    env = pusht(hold="agent_pos", **said)
    before = env.reset(SEED)["agent"]
    for _ in range(5):
        after = env.step(env.hold()).arrays["agent"]
    np.testing.assert_allclose(after, before, atol=0.01)


@pytest.mark.parametrize(
    ("hold", "said"),
    [
        ([1, 2, 3], r"hold has the shape \[3\], an action \[2\]"),
        ("agent_po", r"no 'agent_po' in its observation. Did you mean 'agent_pos'"),
        ("pixels", r"hold has the shape \[96, 96, 3\], an action \[2\]"),
        (513, r"outside 0..512"),
        (True, r"action.hold"),
        ({"x": 1}, r"action.hold"),
    ],
)
def test_what_is_no_action_is_refused_when_the_env_is_made(hold: Any, said: str) -> None:
    with pytest.raises(OmniLoopError, match=said):
        pusht(hold=hold)


@pytest.mark.usefixtures("blind")
def test_a_frame_of_mujoco_where_nothing_can_draw_names_the_package() -> None:
    seen = {"state": "observation", "view": {"render": True}}
    with pytest.raises(MissingExtra, match="apt-get install libosmesa6"):
        Generic(50, **{**REACH, "observations": seen})
    seen["view"] = {"render": True, "shape": [480, 480, 3]}  # then nothing is drawn when it is made
    env = Generic(50, **{**REACH, "observations": seen})
    env.reset(SEED, keys=("state",))
    for draw in (lambda: env.observe(("view",)), env.render):
        with pytest.raises(MissingExtra, match="apt-get install libosmesa6"):
            draw()
    env.close()


@pytest.mark.usefixtures("blind")
def test_what_draws_by_itself_needs_no_opengl() -> None:
    env = pusht()
    env.reset(SEED)
    assert env.render().std() > 0
    with pytest.raises(ConfigError, match="unknown key"):
        pusht(holds=1)
