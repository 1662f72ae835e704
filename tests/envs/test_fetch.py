from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("gymnasium_robotics")

from omni_loop.env import EVALUATION_SEED, Env
from omni_loop.errors import ConfigError, MissingExtra, UnknownName, Unsupported
from omni_loop.testing.env_contract import Act, EnvContract
from omni_loop_envs import headless
from omni_loop_envs.fetch.demos import FETCH_DEMOS, KINDS, FetchDemos, make_episode
from omni_loop_envs.fetch.env import ENVIRONMENT, GOAL, OBJECT, FetchEnv, FetchPickPlace, FetchPush, FetchReach
from omni_loop_envs.fetch.expert import FetchExpert


class TestFetchPickPlace(EnvContract):
    """The state alone: nothing of OpenGL is touched."""

    def make_env(self) -> Env:
        return FetchPickPlace(images=False)

    def make_expert(self, env: Env, seed: int) -> Act:
        assert isinstance(env, FetchPickPlace)
        expert = FetchExpert()
        return lambda: expert.act(env.state)

    def test_looking_changes_nothing(self, env: Env) -> None:
        pytest.skip("there is nothing to look at")

    def test_render_is_a_frame(self, env: Env) -> None:
        env.reset(self.first_seed)
        with pytest.raises(Unsupported, match="without images"):
            env.render()

    def test_who_does_nothing_fails(self, env: Env) -> None:
        successes = 0
        for seed in range(self.first_seed, self.first_seed + 5):
            env.reset(seed, keys=())
            successes += any(env.step(np.zeros(4, np.float32), keys=()).success for _ in range(env.max_steps))
        assert successes <= 1, "the cube may lie at its goal by chance, not often"

    def test_success_is_a_cube_within_5_cm_of_its_goal(self, env: Env) -> None:
        assert isinstance(env, FetchPickPlace)
        env.reset(self.first_seed, keys=())
        expert, seen = FetchExpert(), set()
        for _ in range(env.max_steps):
            step = env.step(expert.act(env.state), keys=("state",))
            state = step.arrays["state"]
            assert step.success == (np.linalg.norm(state[OBJECT] - state[GOAL]) < 0.05)
            seen.add(step.success)
        assert seen == {True, False}

    def test_environment_state_is_the_part_of_state_that_is_not_the_robots(self, env: Env) -> None:
        arrays = env.reset(self.first_seed)
        assert (arrays["environment_state"] == arrays["state"][ENVIRONMENT]).all()
        assert (arrays["environment_state"][-3:] == arrays["state"][GOAL]).all()


@pytest.mark.skipif(not headless.can_draw(), reason="neither OSMesa nor EGL on this machine")
class TestFetchWithImages(EnvContract):
    expert_episodes = 2

    def make_env(self) -> Env:
        return FetchPickPlace()

    def make_expert(self, env: Env, seed: int) -> Act:
        assert isinstance(env, FetchPickPlace)
        expert = FetchExpert()
        return lambda: expert.act(env.state)

    def test_a_frame_shows_what_moves(self, env: Env) -> None:
        before = env.reset(self.first_seed)["image"]
        for _ in range(5):
            after = env.step(np.array([1, 0, 0, 0], np.float32)).arrays["image"]
        changed = (before.astype(int) != after).any(axis=2).mean()
        assert 0.005 < changed < 0.5, "the arm moves before a still background"


@pytest.mark.parametrize("kind", [FetchPickPlace, FetchPush, FetchReach])
def test_what_is_observed_late_is_what_the_simulator_says_after_the_step(kind: type[FetchEnv]) -> None:
    env, sim = kind(images=False), kind._simulator()
    env.reset(seed=5)
    seen, _ = sim.reset(seed=5)
    moves = np.random.default_rng(0).uniform(-1, 1, (20, 4)).astype(np.float32)
    for n, move in enumerate(moves):
        step = env.step(move)
        seen, reward, _, _, info = sim.step(move)
        assert (step.reward, step.success) == (reward, bool(info["is_success"]))
        if n % 3 == 0:  # looking, or not, changes nothing of what comes
            np.testing.assert_array_equal(
                env.state, np.concatenate([seen["observation"], seen["desired_goal"]]).astype(np.float32)
            )
    env.close()
    sim.close()


def test_state_alone_loads_no_opengl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(headless, "open_gl", lambda *size: pytest.fail("opened OpenGL for nothing"))
    env = FetchPickPlace()
    env.reset(3_000_000, keys=("state",))
    env.step(np.zeros(4, np.float32), keys=("state", "environment_state"))
    env.close()


def test_a_machine_without_opengl_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(headless, "find_library", lambda name: None)
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    env = FetchPickPlace()
    env.reset(3_000_000, keys=("state",))
    with pytest.raises(MissingExtra, match=r"OSMesa or EGL.*apt-get install libosmesa6"):
        env.observe(("image",))
    env.step(np.zeros(4, np.float32), keys=("state",))  # the episode goes on
    env.close()


SMALL = FetchDemos("small", {"train": ({"expert": 1, "perturbed": 2}, 700_000), "test": ({"expert": 1}, 950_000)})


def test_splits_and_evaluation_share_no_seed() -> None:
    train, test = ({seed for _, seed in FETCH_DEMOS.jobs(split)} for split in ("train", "test"))
    assert len(train) == 500
    assert not train & test
    assert max(train | test) < EVALUATION_SEED
    with pytest.raises(ConfigError, match="seed 7 is in both train and test"):
        FetchDemos("x", {"train": ({"expert": 3}, 5), "test": ({"expert": 1}, 7)})
    with pytest.raises(ConfigError, match="belongs to evaluation"):
        FetchDemos("x", {"train": ({"expert": 1}, EVALUATION_SEED)})
    with pytest.raises(UnknownName, match=r"'exprt'. Did you mean 'expert'"):
        FetchDemos("x", {"train": ({"exprt": 1}, 0)})
    with pytest.raises(UnknownName, match=r"'tst'. Did you mean 'test'"):
        FETCH_DEMOS.jobs("tst")


def test_generated_sets_load_and_overlap_on_disk_is_refused(tmp_path: Path) -> None:
    heard: list[tuple[str, int, int]] = []
    SMALL.generate(tmp_path, workers=1, progress=lambda *args: heard.append(args))
    assert heard == [("train", 1, 3), ("train", 2, 3), ("train", 3, 3), ("test", 1, 1)]
    train = SMALL.load(tmp_path)["train"]
    rows = int(train.length.sum())
    assert train.state.shape == (rows, 28)
    assert train.points.shape == (rows, 3, 2)
    assert np.abs(train.points).max() < 1
    assert train.label.shape == train.action.shape == (rows, 4)
    assert [KINDS[k] for k in train.column("kind")] == ["expert", "perturbed", "perturbed"]
    assert train.success.all()
    np.save(tmp_path / "test" / "seed.npy", train.column("seed")[:1])
    with pytest.raises(ConfigError, match="is also in train"):
        SMALL.load(tmp_path)


def test_an_episode_is_a_pure_function_of_its_job_and_its_actions_lead_to_the_next_row() -> None:
    a, b = make_episode(("perturbed", 1_100_123)), make_episode(("perturbed", 1_100_123))
    assert a.state.tobytes() == b.state.tobytes()
    assert (a.action != a.label).any()
    env = FetchPickPlace(images=False)
    env.reset(1_100_123, keys=())
    assert (env.state == a.state[0]).all()
    for i, action in enumerate(a.action[:-1]):
        step = env.step(action, keys=())
        assert (env.state == a.state[i + 1]).all(), f"row {i + 1}"
        assert step.success == a.coverage[i + 1]
