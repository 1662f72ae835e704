"""A small pipeline of real numpy stages whose behaviour tests can script: fail, block, give bad outputs.

Every stage counts its ticks in committed state, and the count travels in its outputs: a tick that left a trace
although it failed is seen in the next one. Feedback carries a running sum of predicted steps.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from omni_loop.clock import Clock
from omni_loop.config import SessionConfig
from omni_loop.connect.base import Connector
from omni_loop.connect.schema import ArrayType, Schema
from omni_loop.loop.graph import compile_pipeline
from omni_loop.loop.orchestrator import Orchestrator
from omni_loop.loop.pipeline import CLIENT, Edge, Pipeline, Plan, StageDef
from omni_loop.loop.pool import Pool
from omni_loop.loop.request import SessionInfo, TickRequest
from omni_loop.loop.tap import Tap
from omni_loop.messages import PayloadKind
from omni_loop.runner.local import LocalRunner
from omni_loop.runner.runner import RunnerSettings
from omni_loop.session.snapshot import SnapshotStore
from omni_loop.stage import CounterSpec, Outputs, Payload, StageItem, StateSpec
from omni_loop.types import ArraySpec, Op, SessionSpec, StageKind, TickResult

HORIZON, DIM = 4, 2
SUM = Schema("sum", (ArrayType("sum", "int64", ()),))  # a kind of this pipeline's own


@dataclass
class Script:
    """What the stages do. ``before`` runs in the runner's thread with the item; it may raise or block."""

    before: dict[str, Callable[[StageItem], None]] = field(default_factory=dict)
    change: dict[str, Callable[[dict[str, Payload]], Outputs]] = field(default_factory=dict)
    runs: list[tuple[str, str, int]] = field(default_factory=list)  # stage, session, tick

    def count(self, stage: str) -> int:
        return sum(name == stage for name, _, _ in self.runs)


@dataclass
class ToyStage:
    name: str
    kind: StageKind
    script: Script
    model: Callable[[StageItem, int], dict[str, Payload]]
    revision: str = "toy-1"

    specs: Mapping[str, StateSpec] = field(default_factory=dict)

    def state_specs(self) -> Mapping[str, StateSpec]:
        return {"count": CounterSpec(), **self.specs}

    def run(self, items: Sequence[StageItem]) -> Sequence[Outputs | Exception]:
        return [self._one(item) for item in items]

    def _one(self, item: StageItem) -> Outputs:
        count = item.state.counter("count")
        count.set(count.get() + 1)  # staged before anything can fail
        self.script.runs.append((self.name, item.session, item.tick))
        if self.name in self.script.before:
            self.script.before[self.name](item)
        outputs = self.model(item, count.get())
        return self.script.change[self.name](outputs) if self.name in self.script.change else outputs

    def warm_up(self) -> None:
        pass


def _context(item: StageItem, count: int) -> dict[str, Payload]:
    observation = item.inputs["observation"].arrays
    executed = np.asarray(observation["executed"], np.float32)
    mark = float(np.asarray(observation["mark"]).reshape(-1)[-1])
    hidden = np.array([mark, count, len(executed), executed.sum(), item.params["state_given"]], np.float32)
    return {
        "hidden": Payload(PayloadKind.HIDDEN, {"hidden": hidden}),
        "progress": Payload(PayloadKind.PROGRESS, {"progress": np.float32(0.25), "done": np.float32(0.5)}),
    }


def _act(item: StageItem, count: int) -> dict[str, Payload]:
    """Row 0: mark and ticks of context; row 1: rows and sum of executed; row 2: ticks of act, state given."""
    mark, ticks, rows, total, given = item.inputs["hidden"].arrays["hidden"]
    actions = np.array([[mark, ticks], [rows, total], [count, given], [item.step, item.seed % 100]], np.float32)
    return {"actions": Payload(PayloadKind.ACTIONS, {"actions": actions}, {"revision": "toy-1"})}


def _frames(item: StageItem, count: int) -> dict[str, Payload]:
    """Pixels: ticks of frames; sum of steps predicted in the ticks before, as feedback; sum of the actions."""
    n = int(item.params["frames"])
    before = int(np.asarray(item.inputs["latents"].arrays["sum"])) if "latents" in item.inputs else 0
    actions = item.inputs["actions"].arrays["actions"].sum() if "actions" in item.inputs else 0
    frames = np.zeros((n, 4, 4, 3), np.uint8)
    frames[..., 0], frames[..., 1], frames[..., 2] = count, before, int(actions)
    latents = Payload(SUM.kind, {"sum": np.array(before + n, np.int64)})
    return {"frames": Payload(PayloadKind.FRAMES, {"frames": frames}), "latents": latents}


MODELS = {
    "context": (StageKind.CONTEXT, _context),
    "act": (StageKind.ACT, _act),
    "frames": (StageKind.FRAMES, _frames),
}

SPECS: dict[str, Mapping[str, StateSpec]] = {}  # state of a stage besides its count

SPEC = SessionSpec(
    pipeline="toy",
    observations=(ArraySpec("mark", "float32", (1,)), ArraySpec("extra", "float32", (1,), optional=True)),
    action=ArraySpec("action", "float32", (DIM,), low=-1000, high=1000),
    horizon=HORIZON,
    execution_horizon=2,
    control_hz=10,
    ops=(Op.INFER, Op.PREDICT, Op.RECONDITION),
    frame=ArraySpec("frame", "uint8", (4, 4, 3)),
    max_predict=8,
    prompt=True,
)

