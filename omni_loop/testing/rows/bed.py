"""The orchestrator over toy stages, clients that count their answers, and books that must be empty at the end."""

from __future__ import annotations

import asyncio
import functools
import gc
import logging
import os
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import grpc.aio
import numpy as np
from numpy.typing import NDArray

from ...clock import Clock
from ...config import SessionConfig
from ...connect.base import as_numpy
from ...errors import OmniLoopError
from ...loop.graph import compile_pipeline
from ...loop.orchestrator import Orchestrator
from ...loop.pool import Pool
from ...loop.request import SessionInfo, TickRequest
from ...loop.tap import Tap
from ...messages import ExportSession, ReleasePayloads
from ...runner.runner import RunnerSettings, StageEntry
from ...runner.state import Budget
from ...session.snapshot import SnapshotStore
from ...types import FramePrediction, Op, TickResult
from ...wire.limits import Limits
from ...wire.replies import decode_result, encode_result
from ..board import Broken, expect
from .inline import InlineRunner, ThreadRunner
from .toys import DIM, NAME, PIPELINE, SPEC, STAGES, WIDTH, Faults

ANSWER_S = 60.0  # nothing here takes a thousandth of it: who is not answered by then never is
_LIMITS = Limits()
Outcome = TickResult | OmniLoopError
AnyRunner = InlineRunner | ThreadRunner


@dataclass
class Bed:
    core: Orchestrator
    runners: Sequence[AnyRunner]
    faults: Faults
    asked: int = 0
    answered: int = 0

    async def open(self, seed: int) -> Robot:
        return Robot(self, await self.core.open(NAME, seed))

    async def settled(self) -> None:
        """Until no tick is under way, also not its undoing."""
        while len(self.core._tasks):
            await asyncio.wait_for(self.core._tasks.wait(), ANSWER_S)

    async def state_of(self, session: str) -> dict[str, Any]:
        """All committed state of a session, comparable."""
        epoch = self.core._live[session].session.machine.epoch
        found: dict[str, Any] = {}
        for runner in self.runners:
            done = await runner.submit(ExportSession(session, epoch))
            for stage, receipt in done.outputs.items():
                payload = runner.connector.get(receipt)
                arrays = {name: as_numpy(array) for name, array in payload.arrays.items()}
                found[stage] = {**{n: (a.shape, a.tobytes()) for n, a in arrays.items()}, **payload.meta}
            await runner.submit(ReleasePayloads(tuple(r.key for r in done.outputs.values())))
        return found

    def check(self) -> None:
        """The runners' books balance, and no payload is held but what awaits a next tick; between ticks only."""
        for runner in self.runners:
            runner.state.check()
        held = sum(runner.connector.health().payloads for runner in self.runners)
        fed = sum(len(live.session.feedback) for live in self.core._live.values())
        expect(held == fed, f"{held} payloads are held, {fed} of them for next ticks")


