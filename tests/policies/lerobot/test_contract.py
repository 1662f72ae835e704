"""Every kind of LeRobot policy under the contract of policies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from omni_loop.messages import PayloadKind
from omni_loop.stage import Payload
from omni_loop.testing.policy_contract import PolicyContract
from omni_loop.testing.stage_driver import Driver
from omni_loop_policies.lerobot.stage import LeRobotStage

pytest.importorskip("lerobot")
pytestmark = pytest.mark.timeout(300)  # importing LeRobot takes a minute on a busy machine

SHAPES = {"state": (4,), "environment_state": (6,), "image": (64, 64, 3), "images.top": (32, 32, 3)}


def observation(case: int, *keys: str) -> dict[str, Payload]:
    rng, arrays = np.random.default_rng(case), {}
    for key in keys:
        shape = SHAPES[key]
        image = len(shape) == 3
        arrays[key] = rng.integers(0, 256, shape, np.uint8) if image else rng.normal(size=shape).astype(np.float32)
    return {"observation": Payload(PayloadKind.OBSERVATION, arrays)}


class LeRobotContract(PolicyContract):
    kind: ClassVar[str]
    keys: ClassVar[tuple[str, ...]] = ("state", "environment_state")
    changed: ClassVar[Mapping[str, Any]] = {}
    options: ClassVar[Mapping[str, Any]] = {}
    stage: ClassVar[LeRobotStage]
    action_dim = 3
    low, high = -np.inf, np.inf
    atol = 1e-5

    @pytest.fixture(autouse=True)
    def _folder(self, checkpoints: Callable[..., Path]) -> None:
        self.folder = checkpoints(self.kind, **self.changed)

    @pytest.fixture
    def driver(self) -> Iterator[Driver]:
        """All tests of a class share a stage: what one left in the object would show in the next."""
        cls = type(self)
        if "stage" not in vars(cls):
            cls.stage = self.make_stage()
        driver = Driver(cls.stage, max_sessions=12)
        self.open(driver, "s")
        yield driver
        driver.close()

    def make_stage(self) -> LeRobotStage:
        return LeRobotStage(str(self.folder), **self.options)

    def inputs(self, case: int) -> Mapping[str, Payload]:
        return observation(case, *self.keys)


class TestAct(LeRobotContract):
    kind, horizon, stochastic = "act", 6, False


class TestActEnsemble(LeRobotContract):
    kind, horizon, stochastic, history = "act", 6, False, True
    options: ClassVar[Mapping[str, Any]] = {"ensemble": True}


class TestDiffusionDdpm(LeRobotContract):
    kind, horizon, history = "ddpm", 7, True


class TestDiffusionDdim(LeRobotContract):
    kind, horizon, history = "ddim", 7, True


class TestVqBet(LeRobotContract):
    kind, horizon, history = "vqbet", 4, True
    keys = ("state", "image")


class TestTdMpc(LeRobotContract):
    kind, horizon, history = "tdmpc", 3, True
    keys = ("state", "image")


class TestTdMpcRepeats(LeRobotContract):
    kind, horizon, history = "tdmpc", 2, True
    keys = ("state", "image")
    changed: ClassVar[Mapping[str, Any]] = {"n_action_repeats": 2, "n_action_steps": 1}


class TestTdMpcPolicyAlone(LeRobotContract):
    kind, horizon, stochastic = "tdmpc", 1, False
    keys = ("state", "image")
    changed: ClassVar[Mapping[str, Any]] = {"use_mpc": False, "n_action_steps": 1}


class TestSmolVla(LeRobotContract):
    kind, horizon, prompt = "smolvla", 8, "push the T"
    keys = ("state", "images.top")


class TestSmolVlaRealTimeChunking(TestSmolVla):
    history = True
    options: ClassVar[Mapping[str, Any]] = {"rtc": True}


@pytest.mark.usefixtures("small_gemma")
class TestPi0(LeRobotContract):
    kind, horizon, prompt = "pi0", 8, "push the T"
    keys = ("state", "images.top")


class TestPi0RealTimeChunking(TestPi0):
    history = True
    options: ClassVar[Mapping[str, Any]] = {"rtc": True}


class TestPi05(TestPi0):
    kind = "pi05"


class TestMultiTaskDit(LeRobotContract):
    kind, horizon, history, prompt = "multi_task_dit", 7, True, "push the T"
    keys = ("state", "images.top")


class TestGaussianActor(LeRobotContract):
    kind, horizon = "gaussian_actor", 1
    keys = ("state",)
