"""A pipeline that can be watched: frames are drawn pass by pass, and developed by a stage without state.

A frame takes two passes. Its number is a function of the session's seed, of how many frames were ever committed and of
the action, so that a tick which left a trace, or one that a preview has changed, is seen in every frame after it.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import numpy as np

from omni_loop.config import SessionConfig
from omni_loop.loop.edges import schemas_of
from omni_loop.loop.graph import compile_pipeline
from omni_loop.loop.orchestrator import Orchestrator
from omni_loop.loop.pipeline import CLIENT, Edge, Pipeline, Plan, StageDef
from omni_loop.loop.pool import Pool
from omni_loop.loop.request import SessionInfo, TickRequest
from omni_loop.messages import PayloadKind
from omni_loop.runner.local import LocalRunner
from omni_loop.runner.runner import RunnerSettings
from omni_loop.stage import CounterSpec, Job, Outputs, Payload, StageItem, StateSpec, in_steps, one_by_one
from omni_loop.types import ArraySpec, FramePrediction, Op, SessionSpec, StageKind, TickResult

SPEC = SessionSpec(
    pipeline="studio",
    observations=(ArraySpec("mark", "float32", (1,)),),
    action=ArraySpec("action", "float32", (1,), low=-1000, high=1000),
    horizon=4,
    execution_horizon=2,
    control_hz=10,
    ops=(Op.INFER, Op.PREDICT),
    frame=ArraySpec("frame", "uint8", (2, 2, 3)),
    max_predict=8,
)

STUDIO = Pipeline(
    name="studio",
    spec=lambda: SPEC,
    stages=(
        StageDef("act", StageKind.ACT, f"{__name__}:act"),
        StageDef("draw", StageKind.FRAMES, f"{__name__}:draw"),
        StageDef("develop", StageKind.DECODE, f"{__name__}:develop"),
    ),
    edges=(
        Edge(CLIENT, "observation", "act", "observation", PayloadKind.OBSERVATION),
        Edge(CLIENT, "actions", "draw", "actions", PayloadKind.ACTIONS, optional=True),
        Edge("draw", "latents", "develop", "latents", PayloadKind.LATENTS, streams=True),
    ),
    plans={
        Op.INFER: Plan(("act",), ("draw", "develop"), chunk="act.actions", frames="develop.frames"),
        Op.PREDICT: Plan(("draw", "develop"), frames="develop.frames"),
    },
)


@dataclass
class Desk:
    """What the stages were asked for, and what shall go wrong: called in the runner's thread, may raise or block."""

    before_pass: Callable[[Drawing], None] = lambda job: None
    before_develop: Callable[[StageItem], None] = lambda item: None
    passes: list[str] = field(default_factory=list)  # session of every job in every pass
    batches: list[int] = field(default_factory=list)  # sizes of the passes
    developed: list[tuple[str, int]] = field(default_factory=list)  # session and frames of every run

    def block(self, session: str, done: int) -> tuple[threading.Event, threading.Event]:
        """Stop before the pass of ``session`` that follows ``done`` passes; ``(reached, go)``."""
        reached, go = threading.Event(), threading.Event()

        def before(job: Drawing) -> None:
            if job.item.session == session and job.passed == done:
                reached.set()
                assert go.wait(30)

        self.before_pass = before
        return reached, go

    def pace(self, watched: Mapping[str, Watched]) -> None:
        """Begin no pass before who watches the session has seen all parts made so far; for stages on two threads."""

        def before(job: Drawing) -> None:
            one = watched.get(job.item.session)
            until = time.monotonic() + 30
            while one is not None and job.passed and len(one.frames) < 1 + job.passed // 2:
                assert time.monotonic() < until
                time.sleep(0.001)

        self.before_pass = before


@dataclass
class Drawing:
    item: StageItem
    frames: int
    first: int
    base: int
    passed: int = 0
    shown: int = -1  # -1: not even the preview

    @property
    def finished(self) -> bool:
        return self.passed == 2 * self.frames

    def latents(self, i: int) -> np.ndarray:
        return np.full((1, 1), (self.base + 7 * i) % 251, np.float32)


