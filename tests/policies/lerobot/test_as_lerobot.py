"""What the stage answers one session is what LeRobot's own loop of ``select_action`` does with the same policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from omni_loop.action_queue import FROZEN, JOINED, JOINS
from omni_loop.connect.base import as_numpy
from omni_loop.messages import PayloadKind
from omni_loop.stage import Payload
from omni_loop.testing.stage_driver import Ask, Driver
from omni_loop_policies.lerobot.noise import generators, normal
from omni_loop_policies.lerobot.stage import LeRobotStage
from omni_loop_policies.lerobot.template import lerobot

pytest.importorskip("lerobot")
pytestmark = pytest.mark.timeout(300)
Checkpoints = Callable[..., Path]
Arrays = Mapping[str, NDArray[Any]]
STEPS = 11
FEATURES = {"state": (4,), "environment_state": (6,), "image": (64, 64, 3), "images.top": (32, 32, 3)}


def episode(*keys: str) -> list[Arrays]:
    rng = np.random.default_rng(11)
    made = []
    for _ in range(STEPS):
        arrays: dict[str, NDArray[Any]] = {}
        for key in keys:
            image = len(FEATURES[key]) == 3
            drawn = rng.integers(0, 256, FEATURES[key]) if image else rng.normal(size=FEATURES[key])
            arrays[key] = drawn.astype(np.uint8 if image else np.float32)
        made.append(arrays)
    return made


def ask(arrays: Arrays, step: int, **params: int) -> Ask:
    return Ask({"observation": Payload(PayloadKind.OBSERVATION, dict(arrays))}, step=step, params=params)


class Theirs:
    """LeRobot's policy with its processors, loaded as its documentation says, with queues of its own."""

    def __init__(self, folder: Path) -> None:
        from lerobot.configs import PreTrainedConfig
        from lerobot.policies import get_policy_class, make_pre_post_processors

        config = PreTrainedConfig.from_pretrained(folder)
        self.policy: Any = get_policy_class(config.type).from_pretrained(folder, config=config)
        self._pre, self._post = make_pre_post_processors(self.policy.config, pretrained_path=str(folder))
        self.policy.reset()

    def batch(self, arrays: Arrays, prompt: str = "") -> dict[str, Any]:
        from lerobot.policies import prepare_observation_for_inference

        named = {f"observation.{key}": np.array(array) for key, array in arrays.items()}
        batch: dict[str, Any] = self._pre(prepare_observation_for_inference(named, torch.device("cpu"), prompt))
        return batch

    def action(self, arrays: Arrays, seed: int) -> NDArray[np.float32]:
        torch.manual_seed(seed)
        return self.post(self.policy.select_action(self.batch(arrays)))[0]

    def post(self, actions: torch.Tensor) -> NDArray[np.float32]:
        done: NDArray[np.float32] = self._post(actions).numpy()
        return done


class Ours:
    """The stage a pipeline of the checkpoint names, with one session."""

    def __init__(self, folder: Path, **options: Any) -> None:
        (stage,) = lerobot("served", str(folder), **options).stages
        self.driver = Driver(LeRobotStage(**stage.options))  # type: ignore[arg-type]
        self.driver.open("s", 7)
        self.tick = 0

    def seed(self) -> int:
        """Of the noise of the next tick."""
        (item,) = self.driver.items(self.tick, {"s": Ask({})}).values()
        self.driver.discard("s", self.tick)
        return item.noise_seed("act")

    def raw(self) -> torch.Tensor:
        """The chunk before, in the model's space."""
        (item,) = self.driver.items(self.tick, {"s": Ask({})}).values()
        raw: torch.Tensor = item.state.tensor("raw").get().clone()
        self.driver.discard("s", self.tick)
        return raw

    def chunk(self, arrays: Arrays, step: int, **params: int) -> NDArray[np.float32]:
        outputs = self.driver.tick("s", self.tick, ask(arrays, step, **params))
        self.tick += 1
        return np.array(as_numpy(outputs["chunk"].arrays["actions"]))


