"""A double of the orchestrator for tests of servers and clients: no stages, chunks that tell on every mix-up.

Row i of a chunk is ``[seed + ticks committed so far, 100 * seq + i]``: a tick computed twice, lost or given to
another session shows, and so does one of a fork, a rewind or a snapshot. ``ToyCore`` has the methods of
``Orchestrator``; options of a session make it misbehave.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

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
from ..loop.flight import OnPart
from ..loop.request import SessionInfo, SessionSummary, TickRequest
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


@dataclass(slots=True)
class _Live:
    info: SessionInfo
    options: Mapping[str, Scalar]
    committed: int = 0
    seq: int = 0
    step: int = 0
    past: dict[int, int] = field(default_factory=dict)  # ticks committed when the session stood at a step
    last: TickResult | None = None
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)


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
        self._kept: set[asyncio.Task[TickResult]] = set()
        self.stopped = False
        self.live: dict[str, _Live] = {}
        self.snapshots: dict[str, _Live] = {}

    async def ping(self) -> None:
        return None

    def session(self, session: str, token: str) -> SessionInfo:
        live = self._find(session, token)
        return replace(live.info, last_seq=live.seq, step=live.step)

    def last_seq(self, session: str, token: str) -> int:
        return self._find(session, token).seq

    async def open(
        self,
        pipeline: str,
        seed: int | None = None,
        prompt: str = "",
        observation_keys: Sequence[str] = (),
        options: Mapping[str, Scalar] | None = None,
    ) -> SessionInfo:
        if pipeline not in self.specs:
            raise UnknownName(f"no pipeline {pipeline!r} is served.{nearest(pipeline, self.specs)}")
        spec = self.specs[pipeline]
        keys = tuple(observation_keys) or tuple(s.name for s in spec.observations if not s.optional)
        info = SessionInfo(
            secrets.token_hex(8), secrets.token_hex(16), 1, secrets.randbits(16) if seed is None else seed, spec, keys
        )
        self.live[info.id] = _Live(info, options or {})
        return info

    async def tick(self, request: TickRequest, on_part: OnPart | None = None, *, keep: bool = False) -> TickResult:
        if not keep:
            return await self._tick(request, on_part)
        task = eager(self._tick(request, on_part))  # its turn is that of the call
        self._kept.add(task)
        task.add_done_callback(self._kept.discard)
        return await asyncio.shield(task)

    async def _tick(self, request: TickRequest, on_part: OnPart | None) -> TickResult:
        live = self._find(request.session, request.token)
        async with live.turn:
            self.entered.set()
            await self.gate.wait()
            if live.last is not None and request.seq == live.last.seq:
                return live.last
            if request.seq <= live.seq:
                raise StateError(f"seq {request.seq} is stale; the last answered is {live.seq}")
            self._misbehave(live, request)
            if int(live.options.get("hang_at", 0)) == request.seq:
                await asyncio.Event().wait()
            self.computed += 1
            self.requests.append(request)
            live.seq = request.seq
            if request.op is Op.PLAN:
                live.last = self._planned(live, request)
                return live.last
            live.committed += 1
            live.step = self._stands_at(live, request)
            live.past[live.step] = live.committed
            answer = self._answer(live, request)
            if request.frames and on_part is not None:
                on_part(answer)
                await asyncio.sleep(0)
            live.last = self._with_frames(live, request, answer)
            return live.last

    async def reset(self, session: str, token: str, seed: int | None = None, prompt: str | None = None) -> int:
        live = self._find(session, token)
        async with live.turn:
            live.info = replace(live.info, epoch=live.info.epoch + 1, seed=live.info.seed if seed is None else seed)
            live.committed, live.last, live.step, live.past = 0, None, 0, {}
            return live.info.epoch

    async def rewind(self, session: str, token: str, step: int) -> tuple[int, int]:
        live = self._find(session, token)
        async with live.turn:
            if step not in live.past:
                raise StateError(f"step {step} cannot be reached; {sorted(live.past)} can", reason=Reason.BAD_REQUEST)
            live.info = replace(live.info, epoch=live.info.epoch + 1)
            live.committed, live.step, live.last = live.past[step], step, None
            live.past = {s: n for s, n in live.past.items() if s <= step}
            return live.info.epoch, step

    async def fork(self, session: str, token: str, seed: int | None = None) -> SessionInfo:
        live = self._find(session, token)
        async with live.turn:
            return self._continue(live, seed)

    async def snapshot(self, session: str, token: str, name: str) -> int:
        live = self._find(session, token)
        async with live.turn:
            self.snapshots[name] = replace(live, past=dict(live.past))
            return 1000 + live.committed

    async def restore(self, name: str) -> SessionInfo:
        if name not in self.snapshots:
            raise UnknownName(f"there is no snapshot {name!r}")
        return self._continue(self.snapshots[name], None)

    def list_sessions(self) -> Sequence[SessionSummary]:
        return [
            SessionSummary(i.id, i.spec.pipeline, "idle", i.epoch, live.step, live.seq)
            for live in self.live.values()
            for i in (live.info,)
        ]

    def _continue(self, live: _Live, seed: int | None) -> SessionInfo:
        info = replace(
            live.info,
            id=secrets.token_hex(8),
            token=secrets.token_hex(16),
            seed=live.info.seed if seed is None else seed,
        )
        self.live[info.id] = replace(live, info=info, past=dict(live.past), last=None, turn=asyncio.Lock())
        return self.session(info.id, info.token)

    async def close(self, session: str, token: str) -> None:
        self._find(session, token)
        del self.live[session]

    async def stop(self, grace_s: float = 5.0) -> None:
        self.ready, self.stopped = False, True

    def _find(self, session: str, token: str) -> _Live:
        live = self.live.get(session)
        if live is None or not hmac.compare_digest(live.info.token.encode(), token.encode()):
            raise UnknownSession("no such session")
        return live

    def _misbehave(self, live: _Live, request: TickRequest) -> None:
        def now(option: str) -> bool:
            return int(live.options.get(option, 0)) == request.seq

        if now("fail_at"):
            raise StageFailed("stage 'act' failed")
        if now("crash_at"):
            raise RuntimeError(f"{SECRET} is not readable")
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
        frames = np.full((count, 8, 8, 3), request.seq % 256, np.uint8)
        scene = np.zeros((count, 3, 2), np.float32)
        return replace(answer, frames=FramePrediction(request.seq, request.step + 1, frames, answer.epoch, scene))