class Draw:
    kind = StageKind.FRAMES
    revision = "draw-1"

    def __init__(self, desk: Desk | None = None) -> None:
        self.desk = desk or Desk()

    def state_specs(self) -> Mapping[str, StateSpec]:
        return {"count": CounterSpec()}

    def run(self, items: Sequence[StageItem]) -> Sequence[Outputs | Exception]:
        return in_steps(self, items)

    def begin(self, item: StageItem) -> Drawing:
        count = item.state.counter("count")
        total = float(item.inputs["actions"].arrays["actions"].sum()) if "actions" in item.inputs else 0
        frames = int(item.params["frames"])
        base = int(item.seed + 13 * count.get() + total)
        count.set(count.get() + frames)  # staged before anything can fail
        return Drawing(item, frames, item.step + 1, base)

    def advance(self, jobs: Sequence[Drawing]) -> Sequence[Exception | None]:
        errors: list[Exception | None] = []
        self.desk.batches.append(len(jobs))
        for job in jobs:
            self.desk.passes.append(job.item.session)
            try:
                self.desk.before_pass(job)
                job.passed += 1
                errors.append(None)
            except ArithmeticError as e:
                errors.append(e)
        return errors

    def parts(self, job: Drawing) -> Sequence[Outputs]:
        made = []
        if job.shown < 0:
            job.shown = 0
            made.append(_latents(job.latents(0) + 100, job.first, preview=True))
        made += [_latents(job.latents(i), job.first + i, preview=False) for i in range(job.shown, job.passed // 2)]
        job.shown = max(job.shown, job.passed // 2)
        return made

    def finish(self, job: Drawing) -> Outputs:
        return _latents(np.concatenate([job.latents(i) for i in range(job.frames)]), job.first)

    def warm_up(self) -> None:
        pass


class Develop:
    kind = StageKind.DECODE
    revision = "develop-1"

    def __init__(self, desk: Desk | None = None) -> None:
        self.desk = desk or Desk()

    def state_specs(self) -> Mapping[str, StateSpec]:
        return {}

    def run(self, items: Sequence[StageItem]) -> Sequence[Outputs | Exception]:
        return one_by_one(self._one, items)

    def _one(self, item: StageItem) -> Outputs:
        payload = item.inputs["latents"]
        latents = np.asarray(payload.arrays["latents"])
        self.desk.developed.append((item.session, len(latents)))
        self.desk.before_develop(item)
        frames = np.broadcast_to(latents[:, :, None, None], (len(latents), 2, 2, 3)).astype(np.uint8)
        return {"frames": Payload(PayloadKind.FRAMES, {"frames": frames}, payload.meta)}

    def warm_up(self) -> None:
        pass


class Act(Develop):
    kind = StageKind.ACT

    def _one(self, item: StageItem) -> Outputs:
        return {"actions": Payload(PayloadKind.ACTIONS, {"actions": np.zeros((4, 1), np.float32)})}


def act() -> Act:
    return Act()


def draw(pause_s: float = 0.0) -> Draw:
    return Draw(Desk(before_pass=lambda job: time.sleep(pause_s)))


def develop() -> Develop:
    return Develop()


def _latents(array: np.ndarray, first: int, preview: bool | None = None) -> Outputs:
    meta = {"first_step": first} | ({} if preview is None else {"preview": preview})
    return {"latents": Payload(PayloadKind.LATENTS, {"latents": array}, meta)}


@dataclass
class Studio:
    core: Orchestrator
    desk: Desk
    runners: Sequence[LocalRunner]

    async def open(self, seed: int = 3) -> SessionInfo:
        return await self.core.open("studio", seed=seed)

    def payloads(self) -> int:
        return sum(r.connector.health().payloads for r in self.runners)


@dataclass
class Watched:
    """What a caller heard, in order."""

    heard: list[TickResult | FramePrediction] = field(default_factory=list)
    first: asyncio.Event = field(default_factory=asyncio.Event)
    seen: threading.Event = field(default_factory=threading.Event)

    def __call__(self, part: TickResult | FramePrediction) -> None:
        self.heard.append(part)
        if isinstance(part, FramePrediction):
            self.first.set()
            self.seen.set()

    @property
    def frames(self) -> list[FramePrediction]:
        return [part for part in self.heard if isinstance(part, FramePrediction)]


def predict(info: SessionInfo, seq: int, n: int = 4, previews: bool = True, **more: float) -> TickRequest:
    actions = np.full((n, 1), seq, np.float32)
    request = TickRequest(info.id, info.token, seq, Op.PREDICT, actions=actions, previews=previews)
    return replace(request, **more)  # type: ignore[arg-type]


def infer(info: SessionInfo, seq: int, step: int = 0, frames: int = 4, previews: bool = True) -> TickRequest:
    arrays = {"mark": np.zeros(1, np.float32)}
    return TickRequest(info.id, info.token, seq, Op.INFER, step, arrays, frames=frames, previews=previews)


@asynccontextmanager
async def studio(spread: bool = False, settings: RunnerSettings | None = None) -> AsyncIterator[Studio]:
    """All stages on one thread, or ``spread`` over two. At the end no payload is left."""
    desk = Desk()
    graph = compile_pipeline(STUDIO)
    made: dict[str, Callable[[], Job]] = {"act": lambda: Act(desk), "draw": lambda: Draw(desk)}  # type: ignore[dict-item]
    made["develop"] = lambda: Develop(desk)  # type: ignore[assignment,return-value]
    settings = replace(settings or RunnerSettings(), edges=schemas_of([graph]))
    groups = (("act", "draw"), ("develop",)) if spread else (("act", "draw", "develop"),)
    runners = [
        LocalRunner(f"r{i}", [(f"studio/{name}", made[name], {}) for name in names], settings)  # type: ignore[misc]
        for i, names in enumerate(groups)
    ]
    for runner in runners:
        await runner.start()
    core = Orchestrator(Pool([graph], runners), SessionConfig(), 32)
    made_here = Studio(core, desk, runners)
    try:
        yield made_here
        await core._tasks.wait()
        assert made_here.payloads() == 0, "parts leaked payloads"
    finally:
        await core.stop(grace_s=0.0)
