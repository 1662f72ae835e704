"""Suites of several tasks."""

from __future__ import annotations

import pytest

from omni_loop import registry
from omni_loop.errors import ConfigError, UnknownName
from omni_loop_sim_eval.runner import run_suite

from .toy import ToyEnv, ToyServer, toy_suite

TASKS = [
    {"name": "near", "prompt": "go near", "env_options": {"where": {"x": 1, "way": ["a", None, 0.5]}}},
    {"name": "far", "max_steps": 5},
]


class Placed(ToyEnv):
    """Keeps the options it was made with."""

    made: tuple[object, ...] = ()

    def __init__(self, where: object = None, kind: str = "", max_steps: int = 60) -> None:
        super().__init__(max_steps)
        Placed.made = (*Placed.made, (where, kind, max_steps))


def test_a_task_takes_from_the_suite_what_it_does_not_say() -> None:
    suite = toy_suite(env="placed", tasks=TASKS, prompt="go", env_options={"kind": "k"}, max_steps=20)
    assert suite.task_names == ("near", "far")
    near, far = suite.task("near"), suite.task("far")
    assert (near.prompt, near.max_steps) == ("go near", 20)
    assert (far.prompt, far.max_steps, far.env_options) == ("go", 5, {"kind": "k"})
    with registry.registered(registry.ENVS, "placed", Placed):
        assert suite.make_env("far").max_steps == 5
        suite.make_env()
    assert Placed.made[-1] == ({"x": 1, "way": ["a", None, 0.5]}, "k", 20), "nested, and of the first task"
    with pytest.raises(UnknownName, match=r"no task 'nearr'. Did you mean 'near'"):
        suite.task("nearr")
    assert suite.only("far").task_names == ("far",)
    assert suite.only() == suite
    assert (toy_suite().task_names, toy_suite(prompt="p").task().prompt) == (("",), "p")


def test_every_task_runs_every_episode_on_the_same_seeds() -> None:
    server = ToyServer()
    run = run_suite(toy_suite(tasks=[{"name": "near"}, {"name": "far", "max_steps": 5}], episodes=2), server.connect)
    assert [(r.task, r.episode, r.outcome) for r in run.results] == [
        ("near", 0, "success"), ("near", 1, "success"), ("far", 0, "failure"), ("far", 1, "failure"),
    ]  # fmt: skip
    assert [r.seed for r in run.results[:2]] == [r.seed for r in run.results[2:]]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"tasks": [{"name": "a"}, {"name": "a"}]}, "a name stands twice"),
        ({"tasks": [{"name": "a", "env_options": {"max_steps": 3}}]}, "max_steps has a key of its own"),
        ({"tasks": [{"name": ""}]}, r"tasks\[0\].name"),
        ({"tasks": [{"name": "a", "promt": "x"}]}, r"promt'. Did you mean 'prompt'"),
        ({"live": {"latency": 3}}, r"latency'. Did you mean 'latency_ms'"),
        ({"mode": "live", "action_repeat": 2}, "of mode sync"),
    ],
)
def test_what_a_suite_may_not_say(fields: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        toy_suite().changed(**fields)


def test_an_option_the_env_does_not_take_is_named() -> None:
    with pytest.raises(ConfigError, match=r"takes no option 'max_stepz'. Did you mean 'max_steps'"):
        toy_suite(env_options={"max_stepz": 3}).make_env()
