"""LeRobot's environments by config name: the contract on its PushT, and what its adapters get wrong."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from typing import Any

import gymnasium
import numpy as np
import pytest

from omni_loop import registry
from omni_loop.env import Env
from omni_loop.errors import ConfigError, MissingExtra, UnknownName, Unsupported
from omni_loop.testing.env_contract import Act, EnvContract

pytest.importorskip("lerobot")

from omni_loop_envs.lerobot.env import LeRobotEnv
from omni_loop_envs.lerobot.observations import naming
from omni_loop_sim_eval import bounds

pytestmark = [
    pytest.mark.timeout(400),  # importing LeRobot takes 20 s of CPU
    # Of what lerobot imports, and of gymnasium about environments that are not ours:
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]
STATE, PIXELS = "environment_state_agent_pos", "pixels_agent_pos"
FIRST = 3_000_000


def expert(env: Env, seed: int) -> Act:
    made = registry.load(registry.EXPERTS, "lerobot")(env)
    made.reset(seed)
    return made.act  # type: ignore[no-any-return]


class TestPushTState(EnvContract):
    expert_episodes = 5

    def make_env(self) -> Env:
        return LeRobotEnv(300, type="pusht", obs_type=STATE)

    def make_expert(self, env: Env, seed: int) -> Act:
        return expert(env, seed)

    def test_it_is_called_as_policies_call_it(self, env: Env) -> None:
        assert {spec.name: spec.shape for spec in env.observations} == {"state": (2,), "environment_state": (16,)}


class TestPushTPixels(EnvContract):
    expert_episodes = 2

    def make_env(self) -> Env:
        return LeRobotEnv(300, type="pusht", obs_type=PIXELS, observation_height=96, observation_width=96)

    def make_expert(self, env: Env, seed: int) -> Act:
        return expert(env, seed)

    def test_it_is_called_as_policies_call_it(self, env: Env) -> None:
        assert {spec.name: spec.shape for spec in env.observations} == {"state": (2,), "image": (96, 96, 3)}

    def test_frames_are_only_drawn_on_request(self, env: Env, monkeypatch: pytest.MonkeyPatch) -> None:
        assert isinstance(env, LeRobotEnv)
        monkeypatch.setattr(env.simulator, "_render", lambda **_: pytest.fail("drew a frame nobody asked for"))
        env.reset(FIRST, keys=("state",))
        env.step(np.array([256, 256], np.float32), keys=("state",))


@pytest.mark.parametrize("obs_type", [STATE, PIXELS])
def test_observations_are_lerobots_own(obs_type: str) -> None:
    """What ``lerobot-eval`` shows a policy, feature by feature and bit by bit."""
    from lerobot.envs import make_env, make_env_config, preprocess_observation

    (theirs,) = make_env(make_env_config("pusht", obs_type=obs_type))["pusht"].values()
    ours = LeRobotEnv(type="pusht", obs_type=obs_type)
    seen, _ = theirs.reset(seed=[FIRST])
    arrays = ours.reset(FIRST)
    for action in np.random.default_rng(0).uniform(0, 512, (4, 2)).astype(np.float32):
        shown = preprocess_observation(seen)
        assert set(shown) == {f"observation.{key}" for key in arrays}
        for key, array in arrays.items():
            want = shown[f"observation.{key}"][0].numpy()
            if array.dtype == np.uint8:
                want, array = want.transpose(1, 2, 0), array.astype(np.float32) / 255
            assert (array == want).all(), key
        seen, *_ = theirs.step(action[None])
        arrays = dict(ours.step(action).arrays)
    theirs.close()
    ours.close()


def test_a_picture_does_not_show_the_last_episodes_action() -> None:
    env = LeRobotEnv(type="pusht", obs_type=STATE)
    env.reset(FIRST)
    fresh = env.render()
    env.step(np.array([100, 400], np.float32))
    env.reset(FIRST)
    assert (env.render() == fresh).all()


def test_the_suite_says_how_long_an_episode_is() -> None:
    env = LeRobotEnv(3, type="pusht", obs_type=STATE)
    env.reset(FIRST)
    steps = [env.step(np.array([256, 256], np.float32)) for _ in range(3)]
    assert [step.truncated for step in steps] == [False, False, True]
    assert LeRobotEnv(type="pusht", obs_type=STATE).max_steps == 300  # else the config


def test_names_and_fields_that_are_none() -> None:
    with pytest.raises(UnknownName, match=r"no env 'pusht-v0'. Did you mean 'pusht'"):
        LeRobotEnv(type="pusht-v0")
    with pytest.raises(ConfigError, match=r"no field 'obs_typ'. Did you mean 'obs_type'"):
        LeRobotEnv(type="pusht", obs_typ=STATE)
    with pytest.raises(ConfigError, match="fps"):
        LeRobotEnv(type="pusht", fps="often")
    with pytest.raises(ConfigError, match=r"no obs_type 'pixel_agent_pos'. Did you mean 'pixels_agent_pos'"):
        LeRobotEnv(type="pusht", obs_type="pixel_agent_pos")
    with pytest.raises(ConfigError, match=r"no task 'PushT'. Did you mean 'PushT-v0'"):
        LeRobotEnv(type="pusht", task="PushT")
    with pytest.raises(Unsupported, match="hub"):
        LeRobotEnv(type="isaaclab_arena")
    with pytest.raises(Unsupported, match="robot"):
        LeRobotEnv(type="gym_manipulator")


def test_a_wrong_success_key_is_an_error_that_names_the_nearest() -> None:
    env = LeRobotEnv(type="pusht", obs_type=STATE, success_key="success")
    env.reset(FIRST)
    with pytest.raises(ConfigError, match=r"no success key 'success'. Did you mean 'is_success'"):
        env.step(np.array([256, 256], np.float32))


def test_a_simulator_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import lerobot.envs.configs

    monkeypatch.setattr(lerobot.envs.configs.PushtEnv, "package_name", property(lambda self: "gym_not_here"))
    with pytest.raises(MissingExtra, match=r"needs the package gym_not_here.*: install lerobot\[pusht\]$"):
        LeRobotEnv(type="pusht")


def test_libero_is_said_to_be_here_by_another_name() -> None:
    if find_spec("libero"):
        pytest.skip("LIBERO is installed")
    with pytest.raises(MissingExtra, match=r"install lerobot\[libero\], or say env: libero \(omni-loop envs install"):
        LeRobotEnv(type="libero")


def test_a_simulator_that_is_no_env_here_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[object] = []

    def refuse(*_: object) -> None:
        raise ConfigError("no array")

    monkeypatch.setattr(gymnasium.vector.SyncVectorEnv, "close_extras", lambda self, **_: closed.append(self))
    monkeypatch.setattr("omni_loop_envs.lerobot.env.specs", refuse)
    with pytest.raises(ConfigError, match="no array"):
        LeRobotEnv(type="pusht", obs_type=STATE)
    assert len(closed) == 1


class Table(gymnasium.Env[Any, Any]):
    """As LeRobot's LIBERO behaves: nested state, an image that is upside down, initial states counted on."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 20}  # noqa: RUF012  gymnasium's own way
    render_mode = "rgb_array"
    task_description = "put it there"

    def __init__(self, task: int = 0) -> None:
        box = gymnasium.spaces.Box
        vector: dict[str, gymnasium.Space[Any]] = {
            name: box(-np.inf, np.inf, (n,), np.float64) for name, n in (("pos", 3), ("quat", 4))
        }
        hand: dict[str, gymnasium.Space[Any]] = {"qpos": box(-np.inf, np.inf, (2,), np.float64)}
        state = {"eef": vector, "gripper": hand}
        pixels: dict[str, gymnasium.Space[Any]] = {"image": box(0, 255, (4, 6, 3), np.uint8)}
        self.observation_space = gymnasium.spaces.Dict(
            {
                "pixels": gymnasium.spaces.Dict(pixels),
                "robot_state": gymnasium.spaces.Dict({k: gymnasium.spaces.Dict(v) for k, v in state.items()}),
            }
        )
        self.action_space = box(np.array([-1, 0], np.float32), np.array([1, 1], np.float32), dtype=np.float32)
        self.init_state_id, self._at, self.task = 0, 0, task

    def _observation(self) -> dict[str, Any]:
        image = np.arange(72, dtype=np.uint8).reshape(4, 6, 3)
        eef = {"pos": np.full(3, float(self._at)), "quat": np.array([0.0, 0, 0, 1])}
        return {"pixels": {"image": image}, "robot_state": {"eef": eef, "gripper": {"qpos": np.array([0.1, 0.2])}}}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._at = self.init_state_id % 50
        self.init_state_id += 1
        return self._observation(), {"is_success": False}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self._observation(), 0.0, False, False, {"is_success": False}


