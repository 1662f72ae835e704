"""A server whose chunks are ramps, on a free loopback port in the test's own event loop."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from omni_loop.config import Deployment, Listen
from omni_loop.errors import StageFailed
from omni_loop.loop.request import TickRequest
from omni_loop.serve.app import Server
from omni_loop.testing.toy_core import SPEC, ToyCore
from omni_loop.types import ActionChunk, ArraySpec, TickResult

HORIZON = 16
RAMP = replace(
    SPEC, action=ArraySpec("action", "float32", (2,), low=0, high=10_000), horizon=HORIZON, execution_horizon=8
)


class RampCore(ToyCore):
    """Row i of a chunk: [step + i, epoch]. ``refuse`` so many observations."""

    def __init__(self) -> None:
        super().__init__(RAMP)
        self.refuse = 0

    def _answer(self, live: Any, request: TickRequest) -> TickResult:
        if self.refuse:
            self.refuse -= 1
            raise StageFailed("stage 'act' failed")
        epoch = live.info.epoch
        rows = np.arange(request.step, request.step + HORIZON, dtype=np.float32)
        actions = np.stack([rows, np.full_like(rows, epoch)], 1)
        return TickResult(request.seq, epoch, ActionChunk(request.seq, request.step, actions, epoch))


@pytest.fixture
def core() -> RampCore:
    return RampCore()


@pytest.fixture
async def server(core: RampCore) -> AsyncIterator[Server]:
    async def start(_: Deployment) -> ToyCore:
        return core

    server = Server(Deployment(pipelines=("toy",), listen=Listen(port=0)), start)  # type: ignore[arg-type]
    await server.start()
    yield server
    core.gate.set()
    await server.stop(1.0)
