"""The act stage under the contract of policies, and its ablations."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from omni_loop import registry
from omni_loop.errors import ConfigError
from omni_loop.messages import PayloadKind
from omni_loop.stage import Payload
from omni_loop.testing.policy_contract import PolicyContract
from omni_loop.testing.stage_driver import Ask, Driver
from omni_loop_policies.stages import ActStage, act

Inputs = Mapping[str, Payload]


def inputs(case: int, history: float = 1.0) -> dict[str, Payload]:
    rng = np.random.default_rng(case)
    points, before = rng.uniform(-1, 1, (9, 2)), rng.uniform(-1, 1, 2)
    scene = {"points": points.astype(np.float32), "agent_before": before.astype(np.float32)}
    kv = rng.normal(size=(2, 2, 32, 2, 16)).astype(np.float32)
    return {
        "scene": Payload(PayloadKind.SCENE, scene, {"history": history}),
        "kv": Payload(PayloadKind.KV, {"kv": kv}),
    }


def with_array(given: Inputs, payload: str, array: str, value: Any) -> dict[str, Payload]:
    old = given[payload]
    return {**given, payload: Payload(old.kind, {**old.arrays, array: value}, old.meta)}


class TestActStage(PolicyContract):
    options: ClassVar[Mapping[str, bool]] = {}

    @pytest.fixture(autouse=True)
    def _folder(self, small_checkpoints: Path) -> None:
        self.folder = str(small_checkpoints)

    def make_stage(self) -> ActStage:
        return act(checkpoints=self.folder, **self.options)

    def inputs(self, case: int) -> Inputs:
        return inputs(case)

    def given(self, driver: Driver, asked: Inputs) -> Any:
        return self.chunk(driver.tick("s", 0, Ask(asked)))

    def test_it_reads_context_and_history(self, driver: Driver) -> None:
        want, asked = self.act(driver), inputs(0)
        assert (self.given(driver, with_array(asked, "kv", "kv", inputs(1)["kv"].arrays["kv"])) != want).any()
        moved = with_array(asked, "scene", "agent_before", np.zeros(2, np.float32))
        assert (self.given(driver, moved) != want).any()
        assert (self.given(driver, inputs(0, history=0.0)) != want).any()

    def test_without_history_the_position_before_does_not_count(self, driver: Driver) -> None:
        asked = inputs(0, history=0.0)
        moved = with_array(asked, "scene", "agent_before", np.zeros(2, np.float32))
        assert (self.given(driver, asked) == self.given(driver, moved)).all()

    def test_actions_beyond_the_table_are_clipped(self, driver: Driver) -> None:
        points = np.full((9, 2), 40, np.float32)
        chunk = self.given(driver, with_array(inputs(0), "scene", "points", points))
        assert ((chunk == 0) | (chunk == 512)).mean() > 0.5


class TestWithoutContext(TestActStage):
    options: ClassVar[Mapping[str, bool]] = {"use_context": False}

    def test_it_reads_context_and_history(self, driver: Driver) -> None:
        want, asked = self.act(driver), inputs(0)
        assert (self.given(driver, with_array(asked, "kv", "kv", inputs(1)["kv"].arrays["kv"])) == want).all()
        assert (self.given(driver, inputs(0, history=0.0)) != want).any()


class TestWithoutHistory(TestActStage):
    options: ClassVar[Mapping[str, bool]] = {"use_history": False}

    def test_it_reads_context_and_history(self, driver: Driver) -> None:
        want, asked = self.act(driver), inputs(0)
        assert (self.given(driver, with_array(asked, "kv", "kv", inputs(1)["kv"].arrays["kv"])) != want).any()
        assert (self.given(driver, inputs(0, history=0.0)) == want).all()
        moved = with_array(asked, "scene", "agent_before", np.zeros(2, np.float32))
        assert (self.given(driver, moved) == want).all()


def test_an_unknown_option_is_named() -> None:
    with pytest.raises(ConfigError, match="use_context"):
        registry.build(registry.STAGES, "act", {"use_contxt": True})
