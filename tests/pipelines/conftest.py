"""The shipped pipelines behind a real server: with the shipped checkpoints when all are there, else random ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import omni_loop_policies
import omni_loop_worlds
from omni_loop import registry
from omni_loop.client import Client, connect
from omni_loop.config import Deployment, RunnerConfig
from omni_loop.serve.background import BackgroundServer

READY_S = 280.0  # also on a machine that is busy with something else
PARTS = {"codec": omni_loop_worlds, "world": omni_loop_worlds, "context": omni_loop_worlds, "act": omni_loop_policies}


def shipped() -> bool:
    folders = {name: Path(package.__file__ or "").parent / "checkpoints" / name for name, package in PARTS.items()}
    return all((folder / "model.safetensors").exists() for folder in folders.values())


@pytest.fixture
def trained() -> None:
    """For what only trained weights can do."""
    if not shipped():
        pytest.skip("no checkpoints are shipped yet")


@pytest.fixture(scope="session")
def deployment(small_checkpoints: Path) -> Deployment:
    options: dict[str, Any] = {"choose": {"margin": 0.0}}  # so that a few ticks show a choice
    if not shipped():
        stages = ("context", "frames", "decode", "act", "choose")
        options = {stage: {**options.get(stage, {}), "checkpoints": str(small_checkpoints)} for stage in stages}
    return Deployment(pipelines=("pusht", "pusht-world", "pusht-imagine", "pusht-plan"), stage_options=options)


@pytest.fixture(scope="session")
def address(deployment: Deployment) -> Iterator[str]:
    with BackgroundServer(deployment, READY_S) as server:
        yield server.address


@pytest.fixture(scope="session")
def spawned_address(deployment: Deployment) -> Iterator[str]:
    """The same deployment with its runner in a process of its own."""
    runner = RunnerConfig(name="apart", placement="process")
    with BackgroundServer(deployment.model_copy(update={"runners": (runner,)}), READY_S) as server:
        yield server.address


@pytest.fixture
def client(address: str) -> Iterator[Client]:
    with connect(address, timeout_s=60) as client:
        yield client


@pytest.fixture(scope="session")
def episode() -> list[dict[str, Any]]:
    """Observations of 33 steps of one PushT episode under a slow circle; ``action`` leads to the next one."""
    env = registry.build(registry.ENVS, "pusht", {})
    seen = [dict(env.reset(7))]
    for step in range(32):
        turn = np.array([np.cos(step / 8), np.sin(step / 8)])
        seen[-1]["action"] = (256 + 120 * turn).astype(np.float32)
        seen.append(dict(env.step(seen[-1]["action"]).arrays))
    env.close()
    return seen