@pytest.fixture
def table() -> Iterator[None]:
    """A config ``libero`` that is made of ``Table`` s: LIBERO itself does not go together with numpy 2."""
    from lerobot.envs.configs import EnvConfig
    from lerobot.processor import LiberoProcessorStep, PolicyProcessorPipeline

    @dataclass
    class Config(EnvConfig):  # type: ignore[misc]
        tasks: int = 1
        episode_length: int = 7
        features: dict[str, Any] = field(default_factory=dict)

        @property
        def gym_kwargs(self) -> dict[str, Any]:
            return {}

        def create_envs(self, n_envs: int, use_async_envs: bool = False) -> Any:
            made = {i: gymnasium.vector.SyncVectorEnv([partial(Table, i)]) for i in range(self.tasks)}
            return {"table": made}

        def get_env_processors(self) -> Any:
            return PolicyProcessorPipeline(steps=[LiberoProcessorStep()]), PolicyProcessorPipeline(steps=[])

    choices = EnvConfig._choice_registry  # draccus offers no way to forget one
    before = dict(choices)
    choices["libero"] = Config
    yield
    choices.clear()
    choices.update(before)


@pytest.mark.usefixtures("table")
def test_what_lerobot_does_to_an_observation_is_done() -> None:
    env = LeRobotEnv(type="libero")
    assert {s.name: (s.dtype, s.shape) for s in env.observations} == {
        "images.image": ("uint8", (4, 6, 3)),
        "state": ("float32", (8,)),
    }
    arrays = env.reset(FIRST)
    shown = np.arange(72, dtype=np.uint8).reshape(4, 6, 3)[::-1, ::-1]  # LeRobot turns it by 180 degrees
    assert (arrays["images.image"] == shown).all()
    assert arrays["state"][6:] == pytest.approx([0.1, 0.2])
    assert (env.instruction, env.instruction_of_episode) == ("put it there", False)
    assert env.max_steps == 7
    assert (env.action.low, env.action.high) == (-1, 1)


