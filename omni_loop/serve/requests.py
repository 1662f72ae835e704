"""From messages to the orchestrator's requests, and back; what is heavy leaves the event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import ParamSpec, TypeVar

from google.protobuf.message import Message

from ..loop.request import PlanRequest, SessionInfo, TickRequest
from ..types import Op, TickResult
from ..wire import codec
from ..wire import loop_pb2 as pb

# Above this, parsing and decoding leave the event loop; below it a thread costs more than the work.
INLINE_BYTES = 256 << 10

P = ParamSpec("P")
T = TypeVar("T")
M = TypeVar("M", bound=Message)
Ask = pb.Observation | pb.PredictRequest | pb.ReconditionRequest | pb.PlanRequest


class Decoder:
    """One for all calls and streams of a server. Everything raises as :mod:`..wire.codec` does."""

    def __init__(self, limits: codec.Limits) -> None:
        self.limits = limits
        self._thread = ThreadPoolExecutor(1, "decode")

    def close(self) -> None:
        self._thread.shutdown(wait=False)

    async def parse(self, kind: type[M], raw: bytes) -> M:
        return await self._off_loop(len(raw) > INLINE_BYTES, codec.parse, kind, raw, self.limits)

    async def tick(self, info: SessionInfo, message: Ask, nbytes: int, began: float) -> TickRequest:
        """What ``message``, of ``nbytes`` that came at ``began`` (of ``time.perf_counter``), asks of the session."""
        heavy = nbytes > INLINE_BYTES or _has_images(message)
        return await self._off_loop(heavy, _tick, info, message, self.limits, began)

    async def encode(self, result: TickResult) -> pb.TickReply:
        heavy = result.frames is not None and result.frames.frames.nbytes > INLINE_BYTES
        return await self._off_loop(heavy, codec.encode_result, result)

    async def _off_loop(self, heavy: bool, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """``function(...)``, on the decoding thread when it is ``heavy``."""
        if not heavy:
            return function(*args, **kwargs)
        call = asyncio.get_running_loop().run_in_executor(self._thread, lambda: function(*args, **kwargs))
        return await call


def early(result: TickResult) -> TickResult | None:
    """``result`` as it left before the frames that came besides it; None: it came whole."""
    if result.early is None:
        return None
    return replace(result, frames=None, frames_error=None, timings=result.early)


def _has_images(message: Ask) -> bool:
    if isinstance(message, pb.Observation):
        return any(tensor.encoding != pb.ENCODING_RAW for tensor in message.arrays.values())
    return isinstance(message, pb.PlanRequest) and message.goal.encoding != pb.ENCODING_RAW


def _tick(info: SessionInfo, message: Ask, limits: codec.Limits, began: float) -> TickRequest:
    if isinstance(message, pb.Observation):
        return _infer(info, message, limits, began)
    if isinstance(message, pb.PredictRequest):
        predict = codec.decode_predict(message, info.spec, limits)
        return TickRequest(
            session=info.id,
            token=info.token,
            seq=predict.seq,
            op=Op.PREDICT,
            actions=predict.actions,
            steps=predict.steps,
            deadline_ms=predict.deadline_ms,
            previews=predict.previews,
            spent_ms=_since(began),
        )
    if isinstance(message, pb.ReconditionRequest):
        run = codec.decode_recondition(message, info.spec, info.observation_keys, limits)
        return TickRequest(
            session=info.id,
            token=info.token,
            seq=run.seq,
            op=Op.RECONDITION,
            step=run.first_step,
            arrays=run.arrays,
            executed=run.executed,
            deadline_ms=run.deadline_ms,
            spent_ms=_since(began),
        )
    return _plan(info, message, limits, began)


def _infer(info: SessionInfo, message: pb.Observation, limits: codec.Limits, began: float) -> TickRequest:
    observation = codec.decode_observation(message, info.spec, info.observation_keys, limits)
    return TickRequest(
        session=info.id,
        token=info.token,
        seq=observation.seq,
        op=Op.INFER,
        step=observation.step,
        arrays=observation.arrays,
        executed=observation.executed,
        frames=observation.frames,
        deadline_ms=observation.deadline_ms,
        previews=observation.previews,
        supersede=observation.supersede,
        executed_through=observation.executed_through,
        spent_ms=_since(began),
    )


def _plan(info: SessionInfo, message: pb.PlanRequest, limits: codec.Limits, began: float) -> TickRequest:
    plan = codec.decode_plan(message, info.spec, limits)
    return TickRequest(
        session=info.id,
        token=info.token,
        seq=plan.seq,
        op=Op.PLAN,
        deadline_ms=plan.deadline_ms,
        spent_ms=_since(began),
        plan=PlanRequest(
            horizon=plan.horizon,
            candidates=plan.candidates,
            iterations=plan.iterations,
            method=plan.method,
            budget_ms=plan.budget_ms,
            goal=plan.goal,
            init=plan.init,
        ),
    )


def _since(began: float) -> float:
    return 1e3 * (time.perf_counter() - began)
