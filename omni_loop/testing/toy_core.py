"""A double of the orchestrator for tests of servers and clients: no stages, chunks that tell on every mix-up.

Row i of a chunk is ``[seed + ticks committed so far, 100 * seq + i]``: a tick computed twice, lost or given to
another session shows, and so does one of a fork, a rewind or a snapshot. ``ToyCore`` has the methods of
``Orchestrator``; options of a session make it misbehave.
"""

from __future__ import annotations

import asyncio
import functools
import hmac
import secrets
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, cast

import numpy as np

from ..errors import (
    Code,
    Exhausted,
    OmniLoopError,
    Reason,
    StageFailed,
    StateError,
    UnknownName,
    UnknownSession,
    nearest,
)
from ..loop.flight import Flight, OnPart
from ..loop.request import Attachment, SessionInfo, SessionSummary, TickRequest
from ..loop.tick import eager
from ..messages import Scalar
from ..types import (
    ActionChunk,
    ArraySpec,
    FramePrediction,
    Op,
    PlanSummary,
    Progress,
    SessionSpec,
    TickResult,
    Timings,
)

if TYPE_CHECKING:
    from ..loop.graph import CompiledPlan

SPEC = SessionSpec(
    pipeline="toy",
    observations=(
        ArraySpec("image", "uint8", (8, 8, 3), low=0, high=255),
        ArraySpec("agent_pos", "float32", (2, 2), unit="px", low=0, high=512),
        ArraySpec("points", "float32", (-1, 2), optional=True, max_length=4),
        ArraySpec("gripper", "bool", (2,), optional=True),
    ),
    action=ArraySpec("action", "float32", (2,), unit="px", low=0, high=512),
    horizon=4,
    execution_horizon=2,
    control_hz=10,
    ops=(Op.INFER, Op.PREDICT, Op.RECONDITION, Op.PLAN),
    frame=ArraySpec("frame", "uint8", (8, 8, 3)),
    max_predict=8,
    prompt=True,
)
SECRET = "/very/secret/path"  # in the text of every failure that must stay inside
REPLIES = 8


class _Flight(Flight):
    """A seq under way."""

    def __init__(self, request: TickRequest) -> None:
        super().__init__(request, cast("CompiledPlan", None), 0.0)  # the toy has no stages
        self.task: asyncio.Task[None] | None = None
        self.begun = False


@dataclass(slots=True)
class _Live:
    info: SessionInfo
    options: Mapping[str, Scalar]
    owner: str = ""
    committed: int = 0
    seq: int = 0  # highest answered
    accepted: int = 0
    failed: int = 0  # the highest, when it may be sent again
    step: int = 0
    past: dict[int, int] = field(default_factory=dict)  # ticks committed when the session stood at a step
    replies: OrderedDict[int, TickResult] = field(default_factory=OrderedDict)
    flights: dict[int, _Flight] = field(default_factory=dict)
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    attachment: int = 0
    fence: Callable[[], None] | None = None  # of the stream that is attached