@dataclass
class Robot:
    """A client of one session: every request is answered once, in time, by what may leave the server."""

    bed: Bed
    info: SessionInfo
    seq: int = 0
    step: int = -1
    done: list[tuple[TickRequest, TickResult]] = field(default_factory=list)

    async def send(self, request: TickRequest) -> Outcome:
        """The terminal answer: a result as a client decodes it, or a typed error."""
        self.bed.asked += 1
        parts: list[TickResult | FramePrediction] = []
        tick = asyncio.ensure_future(self.bed.core.tick(request, parts.append))
        # In turns of a second, each of which lets everything run that can: a machine may be too busy to run us at all.
        for _ in range(round(ANSWER_S)):
            await asyncio.wait([tick], timeout=1.0)
            if tick.done():
                break
        else:
            tick.cancel()
            raise Broken(f"seq {request.seq} of op {request.op} was not answered within {ANSWER_S:g} s")
        try:
            result = tick.result()
        except OmniLoopError as error:
            self.bed.answered += 1
            expect(not parts, f"seq {request.seq} was answered, and then refused: {error.text}")
            return error
        self.bed.answered += 1
        expect(len(parts) <= 1, f"seq {request.seq} was answered early {len(parts)} times")
        for answer in (*parts, result):
            expect(answer.seq == request.seq, f"seq {request.seq} got the answer of seq {answer.seq}")
        return over_the_wire(result)

    async def infer(self, x: NDArray[np.float32], frames: int = 0, **more: Any) -> Outcome:
        step = self.step + 1
        executed = np.full((1 if self.step >= 0 else 0, DIM), 0.25, np.float32)
        outcome = await self._next(Op.INFER, step=step, arrays={"x": x}, executed=executed, frames=frames, **more)
        if isinstance(outcome, TickResult):
            self.step = step
        return outcome

    async def predict(self, actions: NDArray[np.float32]) -> Outcome:
        return await self._next(Op.PREDICT, actions=actions)

    async def recondition(self, x: NDArray[np.float32]) -> Outcome:
        """Real rows ``x float32[n, WIDTH]`` after the last observed step."""
        n, first = len(x), self.step + 1
        executed = np.full((n if self.step >= 0 else n - 1, DIM), -0.25, np.float32)
        outcome = await self._next(Op.RECONDITION, step=first, arrays={"x": x}, executed=executed)
        if isinstance(outcome, TickResult):
            self.step = first + n - 1
        return outcome

    async def _next(self, op: Op, **given: Any) -> Outcome:
        self.seq += 1
        request = TickRequest(self.info.id, self.info.token, self.seq, op, **given)
        outcome = await self.send(request)
        if isinstance(outcome, TickResult):
            if outcome.frames_error is not None:  # as if they had not been asked for
                self.done.append((replace(request, frames=0), replace(outcome, frames_error=None)))
            else:
                self.done.append((request, outcome))
        return outcome


@asynccontextmanager
async def bed(
    budget: Budget | None = None,
    settings: dict[str, Any] | None = None,
    config: SessionConfig | None = None,
    clock: Clock | None = None,
    store: SnapshotStore | None = None,
    placement: Sequence[Sequence[str]] = (tuple(STAGES),),
    max_sessions: int = 32,
    threads: bool = False,
    tap: Tap | None = None,
) -> AsyncIterator[Bed]:
    """A running core, its runners in ``threads`` or on the event loop. When the block ends without an error, every
    session is closed, and nothing may be left."""
    faults = Faults()
    limits = RunnerSettings(budget=budget or Budget(max_sessions), **(settings or {}))
    runners = []
    for number, names in enumerate(placement):
        entries: list[StageEntry] = [(f"{NAME}/{name}", lambda name=name: STAGES[name](faults), {}) for name in names]
        kind = ThreadRunner if threads else InlineRunner
        runners.append(kind(f"r{number}", entries, limits))
    for runner in runners:
        await runner.start()
    pool = Pool([compile_pipeline(PIPELINE)], runners)
    core = Orchestrator(pool, config or SessionConfig(), max_sessions, clock, store, tap)
    made = Bed(core, runners, faults)
    try:
        yield made
        await _nothing_left(made)
    finally:
        await made.core.stop(grace_s=0.0)


async def _nothing_left(made: Bed) -> None:
    await made.settled()
    core = made.core
    expect(made.asked == made.answered, f"{made.asked} requests had {made.answered} answers")
    for live in list(core._live.values()):
        await core.close(live.session.id, live.session.token)
    await made.settled()
    expect(not core.list_sessions(), "sessions are left after the last close")
    for runner in made.runners:
        runner.state.check()
        stats = runner.state.stats()
        expect(stats.sessions == 0, f"{runner.name}: state of {stats.sessions} sessions is left")
        for name, books in stats.pools.items():
            expect(books.owned == 0 and books.tables == 0, f"{runner.name}: {books.owned} blocks of {name} are left")
        left = stats.reserved_bytes + stats.history_bytes + stats.versions
        expect(left == 0, f"{runner.name}: {stats.reserved_bytes} bytes, {stats.versions} versions are left")
        held = runner.connector.health().payloads
        expect(held == 0, f"{runner.name}: {held} payloads are left")