@pytest.mark.parametrize(
    ("kind", "keys", "every", "replan"),
    [
        ("act", ("state", "environment_state"), 4, 4),
        ("ddim", ("state", "environment_state"), 1, 4),
        ("ddpm", ("state", "environment_state"), 1, 4),
        ("multi_task_dit", ("state", "images.top"), 1, 4),
        ("vqbet", ("state", "image"), 1, 4),
        ("tdmpc", ("state", "image"), 2, 2),
    ],
)
def test_a_session_acts_as_select_action_does(
    checkpoints: Checkpoints, kind: str, keys: Sequence[str], every: int, replan: int
) -> None:
    """``every`` so many steps an observation is sent; every ``replan`` steps LeRobot's queue of actions is empty."""
    ours, theirs = Ours(checkpoints(kind)), Theirs(checkpoints(kind))
    given: list[NDArray[np.float32]] = []
    for step, arrays in enumerate(episode(*keys)):
        seed = ours.seed() if step % every == 0 else 0
        sent = ours.chunk(arrays, step) if step % every == 0 else None
        if step % replan == 0:
            assert sent is not None
            given = list(sent)
        assert np.abs(given[step % replan] - theirs.action(arrays, seed)).max() <= 1e-5
    ours.driver.close()


def test_diffusion_starts_from_the_sessions_noise(checkpoints: Checkpoints) -> None:
    ours, theirs, arrays = Ours(checkpoints("ddim")), Theirs(checkpoints("ddim")), episode(*list(FEATURES)[:2])[0]
    noise = normal(generators([ours.seed()]), (8, 3), "cpu")
    want = theirs.post(theirs.policy.select_action(theirs.batch(arrays), noise=noise))[0]
    assert np.abs(ours.chunk(arrays, 0)[0] - want).max() <= 1e-5
    ours.driver.close()


def test_an_ensemble_acts_as_lerobots_does(checkpoints: Checkpoints) -> None:
    folder = checkpoints("act", temporal_ensemble_coeff=0.3, n_action_steps=1)
    ours, theirs = Ours(folder), Theirs(folder)
    plain = Ours(checkpoints("act"))
    differs = False
    for step, arrays in enumerate(episode("state", "environment_state")):
        chunk, alone = ours.chunk(arrays, step), plain.chunk(arrays, step)
        assert np.abs(chunk[0] - theirs.action(arrays, 0)).max() <= 1e-5
        if step < 6:  # it averages as many as it has until the oldest ends
            differs = differs or np.abs(chunk[0] - alone[0]).max() > 1e-3
        assert np.abs(chunk[-1] - alone[-1]).max() <= 1e-6  # which nobody else foresaw
    assert differs
    ours.driver.close()
    plain.driver.close()


@pytest.mark.parametrize("kind", ["smolvla", "pi0"])
def test_real_time_chunking_continues_the_last_chunk_as_lerobot_does(
    checkpoints: Checkpoints, small_gemma: None, kind: str
) -> None:
    from lerobot.policies.rtc.configuration_rtc import RTCConfig

    folder = checkpoints(kind)
    ours, plain, theirs = Ours(folder, rtc=True, inference_delay=2), Ours(folder), Theirs(folder)
    theirs.policy.config.rtc_config = RTCConfig()
    theirs.policy.init_rtc_processor()
    left_over, far = None, {"ours": 0.0, "plain": 0.0}
    for i, arrays in enumerate(episode("state", "images.top")[:3]):
        noise, delay = normal(generators([ours.seed()]), (8, 8), "cpu"), 2 if i < 2 else 1
        batch = theirs.batch(arrays)
        raw = theirs.policy.predict_action_chunk(
            batch, noise=noise, inference_delay=delay, prev_chunk_left_over=left_over
        )
        chunk, alone = ours.chunk(arrays, 4 * i, inference_delay=delay), plain.chunk(arrays, 4 * i)
        assert np.abs(chunk - theirs.post(raw)[0]).max() <= 1e-4
        if left_over is None:
            assert (chunk == alone).all()
        else:
            want = theirs.post(left_over)[0][:2]
            far["ours"] += float(np.abs(chunk[:2] - want).sum())
            far["plain"] += float(np.abs(alone[:2] - want).sum())
        left_over = raw[:, 4:]
    assert far["ours"] < far["plain"]
    ours.driver.close()
    plain.driver.close()