class ToyCore:
    """Options of a session: at the seq they name, ``fail_at`` raises a typed error, ``crash_at`` an untyped one,
    ``late_at`` that the deadline passed, ``full_at`` that no memory is left, and ``hang_at`` never ends;
    ``frames_fail`` loses all frames. While
    :attr:`gate` is cleared every tick waits; :attr:`computed` counts those that ran."""

    def __init__(self, spec: SessionSpec = SPEC) -> None:
        self.specs: Mapping[str, SessionSpec] = {spec.pipeline: spec}
        self.ready = True
        self.recording: bool | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        self.entered = asyncio.Event()  # set when a tick has begun
        self.computed = 0
        self.requests: list[TickRequest] = []
        self.detached: list[tuple[str, int]] = []  # attachments that ended, of the session they were the newest of
        self.stopped = False
        self.live: dict[str, _Live] = {}
        self.kept: dict[str, _Live] = {}

    async def ping(self) -> None:
        return None

    async def recall(self, session: str, token: str, owner: str = "") -> None:
        """Sessions end with this core."""

    def session(self, session: str, token: str, owner: str = "") -> SessionInfo:
        live = self._find(session, token, owner)
        return replace(live.info, last_seq=live.accepted, step=live.step)

    def last_seq(self, session: str, token: str) -> int:
        return self._find(session, token).seq

    async def open(
        self,
        pipeline: str,
        seed: int | None = None,
        prompt: str = "",
        observation_keys: Sequence[str] = (),
        options: Mapping[str, Scalar] | None = None,
        *,
        owner: str = "",
    ) -> SessionInfo:
        if pipeline not in self.specs:
            raise UnknownName(f"no pipeline {pipeline!r} is served.{nearest(pipeline, self.specs)}")
        spec = self.specs[pipeline]
        keys = tuple(observation_keys) or tuple(s.name for s in spec.observations if not s.optional)
        info = SessionInfo(
            secrets.token_hex(8), secrets.token_hex(16), 1, secrets.randbits(16) if seed is None else seed, spec, keys
        )
        self.live[info.id] = _Live(info, options or {}, owner)
        return info

    # Ticks -------------------------------------------------------------------------------------------------

    async def tick(self, request: TickRequest, on_part: OnPart | None = None, *, keep: bool = False) -> TickResult:
        live = self._find(request.session, request.token)
        seq = request.seq
        if seq in live.replies:
            return live.replies[seq]
        flight = live.flights.get(seq)
        if flight is None:
            if seq <= live.accepted and seq != live.failed:
                raise StateError(f"seq {seq} is stale; the session is at {live.accepted}")
            if int(live.options.get("crash_at", 0)) == seq:
                raise RuntimeError(f"{SECRET} is not readable")
            if request.supersede:
                self._supersede(live)
            live.accepted, live.failed = seq, 0
            flight = live.flights[seq] = _Flight(request)
            flight.task = eager(self._fly(live, flight))  # its turn is that of the call
        return await flight.wait(on_part, None if keep else functools.partial(self._drop, live, flight))

    async def wait(self, session: str, token: str, seq: int, on_part: OnPart | None = None) -> TickResult:
        live = self._find(session, token)
        if seq in live.replies:
            return live.replies[seq]
        if seq not in live.flights:
            raise StateError(f"seq {seq} is not under way")
        return await self.tick(live.flights[seq].request, on_part, keep=True)

    def cancel(self, session: str, token: str, seq: int) -> None:
        live = self._find(session, token)
        if seq in live.flights:
            self._drop(live, live.flights[seq], StateError("cancelled", reason=Reason.CANCELLED, retryable=True))

    def attach(self, session: str, token: str, fence: Callable[[], None], last_received: int | None) -> Attachment:
        live = self._find(session, token)
        if live.fence is not None:
            live.fence()
        live.attachment += 1
        live.fence = fence
        after = [] if last_received is None else [seq for seq in live.replies if seq > last_received]
        gone = range(1 if last_received is None else last_received + 1, min(live.replies, default=1))
        return Attachment(
            live.attachment,
            live.info.epoch,
            live.seq,
            live.accepted,
            tuple(live.flights),
            tuple(live.replies[seq] for seq in after),
            gone[-1] if gone and last_received is not None else 0,
        )

    def detach(self, session: str, number: int) -> None:
        live = self.live.get(session)
        if live is not None and live.attachment == number:
            live.fence = None
            self.detached.append((session, number))

    def _supersede(self, live: _Live) -> None:
        for flight in [f for f in live.flights.values() if not f.begun and f.request.op is Op.INFER]:
            self._drop(live, flight, StateError("a newer observation came", reason=Reason.SUPERSEDED))

    @asynccontextmanager
    async def _turn(self, live: _Live) -> AsyncIterator[None]:
        """In the order of the calls, and late enough that no answer overtakes one before it."""
        async with live.turn:
            await asyncio.sleep(0)
            yield

    def _drop(self, live: _Live, flight: Flight, error: OmniLoopError) -> None:
        """End ``flight`` with nothing committed."""
        seq = flight.request.seq
        flight.fail(error)
        dropped = live.flights.pop(seq, None)
        if dropped is not None and dropped.task is not None:
            dropped.task.cancel()
        if seq == live.accepted:
            live.failed = seq

    async def _fly(self, live: _Live, flight: _Flight) -> None:
        seq = flight.request.seq
        async with self._turn(live):
            flight.begun = True
            self.entered.set()
            await self.gate.wait()
            try:
                result = await self._run(live, flight)
            except OmniLoopError as error:
                self._drop(live, flight, error)
                return
            live.replies[seq] = result
            while len(live.replies) > REPLIES:
                live.replies.popitem(last=False)
            del live.flights[seq]
            flight.finish(result)

    async def _run(self, live: _Live, flight: _Flight) -> TickResult:
        request = flight.request
        self._misbehave(live, request)
        if int(live.options.get("hang_at", 0)) == request.seq:
            await asyncio.Event().wait()
        self.computed += 1
        self.requests.append(request)
        live.seq = request.seq
        if request.op is Op.PLAN:
            return self._planned(live, request)
        live.committed += 1
        live.step = self._stands_at(live, request)
        live.past[live.step] = live.committed
        answer = self._answer(live, request)
        if not request.frames:
            return self._with_frames(live, request, answer)
        answer = replace(answer, early=answer.timings)
        flight.answer(answer, last=False)
        await asyncio.sleep(0)
        whole = self._with_frames(live, request, answer)
        return replace(whole, timings=Timings(4.0, 3.0, 0.25, {"act": 1.5, "frames": 1.5}))

    # Sessions ----------------------------------------------------------------------------------------------

    async def reset(self, session: str, token: str, seed: int | None = None, prompt: str | None = None) -> int:
        return await asyncio.shield(eager(self._reset(self._find(session, token), seed)))  # to its end

    async def _reset(self, live: _Live, seed: int | None) -> int:
        async with self._turn(live):
            live.info = replace(live.info, epoch=live.info.epoch + 1, seed=live.info.seed if seed is None else seed)
            live.committed, live.step, live.past, live.failed = 0, 0, {}, 0
            live.replies.clear()
            return live.info.epoch

    async def rewind(self, session: str, token: str, step: int) -> tuple[int, int]:
        live = self._find(session, token)
        async with self._turn(live):
            if step not in live.past:
                raise StateError(f"step {step} cannot be reached; {sorted(live.past)} can", reason=Reason.BAD_REQUEST)
            live.info = replace(live.info, epoch=live.info.epoch + 1)
            live.committed, live.step = live.past[step], step
            live.replies.clear()
            live.past = {s: n for s, n in live.past.items() if s <= step}
            return live.info.epoch, step

    async def fork(self, session: str, token: str, seed: int | None = None) -> SessionInfo:
        live = self._find(session, token)
        async with self._turn(live):
            return self._continue(live, seed, live.owner)

    async def snapshot(self, session: str, token: str, name: str) -> int:
        live = self._find(session, token)
        async with self._turn(live):
            self.kept[name] = self._copy(live, live.info, live.owner)
            return 1000 + live.committed

    async def snapshots(self) -> list[str]:
        return list(self.kept)

    async def restore(self, name: str, *, owner: str = "") -> SessionInfo:
        if name not in self.kept:
            raise UnknownName(f"there is no snapshot {name!r}")
        return self._continue(self.kept[name], None, owner)

    def count(self, owner: str) -> int:
        return sum(live.owner == owner for live in self.live.values())

    def list_sessions(self) -> Sequence[SessionSummary]:
        return [
            SessionSummary(i.id, i.spec.pipeline, "idle", i.epoch, live.step, live.seq)
            for live in self.live.values()
            for i in (live.info,)
        ]

    def _continue(self, live: _Live, seed: int | None, owner: str) -> SessionInfo:
        info = replace(
            live.info,
            id=secrets.token_hex(8),
            token=secrets.token_hex(16),
            seed=live.info.seed if seed is None else seed,
        )
        self.live[info.id] = self._copy(live, info, owner)
        return self.session(info.id, info.token, owner)

    @staticmethod
    def _copy(live: _Live, info: SessionInfo, owner: str) -> _Live:
        child = _Live(info, live.options, owner, live.committed, live.seq, live.seq)
        child.step, child.past = live.step, dict(live.past)
        return child

    async def close(self, session: str, token: str) -> None:
        live = self._find(session, token)
        for flight in tuple(live.flights.values()):
            self._drop(live, flight, StateError("the session was closed", reason=Reason.CLOSED))
        del self.live[session]

    async def stop(self, grace_s: float = 5.0) -> None:
        self.ready, self.stopped = False, True

    def _find(self, session: str, token: str, owner: str | None = None) -> _Live:
        live = self.live.get(session)
        if live is None or not hmac.compare_digest(live.info.token.encode(), token.encode()):
            raise UnknownSession("no such session")
        if owner is not None and owner != live.owner:
            raise UnknownSession("no such session")
        return live

    def _misbehave(self, live: _Live, request: TickRequest) -> None:
        def now(option: str) -> bool:
            return int(live.options.get(option, 0)) == request.seq

        if now("fail_at"):
            raise StageFailed("stage 'act' failed")
        if now("full_at"):
            raise Exhausted("4096 bytes are missing", retry_after_ms=250.0, missing_bytes=4096)
        if now("late_at"):
            raise OmniLoopError("too late", code=Code.DEADLINE_EXCEEDED, reason=Reason.EXPIRED, retryable=True)

    def _answer(self, live: _Live, request: TickRequest) -> TickResult:
        seq, epoch = request.seq, live.info.epoch
        rows = np.arange(live.info.spec.horizon, dtype=np.float32)
        actions = np.stack([np.full_like(rows, live.info.seed + live.committed), 100 * seq + rows], axis=1)
        timings = Timings(2.0, 1.5, 0.25, {"act": 1.5})
        chunk = ActionChunk(seq, request.step, actions.astype(np.float32), epoch, "toy-1", timings)
        progress = Progress(seq, request.step, 0.5, 0.25, epoch)
        return TickResult(seq, epoch, None if request.op is Op.RECONDITION else chunk, None, progress, timings)

    def _planned(self, live: _Live, request: TickRequest) -> TickResult:
        assert request.plan is not None
        asked = request.plan
        summary = PlanSummary(
            request.seq, 0.25, 0.5, asked.candidates, asked.iterations, asked.horizon, asked.budget_ms > 0
        )
        return replace(self._answer(live, replace(request, step=live.step)), plan=summary)

    def _stands_at(self, live: _Live, request: TickRequest) -> int:
        if request.op is Op.PREDICT:
            return live.step + (request.steps if request.actions is None else len(request.actions))
        if request.op is Op.RECONDITION:
            return request.step + len(next(iter(request.arrays.values()))) - 1
        return request.step

    def _with_frames(self, live: _Live, request: TickRequest, answer: TickResult) -> TickResult:
        count = request.frames or (len(request.actions) if request.actions is not None else request.steps)
        if not count:
            return answer
        if live.options.get("frames_fail"):
            return replace(answer, frames_error=StageFailed("stage 'frames' failed"))
        assert live.info.spec.frame is not None
        frames = np.full((count, *live.info.spec.frame.shape), request.seq % 256, np.uint8)
        scene = np.zeros((count, 3, 2), np.float32)
        return replace(answer, frames=FramePrediction(request.seq, request.step + 1, frames, answer.epoch, scene))
