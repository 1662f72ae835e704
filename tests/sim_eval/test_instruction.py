"""What a policy is told: the suite's prompt, else the env's own instruction."""

from __future__ import annotations

from typing import Any

import pytest

from omni_loop import registry
from omni_loop.env import EVALUATION_SEED
from omni_loop_sim_eval.episodes import Outcome, run_episode
from omni_loop_sim_eval.runner import preflight

from .toy import ToyClient, ToyEnv, ToyServer, ToySession, toy_suite


class Told(ToyClient):
    """Keeps the prompts that sessions were opened with."""

    def __init__(self) -> None:
        super().__init__(ToyServer())
        self.prompts: list[str] = []

    def open(self, pipeline: str, *, prompt: str = "", **rest: Any) -> ToySession:
        self.prompts.append(prompt)
        return super().open(pipeline, prompt=prompt, **rest)


class Instructed(ToyEnv):
    instruction = "walk to the middle"


class InstructedAnew(ToyEnv):
    """Says at every reset what is to be done."""

    instruction_of_episode = True
    instruction = ""

    def _reset(self, seed: int) -> None:
        super()._reset(seed)
        self.instruction = f"walk, {seed}"


@pytest.mark.parametrize("mode", ["sync", "live"])
@pytest.mark.parametrize(
    ("env", "prompt", "told"),
    [
        (ToyEnv, "", ""),
        (ToyEnv, "go", "go"),
        (Instructed, "", "walk to the middle"),
        (Instructed, "go", "go"),
        (InstructedAnew, "go", "go"),
    ],
)
def test_a_policy_is_told_the_suites_prompt_or_else_the_envs(
    env: type[ToyEnv], prompt: str, told: str, mode: str
) -> None:
    client = Told()
    suite = toy_suite(prompt=prompt, mode=mode)
    run_episode(client, env(), suite, 0)
    assert client.prompts == [told]


def test_an_instruction_of_an_episode_is_that_of_its_own_seed() -> None:
    client, env, suite = Told(), InstructedAnew(), toy_suite()
    results = [run_episode(client, env, suite, episode) for episode in (0, 1, 0)]
    assert client.prompts == [f"walk, {EVALUATION_SEED + episode}" for episode in (0, 1, 0)]
    assert [result.outcome for result in results] == [Outcome.SUCCESS] * 3
    plain = run_episode(ToyServer().connect(), ToyEnv(), suite, 0)
    assert all((result.actions == plain.actions).all() for result in results[::2])


def test_an_env_that_breaks_before_it_said_what_to_do_is_tried_again() -> None:
    class Broken(InstructedAnew):
        def _reset(self, seed: int) -> None:
            raise RuntimeError("no scene")

    result = run_episode(Told(), Broken(), toy_suite(), 0)
    assert (result.outcome, result.env_died) == (Outcome.ERROR, True)
    assert "no scene" in result.reason


def test_the_first_session_of_a_run_is_told_the_same() -> None:
    client = Told()
    with registry.registered(registry.ENVS, "instructed", Instructed):
        preflight(toy_suite(env="instructed"), lambda: client)
    assert client.prompts == ["walk to the middle"]