@pytest.mark.usefixtures("table")
def test_who_wants_to_hold_where_nobody_knows_how_is_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    client = bounds.BoundClient("hold", "lerobot")
    client.attach(LeRobotEnv(type="libero"))
    with pytest.raises(Unsupported, match="env 'lerobot/libero' does not say which action holds still"):
        client.open("hold")
    monkeypatch.setattr(Table, "control_mode", "relative", raising=False)
    client.attach(LeRobotEnv(type="libero"))
    assert client.open("hold").infer({}, step=0).chunk.actions.tolist() == [[0, 0]]  # type: ignore[union-attr]


@pytest.mark.usefixtures("table")
def test_what_other_simulators_say_is_to_be_done_is_of_an_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omni_loop_envs.lerobot.sims._SIMS", {})
    env = LeRobotEnv(type="libero")
    assert env.instruction_of_episode
    env.reset(FIRST)
    env.simulator.task_description = "put it back"
    assert env.instruction == "put it back"


@pytest.mark.usefixtures("table")
def test_an_initial_state_is_the_seeds_and_not_the_next() -> None:
    env = LeRobotEnv(type="libero")
    first = env.reset(FIRST + 3)["state"]
    env.reset(FIRST + 9)
    assert (env.reset(FIRST + 3)["state"] == first).all()
    assert (env.reset(FIRST + 4)["state"] != first).any()


