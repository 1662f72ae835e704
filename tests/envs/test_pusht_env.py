from __future__ import annotations

import gymnasium
import numpy as np
import pytest

from omni_loop.env import Env
from omni_loop.errors import ConfigError, InvalidInput
from omni_loop.testing.env_contract import Act, EnvContract
from omni_loop.types import ArraySpec
from omni_loop_envs.gymnasium_adapter import RENDER, GymnasiumEnv, Key
from omni_loop_envs.pusht.env import PushT
from omni_loop_envs.pusht.expert import PushTExpert
from omni_loop_envs.pusht.simulator import PushTSimulator


class TestPushT(EnvContract):
    def make_env(self) -> Env:
        return PushT()

    def make_expert(self, env: Env, seed: int) -> Act:
        assert isinstance(env, PushT)
        expert = PushTExpert()
        expert.reset(seed)
        return lambda: expert.act(env.state)

    def test_agent_pos_is_previous_and_present(self, env: Env) -> None:
        first = env.reset(self.first_seed)["agent_pos"]
        assert (first[0] == first[1]).all()
        before = first
        for action in self.random_actions(env, 4):
            now = env.step(action).arrays["agent_pos"]
            assert (now[0] == before[1]).all()
            assert (now[1] != now[0]).any()
            before = now

    def test_frames_are_only_rendered_on_request(self, env: Env, monkeypatch: pytest.MonkeyPatch) -> None:
        assert isinstance(env, PushT)
        env.reset(self.first_seed, keys=())
        monkeypatch.setattr(env._sim, "frame", lambda: pytest.fail("rendered a frame nobody asked for"))
        env.step(np.array([256, 256], np.float32), keys=("agent_pos", "block_pose"))


def wrapped(success_key: str = "is_success", max_steps: int = 300, **options: object) -> GymnasiumEnv:
    import gym_pusht  # noqa: F401  (registers the environment)

    made = gymnasium.make("gym_pusht/PushT-v0", obs_type="pixels_agent_pos", max_episode_steps=max_steps)
    return GymnasiumEnv(
        made,
        name="gym-pusht",
        observations=(
            Key(ArraySpec("top", "uint8", (96, 96, 3), low=0, high=255), "pixels"),
            Key(ArraySpec("agent", "float32", (2,), unit="px"), "agent_pos"),
            Key(ArraySpec("agent_x", "float32", (1,), unit="px"), "agent_pos[0:1]"),
        ),
        success_key=success_key,
        max_steps=max_steps,
        info_keys=("coverage",),
        **options,  # type: ignore[arg-type]
    )


class TestGymnasiumAdapter(EnvContract):
    expert_episodes = 3

    def make_env(self) -> Env:
        return wrapped()

    def make_expert(self, env: Env, seed: int) -> Act:
        assert isinstance(env, GymnasiumEnv)
        expert, table = PushTExpert(), env._env.unwrapped
        expert.reset(seed)
        return lambda: expert.act(np.array([*table.agent.position, *table.block.position, table.block.angle]))  # type: ignore[attr-defined]

    def test_agrees_with_our_own_adapter(self, env: Env) -> None:
        ours = PushT()
        ours.reset(self.first_seed, keys=())
        env.reset(self.first_seed, keys=())
        for action in self.random_actions(env, 20):
            a, b = ours.step(action), env.step(action)
            assert (a.arrays["image"] == b.arrays["top"]).all()
            assert a.info["coverage"] == pytest.approx(b.info["coverage"], abs=1e-6)
            assert (a.success, a.terminated) == (b.success, b.terminated)


def test_coverage_is_the_same_to_the_bit_wherever_the_ts_parts_lie_in_memory() -> None:
    rng, kept = np.random.default_rng(0), []
    seen: list[set[float]] = [set() for _ in range(50)]
    scenes = np.array([10, 10, 256, 256, np.pi / 4]) + rng.normal(size=(50, 5)) * [0, 0, 15, 15, 0.2]
    for _ in range(8):
        sim = PushTSimulator()
        kept.append(sim)  # so that each has addresses of its own
        sim.reset(5)
        theirs = type(sim.env)._get_coverage
        for values, scene in zip(seen, scenes, strict=True):
            sim.place(scene)
            values.add(sim.coverage)
            assert sim.coverage == pytest.approx(theirs(sim.env), abs=1e-12)
    assert [len(values) for values in seen] == [1] * 50


def test_missing_success_key_is_an_error_that_names_the_nearest() -> None:
    env = wrapped(success_key="succes")
    env.reset(3_000_000)
    with pytest.raises(ConfigError, match=r"no success key 'succes' in its info. Did you mean 'is_success'"):
        env.step(np.array([256, 256], np.float32))


def test_success_that_is_no_number_is_an_error() -> None:
    env = wrapped(success_key="pos_agent")
    env.reset(3_000_000)
    with pytest.raises(ConfigError, match="no single number"):
        env.step(np.array([256, 256], np.float32))


def test_the_wrapped_time_limit_ends_the_episode() -> None:
    env = wrapped(max_steps=3)
    env.reset(3_000_000, keys=())
    steps = [env.step(np.array([256, 256], np.float32), keys=()) for _ in range(3)]
    assert [s.done for s in steps] == [False, False, True]
    assert steps[-1].truncated
    assert not steps[-1].terminated


def test_wrong_source_and_shape_name_the_key() -> None:
    made = gymnasium.make("gym_pusht/PushT-v0", obs_type="environment_state_agent_pos")
    common = {"name": "x", "success_key": "is_success", "max_steps": 5}
    env = GymnasiumEnv(made, observations=(Key(ArraySpec("a", "float32", (2,)), "agent_poss"),), **common)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"'agent_poss'.*'agent_pos'"):
        env.reset(1)
    env = GymnasiumEnv(made, observations=(Key(ArraySpec("a", "float32", (3,)), "agent_pos"),), **common)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"'a' has shape \[2\], its spec says \[3\]"):
        env.reset(1)


def test_a_rendered_frame_can_be_an_observation() -> None:
    made = gymnasium.make("gym_pusht/PushT-v0", obs_type="state")
    key = Key(ArraySpec("view", "uint8", (680, 680, 3), low=0, high=255), RENDER)
    env = GymnasiumEnv(made, name="x", observations=(key,), success_key="is_success", max_steps=5)
    assert (env.reset(1)["view"] == env.render()).all()


def test_max_steps_must_be_positive() -> None:
    with pytest.raises(InvalidInput, match="max_steps"):
        PushT(max_steps=0)
