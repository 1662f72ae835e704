"""robosuite and LIBERO for real, where their environments are installed (``omni-loop envs install NAME``)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from omni_loop import registry
from omni_loop.errors import ConfigError, OmniLoopError, UnknownName, Unsupported
from omni_loop_envs.worker.env import WorkerEnv
from omni_loop_envs.worker.environments import ENVIRONMENTS, State

SEED = 3_000_000
pytestmark = [pytest.mark.simulator, pytest.mark.timeout(900)]


def made(name: str, **options: Any) -> WorkerEnv:
    if ENVIRONMENTS[name].state is not State.INSTALLED:
        pytest.skip(f"its environment is {ENVIRONMENTS[name].state}: omni-loop envs install {name}")
    env = registry.build(registry.ENVS, name, options)
    assert isinstance(env, WorkerEnv)
    return env


OPTIONS: dict[str, dict[str, Any]] = {
    "robosuite": {"task": "Lift", "size": 64},
    "libero": {"suite": "libero_object", "task": 0, "size": 64},
}
ONLY_LIBERO = pytest.mark.parametrize("env", ["libero"], indirect=True)


@pytest.fixture(scope="module", params=list(OPTIONS))
def env(request: pytest.FixtureRequest) -> Iterator[WorkerEnv]:
    """One after the other: each takes 1 to 2 GB."""
    found = made(request.param, **OPTIONS[request.param])
    yield found
    found.close()


def rollout(env: WorkerEnv, seed: int, steps: int) -> list[bytes]:
    """Every array of an episode of random actions, as bytes."""
    rng, seen = np.random.default_rng(1), [env.reset(seed)]
    seen += [env.step(rng.uniform(-1, 1, 7).astype(np.float32)).arrays for _ in range(steps)]  # type: ignore[misc]
    return [arrays[key].tobytes() for arrays in seen for key in sorted(arrays)]


def test_the_same_seed_gives_the_same_bytes_here_and_in_a_fresh_worker(env: WorkerEnv) -> None:
    first = rollout(env, SEED, 6)
    rollout(env, SEED + 1, 3)
    assert rollout(env, SEED, 6) == first
    fresh = made(env.name, **OPTIONS[env.name])
    rollout(fresh, SEED + 2, 1)
    assert rollout(fresh, SEED, 6) == first
    fresh.close()


def test_another_seed_is_another_episode(env: WorkerEnv) -> None:
    a, b = env.reset(SEED), env.reset(SEED + 1)
    assert all(a[key].tobytes() != b[key].tobytes() for key in ("objects", "image"))


def test_looking_changes_nothing(env: WorkerEnv) -> None:
    actions = np.random.default_rng(2).uniform(-1, 1, (4, 7)).astype(np.float32)
    env.reset(SEED)
    for action in actions:
        env.render()
        env.observe()
        watched = env.step(action, keys=("state", "objects")).arrays
    env.reset(SEED, keys=())
    for action in actions:
        blind = env.step(action, keys=("state", "objects")).arrays
    assert all(watched[key].tobytes() == blind[key].tobytes() for key in watched)


def test_frames_show_a_scene_that_moves(env: WorkerEnv) -> None:
    before = env.reset(SEED)
    for _ in range(8):
        after = env.step(np.array([0, 0, -1, 0, 0, 0, -1], np.float32)).arrays
    for key in ("image", "wrist"):
        assert before[key].std() > 20
        assert (before[key].astype(int) != after[key]).any(axis=2).mean() > 0.005
    assert env.render().shape == (384, 384, 3)


def test_an_expert_succeeds_and_who_does_nothing_fails(env: WorkerEnv) -> None:
    episodes = 10 if env.name == "robosuite" else 4
    expert = registry.load(registry.EXPERTS, env.name)(env)
    successes = idle = 0
    for seed in range(SEED, SEED + episodes):
        env.reset(seed, keys=())
        expert.reset(seed)
        for _ in range(env.max_steps):
            step = env.step(expert.act(), keys=())
            if step.success or step.done:
                break
        successes += step.success
    env.reset(SEED, keys=())
    for _ in range(30):
        idle += env.step(env.hold(), keys=()).success
    assert successes >= 0.9 * episodes
    assert idle == 0


@ONLY_LIBERO
def test_liberos_instruction_is_that_of_its_bddl_file(env: WorkerEnv) -> None:
    assert env.instruction == "pick the alphabet soup and place it in the basket"
    assert {"alphabet_soup_1", "basket_1"} <= set(env.observations[-1].description.split(", "))


@ONLY_LIBERO
def test_a_seed_is_a_number_of_liberos_initial_states(env: WorkerEnv) -> None:
    first, again, other = (env.reset(seed, keys=("objects",))["objects"] for seed in (3, 53, 4))
    np.testing.assert_allclose(
        first, again, atol=2e-2
    )  # fixtures stand where the seed says; the things as the state says
    assert np.abs(first - other).max() > 0.01


def test_versions_are_those_of_the_pins(env: WorkerEnv) -> None:
    pins = dict(
        line.split("==") for line in ENVIRONMENTS[env.name].requirements.read_text().split("\n") if "==" in line
    )
    assert {name: env.versions[name] for name in ("numpy", "mujoco", "robosuite")} == {
        name: pins[name] for name in ("numpy", "mujoco", "robosuite")
    }


@pytest.mark.parametrize(
    ("name", "options", "error", "said"),
    [
        ("robosuite", {"task": "Lif"}, UnknownName, "Did you mean 'Lift'"),
        ("robosuite", {"task": "TwoArmLift"}, Unsupported, "two arms"),
        ("robosuite", {"camera": "agentvew"}, UnknownName, "'agentview'"),
        ("libero", {"suite": "libero_objet"}, UnknownName, "Did you mean 'libero_object'"),
        ("libero", {"task": 10}, ConfigError, "has 10, from 0 on"),
        ("libero", {"frames": "mirrored"}, UnknownName, "rotated"),
    ],
)
def test_wrong_options_are_named(name: str, options: dict[str, Any], error: type[OmniLoopError], said: str) -> None:
    with pytest.raises(error, match=said):
        made(name, **options)