@pytest.mark.usefixtures("table")
def test_one_task_of_several_is_named() -> None:
    with pytest.raises(ConfigError, match="table: 3 tasks; name one: task_id"):
        LeRobotEnv(type="libero", tasks=3)
    assert LeRobotEnv(type="libero", tasks=3, task_id=2).simulator.task == 2
    with pytest.raises(ConfigError, match="no task_id 3"):
        LeRobotEnv(type="libero", tasks=3, task_id=3)


def test_an_observation_that_is_one_array_has_a_name() -> None:
    name = naming()
    assert set(name(np.zeros(5))) == {"state"}
    assert set(name(np.zeros((8, 8, 3), np.uint8))) == {"image"}
    assert set(name({"pixels": {"top": np.zeros((8, 8, 3), np.uint8)}, "agent_pos": np.zeros(2)})) == {
        "images.top",
        "state",
    }


class TestMetaWorld:
    """Without a frame: nothing here needs OpenGL."""

    @pytest.fixture
    def env(self) -> Iterator[LeRobotEnv]:
        pytest.importorskip("metaworld")
        env = LeRobotEnv(type="metaworld", task="reach-v3")
        yield env
        env.close()

    def test_seeds_count(self, env: LeRobotEnv) -> None:
        def goal(seed: int) -> Any:
            env.reset(seed, keys=("state",))
            return env.simulator._env._target_pos.copy()

        assert (goal(FIRST) == goal(FIRST)).all()
        assert (goal(FIRST) != goal(FIRST + 1)).any()

    def test_an_episode_that_succeeds_is_not_followed_by_another_in_the_same_step(
        self, env: LeRobotEnv, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        env.reset(FIRST, keys=("state",))
        inner = env.simulator._env
        real = inner.step
        monkeypatch.setattr(inner, "step", lambda action: (*real(action)[:4], {"success": 1.0}))
        step = env.step(np.array([1, 0, 0, 0], np.float32), keys=("state",))
        assert step.success
        assert step.terminated
        assert (inner.data.mocap_pos[0] != inner.init_left_pad).any()
        assert inner.curr_path_length == 1  # a reset would have begun to count anew


class TestAloha:
    @pytest.fixture
    def env(self) -> Iterator[LeRobotEnv]:
        pytest.importorskip("gym_aloha")
        env = LeRobotEnv(type="aloha", task="AlohaTransferCube-v0")
        yield env
        env.close()

    def test_joints_may_leave_what_the_action_space_says(self, env: LeRobotEnv) -> None:
        """The pose it starts in is outside: clipped to -1..1 the arms could not even stay where they are."""
        at = env.reset(FIRST, keys=("state",))["state"]
        assert np.abs(at).max() > 1
        assert env.action.high is not None
        assert env.action.high > np.abs(at).max()
        env.step(at, keys=("state",))

    def test_seeds_count(self, env: LeRobotEnv) -> None:
        def box(seed: int) -> Any:
            env.reset(seed, keys=("state",))
            return env.simulator._env.physics.data.qpos[16:].copy()

        assert (box(FIRST) == box(FIRST)).all()
        assert (box(FIRST) != box(FIRST + 1)).any()


def test_demonstrations_show_what_the_env_shows() -> None:
    """To the order of the corners: a policy taught in another one would see a T that is not there."""
    from omni_loop_envs.lerobot.demos import corners

    env = LeRobotEnv(type="pusht", obs_type=STATE)
    for seed in (FIRST, FIRST + 1):
        seen = env.reset(seed)["environment_state"]
        block = env.simulator.block
        np.testing.assert_allclose(corners(np.array([[*block.position, block.angle]]))[0], seen, atol=1e-3)
