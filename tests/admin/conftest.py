"""A server with its admin port, over the real orchestrator and a small pipeline with frames."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace

import numpy as np
import pytest

from omni_loop import registry
from omni_loop.config import Deployment, Listen, RunnerConfig
from omni_loop.endpoints import AccessConfig, AdminEndpoint, Endpoints
from omni_loop.loop.pipeline import CLIENT, Edge, Pipeline, Plan, StageDef
from omni_loop.messages import PayloadKind
from omni_loop.serve.app import Server
from omni_loop.stage import CounterSpec, Outputs, Payload, StageItem, StateSpec
from omni_loop.testing.toy_core import SPEC as TOY_SPEC
from omni_loop.types import Array, Op, StageKind

SPEC = replace(TOY_SPEC, ops=(Op.INFER,))


class Act:
    """Constant chunks."""

    kind, revision = StageKind.ACT, "toy-1"

    def state_specs(self) -> Mapping[str, StateSpec]:
        return {"count": CounterSpec()}

    def run(self, items: Sequence[StageItem]) -> Sequence[Outputs | Exception]:
        actions = np.ones((SPEC.horizon, 2), np.float32)
        return [{"actions": Payload(PayloadKind.ACTIONS, {"actions": actions})} for _ in items]

    def warm_up(self) -> None:
        pass


class Frames(Act):
    """Frame i after step s is grey: 10 * (s + 1 + i)."""

    kind = StageKind.FRAMES

    def run(self, items: Sequence[StageItem]) -> Sequence[Outputs | Exception]:
        return [self._one(item) for item in items]

    def _one(self, item: StageItem) -> Outputs:
        greys = 10 * (item.step + 1 + np.arange(int(item.params["frames"])))
        frames = np.broadcast_to(greys[:, None, None, None], (len(greys), 8, 8, 3)).astype(np.uint8)
        return {"frames": Payload(PayloadKind.FRAMES, {"frames": frames})}


TOY = Pipeline(
    name="toy",
    spec=lambda: SPEC,
    stages=(StageDef("act", StageKind.ACT, "admin-act"), StageDef("frames", StageKind.FRAMES, "admin-frames")),
    edges=(
        Edge(CLIENT, "observation", "act", "observation", PayloadKind.OBSERVATION),
        Edge("act", "actions", "frames", "chunk", PayloadKind.ACTIONS, optional=True),
    ),
    plans={Op.INFER: Plan(("act",), ("frames",), chunk="act.actions", frames="frames.frames")},
)


def arrays(grey: int = 0) -> dict[str, Array]:
    return {"image": np.full((8, 8, 3), grey, np.uint8), "agent_pos": np.zeros((2, 2), np.float32)}


@dataclass
class Running:
    server: Server

    @property
    def url(self) -> str:
        (endpoint,) = self.server.endpoints
        assert endpoint.name == "admin"
        return f"http://{endpoint.address}"


Start = Callable[..., AbstractAsyncContextManager[Running]]


@pytest.fixture
def running() -> Start:
    @asynccontextmanager
    async def start(access: AccessConfig | None = None) -> AsyncIterator[Running]:
        deployment = Deployment(
            pipelines=("toy",),
            listen=Listen(port=0),
            runners=(RunnerConfig(name="main"),),
            endpoints=Endpoints(admin=AdminEndpoint(port=0)),
            access=access or AccessConfig(),
        )
        with (
            registry.registered(registry.PIPELINES, "toy", TOY),
            registry.registered(registry.STAGES, "admin-act", Act),
            registry.registered(registry.STAGES, "admin-frames", Frames),
        ):
            server = Server(deployment)
            try:
                await server.start()
                yield Running(server)
            finally:
                await server.stop(1.0)

    return start
