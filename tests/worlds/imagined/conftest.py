"""Small random weights of the world model behind a real server: what is imagined means nothing, how is what counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from omni_loop.config import Deployment
from omni_loop.serve.background import BackgroundServer
from omni_loop_worlds.imagined import ImaginedEnv, ServedWorld, Start

READY_S = 280.0


@pytest.fixture(scope="session")
def world_address(small_checkpoints: Path) -> Iterator[str]:
    options = {stage: {"checkpoints": str(small_checkpoints)} for stage in ("frames", "decode", "context", "act")}
    with BackgroundServer(Deployment(pipelines=("pusht", "pusht-world"), stage_options=options), READY_S) as server:
        yield server.address


@pytest.fixture
def world(world_address: str) -> Iterator[ServedWorld]:
    """Kept, so that its connection lasts for the test; all that the test opened must be closed when it ends."""
    served = ServedWorld(world_address, "pusht-world").hold()
    yield served
    assert served._connected().sessions().counts.get("pusht-world", 0) == 0
    served.release()


def begin(seed: int) -> Start:
    """Three real frames of noise and the actions between them."""
    rng = np.random.default_rng(seed)
    executed = rng.uniform(0, 512, (2, 2)).astype(np.float32)
    return Start({"image": rng.integers(0, 256, (3, 96, 96, 3), np.uint8)}, executed)


def moves(n: int, *shape: int, seed: int = 0) -> NDArray[np.float32]:
    """``float32[n, *shape, 2]``."""
    return np.random.default_rng(seed).uniform(0, 512, (n, *shape, 2)).astype(np.float32)


@pytest.fixture
def make(world: ServedWorld) -> Iterator[Callable[..., ImaginedEnv]]:
    """Makes envs that are closed after the test."""
    made: list[ImaginedEnv] = []

    def one(**options: object) -> ImaginedEnv:
        made.append(ImaginedEnv(world, begin, **options))  # type: ignore[arg-type]
        return made[-1]

    yield one
    for env in made:
        env.close()
