"""What each of LeRobot's simulators needs besides: to hold still, to break, to draw."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing

import numpy as np
import pytest

from omni_loop.errors import MissingExtra

pytest.importorskip("lerobot")

from omni_loop_envs import headless
from omni_loop_envs.lerobot.env import LeRobotEnv

pytestmark = [
    pytest.mark.timeout(400),  # importing LeRobot takes 20 s of CPU
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]
FIRST = 3_000_000


def aloha() -> LeRobotEnv:
    pytest.importorskip("gym_aloha")
    return LeRobotEnv(type="aloha", task="AlohaTransferCube-v0")


def metaworld() -> LeRobotEnv:
    pytest.importorskip("metaworld")
    return LeRobotEnv(type="metaworld", task="reach-v3")


def pusht() -> LeRobotEnv:
    return LeRobotEnv(type="pusht", obs_type="environment_state_agent_pos")


@pytest.mark.parametrize(("make", "near"), [(pusht, 1.0), (aloha, 0.1), (metaworld, 0.01)])
def test_holding_still_leaves_everything_where_it_is(make: Callable[[], LeRobotEnv], near: float) -> None:
    with closing(make()) as env:
        before = env.reset(FIRST, keys=("state",))["state"]
        for _ in range(20):
            after = env.step(env.hold(), keys=("state",)).arrays["state"]
        assert np.abs(after - before).max() < near


def test_what_lerobot_tells_a_policy() -> None:
    """As lerobot-eval does: the task in words, else its name, else nothing."""
    for make, told in ((pusht, ""), (aloha, "transfer_cube"), (metaworld, "Reach a goal position")):
        with closing(make()) as env:
            assert (env.instruction, env.instruction_of_episode) == (told, False)


def test_a_simulation_that_diverges_ends_the_episode_and_says_so() -> None:
    with closing(aloha()) as env:
        before = env.reset(FIRST, keys=("state",))["state"]
        rng, over = np.random.default_rng(1), False
        while not over:
            step = env.step(rng.uniform(-3.15, 3.15, 14).astype(np.float32), keys=("state",))
            over = step.done
            if not over:
                before = step.arrays["state"]
                assert step.info == {"diverged": 0.0}
        assert (step.terminated, step.success, step.info) == (True, False, {"diverged": 1.0})
        np.testing.assert_array_equal(step.arrays["state"], before)
        if headless.can_draw():
            assert env.render().std() > 0
        again = env.reset(FIRST, keys=("state",))["state"]
        assert env.step(env.hold(), keys=()).info == {"diverged": 0.0}
        with closing(aloha()) as fresh:
            assert (fresh.reset(FIRST, keys=("state",))["state"] == again).all()


def test_a_closed_env_leaves_no_context_to_the_garbage_collector() -> None:
    """There its end would wait for a thread that is gone, now and then: forever."""
    if not headless.can_draw():
        pytest.skip("neither OSMesa nor EGL on this machine")
    env = aloha()
    env.reset(FIRST, keys=("images.top",))
    physics = env.simulator._env.physics
    context = physics.contexts.gl
    assert not context.terminated
    env.close()
    assert context.terminated


@pytest.mark.usefixtures("blind")
@pytest.mark.parametrize(("make", "image"), [(aloha, "images.top"), (metaworld, "image")])
def test_a_frame_where_nothing_can_draw_names_the_package(make: Callable[[], LeRobotEnv], image: str) -> None:
    with closing(make()) as env:
        env.reset(FIRST, keys=("state",))
        with pytest.raises(MissingExtra, match="apt-get install libosmesa6"):
            env.observe((image,))
        with pytest.raises(MissingExtra, match="apt-get install libosmesa6"):
            env.render()
