"""Tiny pipelines, saved once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from numpy.typing import NDArray

from omni_loop.stage import Stage
from omni_loop.testing.stage_driver import Driver

from . import tiny

T = TypeVar("T")


class Lazy(dict[str, T]):
    """Made when first asked for."""

    def __init__(self, make: Callable[[str], T]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, name: str) -> T:
        made = self[name] = self._make(name)
        return made


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("diffusers")

    def make(name: str) -> Path:
        if name == "action":
            return tiny.cosmos25(root / name, tiny.action_transformer())
        build: Callable[[Path], Path] = getattr(tiny, "wan" if name == "wan22" else name)
        return build(root / name)

    return Lazy(make)


@pytest.fixture(scope="session")
def stages(folders: dict[str, Path]) -> dict[str, Stage]:
    """Stages hold no session, so that tests share them. Those called quick are not guided: half of
    the passes; those called half are of half precision."""

    def make(name: str) -> Stage:
        from omni_loop_worlds.diffusers.cosmos import CosmosStage
        from omni_loop_worlds.diffusers.wan import WanStage

        folder, _, how = name.partition("-")
        more: dict[str, Any] = {"quick": {"guidance": 1.0}, "half": {"dtype": "bfloat16"}}.get(how, {})
        path = str(folders[folder])
        if folder == "action":
            return CosmosStage(path, frames=25, context=1, **{**tiny.COSMOS, **more})
        if folder.startswith("cosmos"):
            return CosmosStage(path, frames=13, action_dim=2, **{**tiny.COSMOS, **more})
        return WanStage(path, frames=9, action_dim=2, **{**tiny.WAN, **more})

    return Lazy(make)


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
