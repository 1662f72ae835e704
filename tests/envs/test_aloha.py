from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("gym_aloha", reason="the extra aloha is not installed")

from dm_control import mujoco

from omni_loop import registry
from omni_loop.env import Env, EnvStep
from omni_loop.errors import ConfigError
from omni_loop.testing.env_contract import Act, EnvContract
from omni_loop_envs import headless
from omni_loop_envs.aloha import expert as aloha_expert
from omni_loop_envs.aloha.env import AlohaTransferCube


@pytest.mark.skipif(not headless.can_draw(), reason="neither OSMesa nor EGL on this machine")
class TestAloha(EnvContract):
    expert_episodes = 2

    def make_env(self) -> Env:
        return AlohaTransferCube(max_steps=240, image_width=64, image_height=48)

    def make_expert(self, env: Env, seed: int) -> Act:
        expert = aloha_expert.for_env(env)
        expert.reset(seed)
        return expert.act

    def test_the_expert_fails_where_the_grippers_hang_loosely(self, env: Env, monkeypatch: pytest.MonkeyPatch) -> None:
        """The stiff weld (eq_solimp) is what makes it an expert: 2 of 20 without."""
        monkeypatch.setattr(aloha_expert, "_STIFF", (0.25, 0.25, 0.001, 0.5, 2.0))  # gym-aloha's own
        successes = 0
        for seed in range(self.first_seed, self.first_seed + 2):
            env.reset(seed, keys=())
            act = self.make_expert(env, seed)
            while not (step := env.step(act(), keys=())).done:
                pass
            successes += step.success
        assert successes < 2

    def test_holding_still_leaves_the_arms_where_they_are(self, env: Env) -> None:
        assert isinstance(env, AlohaTransferCube)
        before = env.reset(self.first_seed, keys=("state", "environment_state"))
        for _ in range(20):
            after = env.step(env.hold(), keys=("state", "environment_state")).arrays
        assert np.abs(after["state"] - before["state"]).max() < 0.1, "they sink until the motors hold them"
        assert after["environment_state"] == pytest.approx(before["environment_state"], abs=0.05)
        again = [env.step(env.hold(), keys=("state",)).arrays["state"] for _ in range(20)][-1]
        assert np.abs(again - after["state"]).max() < 0.01

    def test_a_simulation_that_diverges_ends_the_episode_and_says_so(self, env: Env) -> None:
        assert isinstance(env, AlohaTransferCube)
        env.reset(self.first_seed, keys=())
        rng, ends = np.random.default_rng(1), list[EnvStep]()
        actions = self.random_actions(env, 8)
        while not ends:
            step = env.step(actions[rng.integers(8)], keys=None)
            assert all(np.isfinite(array).all() for array in step.arrays.values())
            ends += [step] if step.done else []
        assert ends[0].terminated
        assert not ends[0].success
        assert ends[0].info == {"diverged": 1.0}
        assert env.render().std() > 0
        env.reset(self.first_seed + 1, keys=())
        assert env.step(env.hold(), keys=()).info == {"diverged": 0.0}


@pytest.mark.parametrize(("option", "px"), [("image_width", -5), ("image_height", 0), ("image_width", 100_000)])
def test_an_image_of_no_size_is_refused(option: str, px: int) -> None:
    with pytest.raises(ConfigError, match=f"{option} is {px}, wanted 1 to 4096 px"):
        registry.build(registry.ENVS, "aloha", {option: px})


def test_a_step_renders_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """gym-aloha itself renders three images of 640 x 480 at every step."""

    def rendered(*_: Any, **__: Any) -> None:
        pytest.fail("rendered a frame nobody asked for")

    env = AlohaTransferCube()
    monkeypatch.setattr(mujoco.Physics, "render", rendered)
    monkeypatch.setattr(headless, "open_gl", rendered)
    env.reset(3_000_000, keys=("state", "environment_state"))
    env.step(env.hold(), keys=("state", "environment_state"))
    env.close()