TOY = Pipeline(
    name="toy",
    spec=lambda: SPEC,
    stages=tuple(StageDef(name, kind, name) for name, (kind, _) in MODELS.items()),
    edges=(
        Edge(CLIENT, "observation", "context", "observation", PayloadKind.OBSERVATION),
        Edge(CLIENT, "actions", "frames", "actions", PayloadKind.ACTIONS, optional=True),
        Edge("context", "hidden", "act", "hidden", PayloadKind.HIDDEN),
        Edge("context", "hidden", "frames", "hidden", PayloadKind.HIDDEN, optional=True),
        Edge("frames", "latents", "frames", "latents", SUM.kind, feedback=True, optional=True, schema=SUM),
    ),
    plans={
        Op.INFER: Plan(
            ("context", "act"), ("frames",), chunk="act.actions", frames="frames.frames", progress="context.progress"
        ),
        Op.PREDICT: Plan(("frames",), frames="frames.frames"),
        Op.RECONDITION: Plan(("context",), progress="context.progress"),
    },
    options={"scale": 1.0, "mode": "plain"},
)


@dataclass
class Toy:
    """A running toy server core."""

    core: Orchestrator
    script: Script
    runners: list[LocalRunner]

    def payloads(self) -> int:
        return sum(r.connector.health().payloads for r in self.runners)


@asynccontextmanager
async def toy(
    pipeline: Pipeline = TOY,
    placement: Sequence[Sequence[str]] = (("context", "act", "frames"),),
    connectors: Sequence[Connector | None] = (None, None, None),
    clock: Clock | None = None,
    max_sessions: int = 64,
    config: SessionConfig | None = None,
    settings: RunnerSettings | None = None,
    store: SnapshotStore | None = None,
    tap: Tap | None = None,
) -> AsyncIterator[Toy]:
    """An orchestrator over ``pipeline`` with one thread runner per group of ``placement``. At the end nothing is
    left: the runners check their books when they stop, and the connectors must hold no payload."""
    script = Script()
    runners = []
    for number, (names, connector) in enumerate(zip(placement, connectors, strict=False)):
        entries = [(f"{pipeline.name}/{name}", _factory(name, script), {}) for name in names]
        runners.append(LocalRunner(f"r{number}", entries, settings, connector))
    for runner in runners:
        await runner.start()
    pool = Pool([compile_pipeline(pipeline)], runners)
    core = Orchestrator(pool, config or SessionConfig(), max_sessions, clock, store, tap)
    setup = Toy(core, script, runners)
    try:
        yield setup
        if core.ready:
            await _close_all(setup)
    finally:
        await core.stop(grace_s=0.0)
    assert not core._live
    assert not core._tasks


async def _close_all(setup: Toy) -> None:
    core = setup.core
    await core._tasks.wait()
    fed = sum(len(live.session.feedback) for live in core._live.values())
    assert setup.payloads() == fed, "a tick leaked payloads"
    for live in list(core._live.values()):
        await core.close(live.session.id, live.session.token)
    assert setup.payloads() == 0, "a session leaked payloads"


def _factory(name: str, script: Script) -> Callable[..., ToyStage]:
    kind, model = MODELS[name]
    return lambda **options: ToyStage(name, kind, script, model, specs=SPECS.get(name, {}))


def infer(info: SessionInfo, seq: int, step: int = 0, mark: float = 7.0, **kwargs: Any) -> TickRequest:
    arrays = {name: np.array([mark], np.float32) for name in info.observation_keys}
    return TickRequest(info.id, info.token, seq, Op.INFER, step, arrays, **kwargs)


def predict(info: SessionInfo, seq: int, steps: int = 0, **kwargs: Any) -> TickRequest:
    return TickRequest(info.id, info.token, seq, Op.PREDICT, steps=steps, **kwargs)


def recondition(info: SessionInfo, seq: int, first: int, n: int, rows: int, **kwargs: Any) -> TickRequest:
    arrays = {name: np.arange(n, dtype=np.float32)[:, None] for name in info.observation_keys}
    executed = np.ones((rows, DIM), np.float32)
    return TickRequest(info.id, info.token, seq, Op.RECONDITION, first, arrays, executed, **kwargs)


class Gate:
    """Blocks a stage's thread until opened. Opening is idempotent, so tests can open it in a finally."""

    def __init__(self) -> None:
        self.entered = threading.Semaphore(0)
        self._open = threading.Event()

    def __call__(self, item: StageItem) -> None:
        self.entered.release()
        if not self._open.wait(20):
            raise TimeoutError("nobody opened the gate")

    async def reached(self) -> None:
        """Wait until a stage has come to the gate."""
        assert await asyncio.to_thread(self.entered.acquire, timeout=20)

    def open(self) -> None:
        self._open.set()


def plain(name: str) -> ToyStage:
    """A stage that nothing scripts, as a factory that another process can import."""
    kind, model = MODELS[name]
    return ToyStage(name, kind, Script(), model, specs=SPECS.get(name, {}))


def actions(result: TickResult) -> list[list[float]]:
    assert result.chunk is not None
    return result.chunk.actions.tolist()


async def ticks(core: Toy, info: SessionInfo, seq: int, step: int) -> tuple[float, float]:
    """How many ticks the context and act stages have committed, this one included."""
    a = actions(await core.core.tick(infer(info, seq, step)))
    return a[0][1], a[2][0]


def fail_for(session: str, error: Exception) -> object:
    def before(item: StageItem) -> None:
        if item.session == session:
            raise error

    return before
