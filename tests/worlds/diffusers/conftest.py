"""Tiny pipelines, saved once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from omni_loop.stage import Stage
from omni_loop.testing.stage_driver import Driver

from . import tiny


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("diffusers")
    made = {name: root / name for name in ("cosmos2", "cosmos25", "action", "wan21", "wan22", "wan5b")}
    tiny.cosmos2(made["cosmos2"])
    tiny.cosmos25(made["cosmos25"])
    tiny.cosmos25(made["action"], tiny.action_transformer())
    tiny.wan(made["wan22"])
    tiny.wan21(made["wan21"])
    tiny.wan5b(made["wan5b"])
    return made


@pytest.fixture(scope="session")
def stages(folders: dict[str, Path]) -> dict[str, Stage]:
    """Stages hold no session, so that tests share them."""
    from omni_loop_worlds.diffusers.cosmos import CosmosStage
    from omni_loop_worlds.diffusers.wan import WanStage

    two = {"action_dim": 2}
    return {
        "cosmos2": CosmosStage(str(folders["cosmos2"]), frames=13, **two, **tiny.COSMOS),
        "cosmos25": CosmosStage(str(folders["cosmos25"]), frames=13, **two, **tiny.COSMOS),
        "action": CosmosStage(str(folders["action"]), frames=25, context=1, **tiny.COSMOS),
        **{name: WanStage(str(folders[name]), frames=9, **two, **tiny.WAN) for name in ("wan21", "wan22", "wan5b")},
    }


@pytest.fixture
def images() -> NDArray[np.uint8]:
    return tiny.images(12)


@pytest.fixture
def driver(stages: dict[str, Stage], request: pytest.FixtureRequest) -> Iterator[Driver]:
    """Of the stage that the test is parametrised with."""
    driver = Driver(stages[request.param])
    driver.open("s", seed=5, prompt="a cat")
    yield driver
    driver.close()