@pytest.mark.parametrize("kind", ["smolvla", "pi0", "pi05"])
def test_a_tick_that_asks_for_it_joins_the_last_chunk(checkpoints: Checkpoints, small_gemma: None, kind: str) -> None:
    """Guided as LeRobot guides, and frozen rows are the very same; a tick that does not ask is as if it could not."""
    from lerobot.policies.rtc.configuration_rtc import RTCConfig

    folder = checkpoints(kind)
    ours, plain, theirs = Ours(folder), Ours(folder, ensemble=True), Theirs(folder)
    theirs.policy.config.rtc_config = RTCConfig()
    theirs.policy.init_rtc_processor()
    scenes = episode("state", "images.top")[:3]
    assert (ours.chunk(scenes[0], 0) == plain.chunk(scenes[0], 0)).all()
    before = ours.raw()
    noise = normal(generators([ours.seed()]), (8, 8), "cpu")
    raw = theirs.policy.predict_action_chunk(
        theirs.batch(scenes[1]), noise=noise, inference_delay=2, prev_chunk_left_over=before[None, 3:]
    )
    raw[:, :2] = before[3:5]
    guided = ours.chunk(scenes[1], 3, **{FROZEN: 2, JOINS: 0})
    assert np.abs(guided - theirs.post(raw)[0]).max() <= 1e-4
    assert torch.equal(ours.raw()[:2], before[3:5])
    noise = normal(generators([ours.seed()]), (8, 8), "cpu")
    afresh = theirs.policy.predict_action_chunk(theirs.batch(scenes[2]), noise=noise)
    assert np.abs(ours.chunk(scenes[2], 5) - theirs.post(afresh)[0]).max() <= 1e-4
    ours.driver.close()
    plain.driver.close()


def test_guided_sessions_and_others_meet_in_a_batch(checkpoints: Checkpoints) -> None:
    driver, scenes, asks = Driver(LeRobotStage(str(checkpoints("smolvla")))), episode("state", "images.top"), {}
    for n in range(6):
        driver.open(f"s{n}", n, "push")
        driver.tick(f"s{n}", 0, ask(scenes[n], 0))
        asks[f"s{n}"] = ask(scenes[n + 1], 2, **({FROZEN: n % 3, JOINS: 0} if n % 2 else {}))
    together = dict(zip(asks, driver.batch(1, asks), strict=True))
    for name, asked in asks.items():
        (one,), met = driver.batch(1, {name: asked}), together[name]
        assert not isinstance(one, Exception)
        assert not isinstance(met, Exception)
        got, want = (as_numpy(outputs["chunk"].arrays["actions"]) for outputs in (met, one))
        assert np.abs(got - want).max() <= 1e-5
        assert (JOINED in met["chunk"].meta) == (FROZEN in asked.params)
    driver.close()


def test_relative_actions_are_added_to_each_sessions_own_state(checkpoints: Checkpoints, small_gemma: None) -> None:
    """pi0 may give actions relative to the state that the preprocessor saw last: in a batch, each to its own."""
    folder = checkpoints("pi0", use_relative_actions=True)
    driver, theirs, scenes = Driver(LeRobotStage(str(folder))), Theirs(folder), episode("state", "images.top")[:3]
    asks = {f"s{n}": ask(scene, 0) for n, scene in enumerate(scenes)}
    for n, name in enumerate(asks):
        driver.open(name, n)
    noise = [normal(generators([item.noise_seed("act")]), (8, 8), "cpu") for item in driver.items(0, asks).values()]
    for name in asks:
        driver.discard(name, 0)
    for scene, drawn, made in zip(scenes, noise, driver.batch(0, asks), strict=True):
        assert not isinstance(made, Exception)
        want = theirs.post(theirs.policy.predict_action_chunk(theirs.batch(scene), noise=drawn))[0]
        assert np.abs(as_numpy(made["chunk"].arrays["actions"]) - want).max() <= 1e-5
    driver.close()


def test_sessions_of_different_delays_meet_in_a_batch(checkpoints: Checkpoints) -> None:
    driver = Driver(LeRobotStage(str(checkpoints("smolvla")), rtc=True))
    scenes = episode("state", "images.top")
    asks = {}
    for n in range(6):
        driver.open(f"s{n}", n, "push")
        if n < 5:  # the last begins only now
            driver.tick(f"s{n}", 0, ask(scenes[n], 0))
        asks[f"s{n}"] = ask(scenes[n + 1], 2 + n // 4, inference_delay=n % 2)
    alone = {name: driver.batch(1, {name: asked})[0] for name, asked in asks.items()}
    together = dict(zip(asks, driver.batch(1, asks), strict=True))
    for name in asks:
        one, met = alone[name], together[name]
        assert not isinstance(one, Exception)
        assert not isinstance(met, Exception)
        got, want = (as_numpy(outputs["chunk"].arrays["actions"]) for outputs in (met, one))
        assert np.abs(got - want).max() <= 1e-5
    driver.close()
