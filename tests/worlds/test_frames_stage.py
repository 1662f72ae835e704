"""The shipped world stage under the contract of world models, on small random weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from omni_loop.stage import Stage
from omni_loop.testing.world_contract import WorldContract
from omni_loop_worlds.stages import frames


class TestFramesStage(WorldContract):
    @pytest.fixture(autouse=True)
    def _folder(self, small_checkpoints: Path) -> None:
        self.folder = str(small_checkpoints)

    def make_stage(self) -> Stage:
        return frames(checkpoints=self.folder)

    def images(self, n: int) -> NDArray[np.uint8]:
        rng = np.random.default_rng(0)
        return rng.integers(0, 256, (64, 6, 6, 3), np.uint8)[:n].repeat(16, 1).repeat(16, 2)