def over_the_wire(result: TickResult) -> TickResult:
    """As a client decodes it: what is not finite or not as the spec says does not pass."""
    return decode_result(encode_result(result), SPEC, _LIMITS)


def same(a: TickResult, b: TickResult) -> bool:
    """The same answer, bit for bit, whatever it took."""
    return _bits(a) == _bits(b)


def _bits(r: TickResult) -> tuple[Any, ...]:
    chunk = None if r.chunk is None else (r.chunk.first_step, r.chunk.actions.tobytes())
    frames = None if r.frames is None else (r.frames.first_step, r.frames.frames.tobytes())
    progress = None if r.progress is None else (r.progress.step, r.progress.progress, r.progress.done)
    return (r.seq, r.epoch, chunk, frames, progress)


def row(draw: np.random.Generator, n: int | None = None) -> NDArray[np.float32]:
    """Something to observe: ``float32[WIDTH]``, or ``[n, WIDTH]``."""
    return draw.standard_normal(WIDTH if n is None else (n, WIDTH)).astype(np.float32)


def some_actions(draw: np.random.Generator, n: int) -> NDArray[np.float32]:
    return draw.uniform(-1, 1, (n, DIM)).astype(np.float32)


async def alone(seed: int, requests: Sequence[TickRequest]) -> list[Outcome]:
    """What a session with all the room there is, and no neighbours, is answered."""
    async with bed() as made:
        robot = await made.open(seed)
        answers = []
        for r in requests:
            mine = replace(r, session=robot.info.id, token=robot.info.token)
            answers.append(await robot.send(mine))
        return answers


async def check_alone(seed: int, robot: Robot) -> None:
    """What ``robot`` was answered is what it is answered alone."""
    for (request, got), want in zip(robot.done, await alone(seed, [r for r, _ in robot.done]), strict=True):
        if isinstance(want, OmniLoopError):
            raise Broken(f"alone, seq {request.seq} of op {request.op} is refused: {want.text}")
        expect(same(got, want), f"seq {request.seq} of op {request.op} was answered otherwise than alone")


@contextmanager
def nothing_leaks() -> Iterator[None]:
    """No file descriptor and no thread more than before. Around a whole event loop."""
    _hold_poller()
    gc.collect()
    fds, threads = _fds(), set(threading.enumerate())
    with _records_without_frames():
        yield
    gc.collect()
    for thread in threading.enumerate():
        if thread not in threads:
            thread.join(2.0)  # those of an executor that was shut down end by themselves
    until = time.monotonic() + 5.0
    while _fds() > fds and time.monotonic() < until:
        time.sleep(0.02)  # gRPC closes its sockets behind the call that ends them
    left = [t.name for t in threading.enumerate() if t not in threads]
    expect(not left, f"threads are left: {', '.join(left)}")
    expect(_fds() <= fds, f"{_fds() - fds} file descriptors are left")


@contextmanager
def _records_without_frames() -> Iterator[None]:
    """What gRPC logs of a message that it cannot read has a traceback, whose frames hold the call's channel for as long
    as somebody keeps the record, as pytest does."""

    def forget(record: logging.LogRecord) -> bool:
        record.exc_info = None
        return True

    loggers = [logging.getLogger(name) for name in ("grpc._common", "grpc._cython.cygrpc")]
    for logger in loggers:
        logger.addFilter(forget)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(forget)


@functools.cache
def _hold_poller() -> None:
    """gRPC's one poller of a process, a thread and its sockets, ends some time after the last call: it is kept."""

    async def hold() -> None:
        grpc.aio.init_grpc_aio()

    asyncio.run(hold())


def _fds() -> int:
    return len(os.listdir("/proc/self/fd"))
