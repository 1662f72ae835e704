"""For every env an expert scores at least 90 %, so that a success key nobody sets cannot pass as 0 %."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from omni_loop import registry
from omni_loop.env import Env, Expert
from omni_loop.errors import MissingExtra, Unsupported

RATE = 0.9
SEED = 3_000_000
EPISODES = {
    "fetch-push": 20,
    "fetch-pick-place": 20,
    "fetch-reach": 20,
    "aloha": 5,
    "so101": 5,
    "metaworld": 5,
    "lerobot": 3,
    "libero": 2,
    "robosuite": 2,
}
OPTIONS: Mapping[str, tuple[Mapping[str, Any], ...]] = {
    "fetch-pick-place": ({"images": False},),
    "fetch-push": ({"images": False},),
    "fetch-reach": ({"images": False},),
    "metaworld": tuple(
        {"task": f"{task}-v3"} for task in ("reach", "push", "pick-place", "button-press", "drawer-open", "door-open")
    ),
    "lerobot": ({"type": "pusht"},),
    "robosuite": ({"images": False},),
    "libero": ({"suite": "libero_object", "images": False},),
}
NONE = {
    "gymnasium": "its environment is the suite's choice",
    "imagined": "there is no truth to read in a world model",
    "worker": "its env is the suite's choice, and the simulator is in another process",
}
CASES = [(name, options) for name in registry.names(registry.EXPERTS) for options in OPTIONS.get(name, ({},))]


def of(name: str, options: Mapping[str, Any]) -> str:
    return "-".join([name, *(str(value) for value in options.values() if isinstance(value, str))])


@pytest.mark.parametrize(("name", "options"), CASES, ids=[of(*case) for case in CASES])
def test_an_expert_scores_90_percent(name: str, options: Mapping[str, Any]) -> None:
    try:
        env: Env = registry.build(registry.ENVS, name, options)
    except MissingExtra as e:
        pytest.skip(e.text)
    expert: Expert = registry.load(registry.EXPERTS, name)(env)
    episodes = EPISODES.get(name, 10)
    successes = sum(succeeds(env, expert, SEED + i) for i in range(episodes))
    env.close()
    assert successes >= RATE * episodes, f"{successes} of {episodes}"


def succeeds(env: Env, expert: Expert, seed: int) -> bool:
    env.reset(seed, keys=())
    expert.reset(seed)
    while not (step := env.step(expert.act(), keys=())).done:
        if step.success:
            return True
    return step.success


def test_every_env_has_an_expert_or_a_reason() -> None:
    assert {*registry.names(registry.ENVS)} == {*registry.names(registry.EXPERTS), *NONE}


class Other:
    """An env that is not the adapter: its simulator cannot be read."""

    name = "other"


@pytest.mark.parametrize("name", ["pusht", "fetch-pick-place", "fetch-push", "fetch-reach"])
def test_an_expert_refuses_an_env_that_it_cannot_read(name: str) -> None:
    with pytest.raises(Unsupported, match=f"the expert of '{name}' reads the simulator; it has no use for env 'other'"):
        registry.load(registry.EXPERTS, name)(Other())


@pytest.mark.parametrize("name", ["pusht", "fetch-push"])
def test_an_expert_is_a_pure_function_of_the_seed(name: str) -> None:
    """Also after another episode, so that an upper bound can be resumed and sharded as any other run."""
    env: Env = registry.build(registry.ENVS, name, {})
    make = registry.load(registry.EXPERTS, name)
    used, seen = make(env), []
    succeeds(env, used, SEED + 1)
    for expert in (used, make(env)):
        env.reset(SEED, keys=())
        expert.reset(SEED)
        actions = []
        for _ in range(25):
            actions.append(expert.act())
            env.step(actions[-1], keys=())
        seen.append(np.stack(actions).tobytes())
    env.close()
    assert seen[0] == seen[1]
