"""The stages under the contract of world models."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from omni_loop.stage import Stage
from omni_loop.testing.world_contract import WorldContract

from . import tiny

pytest.importorskip("transformers")
pytest.importorskip("torchvision")


class _Contract(WorldContract):
    name = ""
    output = "frames"
    low, high = -1.0, 1.0
    atol = 1.0  # steps of a pixel
    rollout_frames = 24

    @pytest.fixture(autouse=True)
    def _stage(self, stages: dict[str, Stage]) -> None:
        self.stage = stages[self.name]

    def make_stage(self) -> Stage:
        return self.stage

    def images(self, n: int) -> NDArray[np.uint8]:
        return tiny.images(n)


class TestCosmos25(_Contract):
    name, steers, max_predict = "cosmos25-quick", False, 8


class TestCosmosUnderActions(_Contract):
    name, max_predict = "action-quick", 24
    stride, together, remembers = 4, True, False

    @property
    def action_dim(self) -> int:
        return 3


class TestWan(_Contract):
    name, steers, max_predict, remembers = "wan22-quick", False, 8, False
    watched = 8
