"""Any environment of gymnasium, from what a suite says about it alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import gymnasium
import numpy as np
import pytest
from numpy.typing import NDArray

from omni_loop.env import Env
from omni_loop.errors import ConfigError, MissingExtra, OmniLoopError, UnknownName
from omni_loop.testing.env_contract import Act, EnvContract
from omni_loop_envs.generic.env import Generic
from omni_loop_envs.pusht.env import PushT
from omni_loop_envs.pusht.expert import PushTExpert

SEED = 3_000_000

PUSHT: Mapping[str, Any] = {
    "id": "gym_pusht/PushT-v0",
    "import": "gym_pusht",
    "kwargs": {"obs_type": "pixels_agent_pos"},
    "observations": {"image": "pixels", "agent": "agent_pos", "x": "agent_pos[0:1]"},
    "success": "is_success",
    "score": "coverage",
}
REACH: Mapping[str, Any] = {
    "id": "FetchReach-v4",
    "import": "gymnasium_robotics",
    "observations": {"state": ["observation", "desired_goal"], "hand": "observation[:3]", "desired_goal": {}},
    "success": "is_success",
    "control_hz": 25,
}


def f32(*values: float) -> NDArray[np.float32]:
    return np.array(values, np.float32)


class TestGenericPushT(EnvContract):
    expert_episodes = 2

    def make_env(self) -> Env:
        return Generic(300, **PUSHT)

    def make_expert(self, env: Env, seed: int) -> Act:
        assert isinstance(env, Generic)
        expert, table = PushTExpert(), env._env.unwrapped
        expert.reset(seed)
        return lambda: expert.act(np.array([*table.agent.position, *table.block.position, table.block.angle]))  # type: ignore[attr-defined]

    def test_equal_step_by_step_to_our_own_adapter(self, env: Env) -> None:
        ours = PushT()
        assert (env.control_hz, env.score, env.max_steps) == (ours.control_hz, ours.score, ours.max_steps)
        assert (env.action.low, env.action.high) == (0, 512)
        first, same = ours.reset(SEED), env.reset(SEED)
        assert first["image"].tobytes() == same["image"].tobytes()
        for action in self.random_actions(env, 20):
            a, b = ours.step(action), env.step(action)
            assert a.arrays["image"].tobytes() == b.arrays["image"].tobytes()
            assert a.arrays["agent_pos"][1].tobytes() == b.arrays["agent"].tobytes()
            assert (b.arrays["agent"][:1] == b.arrays["x"]).all()
            assert (a.reward, a.success, a.done, a.info) == (b.reward, b.success, b.done, b.info)


def test_fetch_reach_is_equal_step_by_step_to_our_own_adapter() -> None:
    fetch, expert = pytest.importorskip("omni_loop_envs.fetch.env"), pytest.importorskip("omni_loop_envs.fetch.expert")
    ours, env = fetch.FetchReach(images=False), Generic(50, **REACH)
    assert (env.action.shape, env.action.low, env.action.high) == (ours.action.shape, -1, 1)
    solver, succeeded = expert.ReachExpert(), 0
    for seed in range(SEED, SEED + 3):
        a, b = ours.reset(seed)["state"], env.reset(seed)
        assert a.tobytes() == b["state"].tobytes()
        for step in range(50):
            action = solver.act(a) if step % 3 else f32(1, -1, 0.5, 0)
            mine, its = ours.step(action), env.step(action)
            a = mine.arrays["state"]
            assert a.tobytes() == its.arrays["state"].tobytes()
            assert a[:3].tobytes() == its.arrays["hand"].tobytes()
            assert a[10:].tobytes() == its.arrays["desired_goal"].tobytes()
            assert (mine.reward, mine.success, mine.done) == (its.reward, its.success, its.done)
            succeeded += mine.success
        assert its.truncated
    assert succeeded


class Odd(gymnasium.Env[Any, Any]):
    """Two wheels with bounds of their own, a nested observation, and a success of its own name."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 20}  # noqa: RUF012

    def __init__(self, render_mode: str | None = None, bound: float = 1.0, wheels: int = 2) -> None:
        self.render_mode = render_mode
        low, high = f32(-2, 0)[:wheels], f32(4, 10)[:wheels]
        self.action_space = gymnasium.spaces.Box(low * np.float32(bound), high * np.float32(bound))
        self.observation_space = gymnasium.spaces.Dict({})  # a lie
        self.taken: Any = None

    def _seen(self) -> dict[str, Any]:
        return {"robot": {"pose": np.arange(6.0).reshape(2, 3), "name": "odd"}, "n": np.int64(3)}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return self._seen(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.taken = action
        return self._seen(), 0.0, False, False, {"succeed": False, "distance": 0.5, "note": "far"}

    def render(self) -> Any:
        return np.full((24, 32, 3), 7, np.uint8)


ODD: dict[str, Any] = {"id": "odd/Odd-v0", "observations": {"pose": "robot/pose"}, "success": "succeed"}


@pytest.fixture(autouse=True)
def _odd_is_registered() -> Iterator[None]:
    gymnasium.register("odd/Odd-v0", lambda **kwargs: Odd(**kwargs), max_episode_steps=3)
    yield
    del gymnasium.registry["odd/Odd-v0"]


def odd(**options: Any) -> Generic:
    return Generic(8, **(ODD | options))


def test_shape_dtype_and_rate_are_taken_from_the_environment() -> None:
    view_of = {"render": True, "unit": "RGB"}
    env = odd(**{"import": ["gym_pusht"]}, observations={"pose": "robot/pose", "n": {}, "view": view_of})
    pose, n, view = env.observations
    assert (pose.dtype, pose.shape, pose.low) == ("float32", (2, 3), None)
    assert (n.dtype, n.shape) == ("int64", ())
    assert (view.dtype, view.shape, view.low, view.high, view.unit) == ("uint8", (24, 32, 3), 0, 255, "RGB")
    assert env.control_hz == 20
    arrays = env.reset(1)
    assert arrays["view"].tobytes() == env.render().tobytes()
    assert arrays["n"] == 3


def test_a_named_shape_needs_no_frame_to_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a machine without OpenGL can be asked for the state alone."""
    drawn = Odd.render
    monkeypatch.setattr(Odd, "render", lambda self: pytest.fail("rendered a frame nobody asked for"))
    env = odd(observations={"pose": "robot/pose", "view": {"render": True, "shape": [24, 32, 3]}})
    env.reset(1, keys=["pose"])
    monkeypatch.setattr(Odd, "render", drawn)
    assert env.observe(["view"])["view"].shape == (24, 32, 3)


def test_the_suites_max_steps_end_an_episode_not_the_registered_ones() -> None:
    env = odd()
    env.reset(1)
    steps = [env.step(env.hold(), keys=()) for _ in range(8)]
    assert [s.done for s in steps] == [False] * 7 + [True]


@pytest.mark.parametrize(
    ("said", "given", "taken"),
    [
        ({}, [-1, -1], [-2, 0]),  # bounds differ: a policy gives -1..1
        ({}, [1, 1], [4, 10]),
        ({}, [0, 0.5], [1, 7.5]),
        ({"low": 0, "high": 1}, [0.5, 0.1], [1, 1]),
        ({"low": 0, "high": 3, "rescale": False}, [3, 1.5], [3, 1.5]),
    ],
)
def test_actions_are_rescaled_dimension_by_dimension(said: dict[str, Any], given: Any, taken: Any) -> None:
    env = odd(action=said)
    assert (env.action.low, env.action.high) == (said.get("low", -1), said.get("high", 1))
    env.reset(1)
    env.step(f32(*given), keys=())
    got = env._env.unwrapped.taken  # type: ignore[attr-defined]
    assert got.dtype == np.float32
    assert got == pytest.approx(taken)


def test_actions_of_one_range_go_through_untouched() -> None:
    env = odd(kwargs={"wheels": 1})
    assert (env.action.low, env.action.high) == (-2, 4)
    env.reset(1)
    action = f32(0.1)
    env.step(action, keys=())
    assert env._env.unwrapped.taken.tobytes() == action.tobytes()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("wrong", "kind", "text"),
    [
        ({"success": "sucess"}, ConfigError, r"no success key 'sucess' in its info. Did you mean 'succeed'"),
        ({"success": "note"}, ConfigError, r"success key 'note' is no single number"),
        ({"success": None}, ConfigError, r"success: Input should be a valid string"),
        ({"info": ["distanc"]}, ConfigError, r"no info key 'distanc'. Did you mean 'distance'"),
        ({"score": "dist"}, ConfigError, r"no info key 'dist'. Did you mean 'distance'"),
        ({"succes": "succeed"}, ConfigError, r"unknown key 'succes'. Did you mean 'success'"),
        ({"observations": {}}, ConfigError, r"observations: "),
        ({"observations": {"a": "robot/pos"}}, ConfigError, r"no 'robot/pos' in its observation. Did you mean 'pose'"),
        ({"observations": {"pos": {}}}, ConfigError, r"no 'pos' in its observation"),
        ({"observations": {"a": "robot"}}, ConfigError, r"several arrays at 'robot'; say 'robot/pose'"),
        ({"observations": {"a": "robot/name"}}, ConfigError, r"'a' holds no numbers"),
        ({"observations": {"a": "robot/pose[0:2]"}}, ConfigError, r"no part 'robot/pose\[0:2\]' in .* shape \[2, 3\]"),
        ({"observations": {"a": {"source": "n", "shape": [2]}}}, ConfigError, r"'a' has shape \[\], its spec says"),
        ({"observations": {"a": {"sorce": "n"}}}, ConfigError, r"unknown key 'observations.a.sorce'"),
        ({"observations": {"a": {"render": True, "source": "n"}}}, ConfigError, "what is rendered has no source"),
        ({"observations": {"a": {"source": "n", "dtype": "float33"}}}, ConfigError, "'float33' is none of"),
        ({"observations": {"a": 3}}, ConfigError, r"observations.a"),
        ({"observations": {"a": []}}, ConfigError, r"observations.a.source: wanted a path"),
        ({"action": {"low": 1}}, ConfigError, "action: low and high go together"),
        ({"action": {"low": 1, "high": 1}}, ConfigError, "1..1 is no range"),
        ({"action": {"rescale": False}}, ConfigError, "needs low and high"),
        ({"kwargs": {"bound": "wide"}}, ConfigError, "cannot be made with"),
        ({"kwargs": {"wheel": 1}}, ConfigError, r"cannot be made with .*wheel"),
        ({"kwargs": {"max_episode_steps": 5}}, ConfigError, "max_episode_steps is said by the suite's max_steps"),
        ({"control_hz": 0}, ConfigError, "control_hz"),
        ({"id": "odd/Od-v0"}, UnknownName, r"no env 'odd/Od-v0'. Did you mean 'odd/Odd-v0'\? If a module registers"),
        (
            {"import": "no_such_module"},
            MissingExtra,
            r"'odd/Odd-v0' needs the module 'no_such_module', which is not there: not installed, or its folder",
        ),
        ({"import": ""}, ConfigError, "import: '' is no name of a module"),
        ({"import": [".odd"]}, ConfigError, r"import: '\.odd' is no name of a module"),
        ({"id": "no_such_module:Odd-v0"}, ConfigError, "No module named 'no_such_module'"),
        ({"kwargs": {"wheels": "two"}}, ConfigError, "cannot be made with .*wheels"),
        ({"observations": {"a": "ro\nbot"}}, ConfigError, r"no 'ro\\nbot' in its observation"),
        ({"id": "CartPole-v1", "observations": {"a": {}}}, ConfigError, "must be a one-dimensional Box"),
    ],
)
def test_what_does_not_fit_is_said_when_the_env_is_made(
    wrong: dict[str, Any], kind: type[OmniLoopError], text: str
) -> None:
    with pytest.raises(kind, match=text):
        odd(**wrong)


def test_an_environment_whose_own_code_breaks_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(self: Odd, action: Any) -> Any:
        raise ZeroDivisionError("no wheels")

    monkeypatch.setattr(Odd, "step", breaks)
    with pytest.raises(ConfigError, match="env 'odd/Odd-v0' broke when it was tried: ZeroDivisionError: no wheels"):
        odd()


def test_without_a_success_key_there_is_no_env() -> None:
    with pytest.raises(ConfigError, match="success: Field required"):
        Generic(8, id="odd/Odd-v0", observations={"pose": "robot/pose"})


def test_a_rate_that_nobody_names_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Odd, "metadata", {"render_modes": ["rgb_array"]})
    with pytest.raises(ConfigError, match="control_hz is unknown; name it"):
        odd()


def test_actions_without_bounds_need_them_named(monkeypatch: pytest.MonkeyPatch) -> None:
    make = Odd.__init__

    def unbounded(self: Odd, **kwargs: Any) -> None:
        make(self, **kwargs)
        self.action_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,))

    monkeypatch.setattr(Odd, "__init__", unbounded)
    with pytest.raises(ConfigError, match="its actions have no bounds; name low and high under action"):
        odd()
    env = odd(action={"low": -3, "high": 3})
    env.reset(1)
    env.step(f32(3, -3), keys=())
    assert env._env.unwrapped.taken.tolist() == [3, -3]  # type: ignore[attr-defined]
