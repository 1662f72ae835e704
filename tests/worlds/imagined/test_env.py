"""The registered env ``imagined`` over PushT's world, small and random: every rule of an env."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from omni_loop import registry
from omni_loop.client import connect
from omni_loop.env import Env
from omni_loop.errors import ConfigError, UnknownName
from omni_loop.testing.env_contract import EnvContract
from omni_loop_sim_eval.media import collect
from omni_loop_sim_eval.runner import run_suite
from omni_loop_sim_eval.suite import load_suite
from omni_loop_worlds.imagined import judge
from omni_loop_worlds.imagined.env import Imagined

MAX_STEPS = 12


class TestImagined(EnvContract):
    @pytest.fixture(autouse=True)
    def _address(self, world_address: str) -> None:
        self.address = world_address

    def make_env(self) -> Env:
        return Imagined(MAX_STEPS, address=self.address)

    def test_an_expert_succeeds(self, env: Env, monkeypatch: pytest.MonkeyPatch) -> None:
        """Nobody does in random weights; that success is what the coverage says is seen at any step."""
        env.reset(self.first_seed)
        assert not env.step(self.random_actions(env, 1)[0]).success
        monkeypatch.setattr(judge, "SUCCESS", -1.0)
        step = env.step(self.random_actions(env, 1)[0])
        assert (step.success, step.terminated, step.truncated) == (True, True, False)

    def test_it_begins_as_the_real_env_does_and_goes_on_as_the_readout_says(self, env: Env) -> None:
        real = registry.build(registry.ENVS, "pusht", {})
        first, seen = real.reset(self.first_seed, ("image", "agent_pos")), env.reset(self.first_seed)
        assert (seen["image"] == first["image"]).all()
        assert (seen["agent_pos"] == first["agent_pos"]).all()
        before = seen["agent_pos"]
        for action in self.random_actions(env, 3):
            step = env.step(action)
            assert (step.arrays["agent_pos"][0] == before[1]).all()
            assert set(step.info) == {"coverage", "misfit"}
            assert step.reward == min(step.info["coverage"] / 0.95, 1)
            before = step.arrays["agent_pos"]
        real.close()


def test_it_is_registered_and_says_its_score(world_address: str) -> None:
    for name, score in {"coverage": "coverage", "progress": "progress", "none": None}.items():
        env = registry.build(registry.ENVS, "imagined", {"address": world_address, "judge": name})
        assert env.score == score
        assert [spec.name for spec in env.observations] == ["image", "agent_pos"]
        env.close()


def test_what_does_not_fit_is_refused_by_name(world_address: str) -> None:
    for wrong, kind, text in (
        ({"judge": "coverag"}, UnknownName, "'coverag'. Did you mean 'coverage'"),
        ({"judge": "nowhere:x"}, ConfigError, "judge 'nowhere:x': No module named 'nowhere'"),
        ({"start": "push"}, UnknownName, "no env is called 'push'. Did you mean 'pusht'"),
        ({"image": "imag"}, UnknownName, "'pusht' has no observation 'imag'. Did you mean 'image'"),
        ({"agent": "block_pose"}, ConfigError, "'block_pose' is no position a step ago and now"),
        ({"deployment": "pusht-word"}, UnknownName, "no shipped deployment is called 'pusht-word'"),
    ):
        with pytest.raises(kind, match=text):
            Imagined(**wrong)  # type: ignore[arg-type]
    env = Imagined(address=world_address, image="agent_pos", agent="")
    with pytest.raises(ConfigError, match=r"predicts \[96, 96, 3\], env 'pusht' shows agent_pos as \[2, 2\]"):
        env.reset(1)
    env.close()


def test_without_an_agent_only_frames_are_given(world_address: str) -> None:
    env = Imagined(MAX_STEPS, address=world_address, agent="", judge="none")
    assert set(env.reset(1)) == {"image"}
    step = env.step(np.zeros(2, np.float32))
    assert (set(step.arrays), step.reward, step.done, dict(step.info)) == ({"image"}, 0.0, False, {})
    env.close()


def test_the_suite_evaluates_a_policy_inside_the_world(world_address: str, tmp_path: Path) -> None:
    shipped = load_suite("pusht-imagined")
    assert registry.build(registry.ENVS, shipped.env, {**shipped.env_options, "max_steps": 9}).max_steps == 9
    options = {**shipped.env_options, "address": world_address}
    suite = shipped.changed(env_options=options, episodes=2, max_steps=10, videos="all")
    run = run_suite(suite, lambda: connect(world_address))
    assert [(r.outcome, r.steps, r.reason) for r in run.results] == [("failure", 10, "")] * 2
    assert run.score == "coverage"
    seen = collect(run, tmp_path)  # replayed from seeds and actions: the dream is the same
    assert [video.path.exists() for video in seen.videos] == [True, True]
