"""TickResult <-> proto."""

from __future__ import annotations

import math

import numpy as np

from ..errors import OmniLoopError, Reason, StageFailed, TensorError
from ..types import ActionChunk, Array, FramePrediction, PlanSummary, Progress, SessionSpec, TickResult, Timings
from . import loop_pb2 as pb
from .faults import decode_error, encode_error
from .limits import Limits, shown
from .tensors import decode_tensor, encode_tensor


def encode_result(result: TickResult) -> pb.TickReply:
    chunk, progress = result.chunk, result.progress
    return pb.TickReply(
        seq=result.seq,
        epoch=result.epoch,
        chunk=None
        if chunk is None
        else pb.ActionChunk(
            first_step=chunk.first_step,
            actions=encode_tensor(chunk.actions),
            policy_revision=chunk.policy_revision,
            frozen=chunk.frozen,
            joined=chunk.joined,
        ),
        frames=None if result.frames is None else encode_frames(result.frames),
        progress=None
        if progress is None
        else pb.Progress(step=progress.step, progress=progress.progress, done=progress.done),
        timings=pb.Timings(
            total_ms=result.timings.total_ms,
            model_ms=result.timings.model_ms,
            queue_ms=result.timings.queue_ms,
            stages_ms=result.timings.stages_ms,
        ),
        frames_error=None
        if result.frames_error is None
        else encode_error(result.frames_error, result.seq, result.epoch),
        plan=None if result.plan is None else _encode_plan(result.plan),
    )


def _encode_plan(plan: PlanSummary) -> pb.PlanSummary:
    return pb.PlanSummary(
        cost=plan.cost,
        first_cost=plan.first_cost,
        candidates=plan.candidates,
        iterations=plan.iterations,
        horizon=plan.horizon,
        out_of_time=plan.out_of_time,
    )


def encode_frames(frames: FramePrediction) -> pb.FramePrediction:
    return pb.FramePrediction(
        first_step=frames.first_step,
        frames=encode_tensor(frames.frames),
        scene=None if frames.scene is None else encode_tensor(frames.scene),
        preview=frames.preview,
        seq=frames.seq,
        epoch=frames.epoch,
        part=frames.part,
    )


def encode_frames_error(error: OmniLoopError, seq: int, epoch: int) -> pb.FramePrediction:
    """In place of frames that were asked for besides an answer already sent."""
    return pb.FramePrediction(seq=seq, epoch=epoch, error=encode_error(error, seq, epoch))


def decode_result(reply: pb.TickReply, spec: SessionSpec, limits: Limits) -> TickResult:
    """Arrays are read-only and finite. Raises :class:`StageFailed` (bad output) when the server broke its spec."""
    return TickResult(
        seq=reply.seq,
        epoch=reply.epoch,
        chunk=_decode_chunk(reply, spec, limits) if reply.HasField("chunk") else None,
        frames=decode_frames(reply.frames, spec, limits) if reply.HasField("frames") else None,
        progress=Progress(
            seq=reply.seq,
            step=reply.progress.step,
            progress=reply.progress.progress,
            done=reply.progress.done,
            epoch=reply.epoch,
        )
        if reply.HasField("progress")
        else None,
        timings=_decode_timings(reply.timings),
        frames_error=decode_error(reply.frames_error) if reply.HasField("frames_error") else None,
        plan=_decode_plan(reply) if reply.HasField("plan") else None,
    )


def decode_frames(message: pb.FramePrediction, spec: SessionSpec, limits: Limits) -> FramePrediction:
    """Raises the typed error the message carries, or :class:`StageFailed` for frames that break the spec."""
    if message.HasField("error"):
        raise decode_error(message.error)
    frames = _decode("frames", message.frames, limits)
    want = None if spec.frame is None else tuple(spec.frame.shape)
    if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[1:] != want:
        raise _broken(f"frames {frames.dtype.name} {shown(frames.shape)}")
    return FramePrediction(
        seq=message.seq,
        first_step=message.first_step,
        frames=frames,
        epoch=message.epoch,
        scene=_decode("scene", message.scene, limits) if message.HasField("scene") else None,
        preview=message.preview,
        part=message.part,
    )


def _decode_chunk(reply: pb.TickReply, spec: SessionSpec, limits: Limits) -> ActionChunk:
    actions = _decode("actions", reply.chunk.actions, limits)
    if actions.dtype != np.float32 or actions.ndim != 2 or actions.shape[1:] != tuple(spec.action.shape):
        raise _broken(f"actions {actions.dtype.name} {shown(actions.shape)}")
    return ActionChunk(
        seq=reply.seq,
        first_step=reply.chunk.first_step,
        actions=actions,
        epoch=reply.epoch,
        policy_revision=reply.chunk.policy_revision,
        timings=_decode_timings(reply.timings),
        frozen=reply.chunk.frozen,
        joined=reply.chunk.joined,
    )


def _decode_plan(reply: pb.TickReply) -> PlanSummary:
    plan = reply.plan
    if not (math.isfinite(plan.cost) and math.isfinite(plan.first_cost)):
        raise _broken(f"a plan's cost of {plan.cost} (first {plan.first_cost})")
    return PlanSummary(
        seq=reply.seq,
        cost=plan.cost,
        first_cost=plan.first_cost,
        candidates=plan.candidates,
        iterations=plan.iterations,
        horizon=plan.horizon,
        out_of_time=plan.out_of_time,
    )


def _decode_timings(message: pb.Timings) -> Timings:
    return Timings(message.total_ms, message.model_ms, message.queue_ms, dict(message.stages_ms))


def _decode(name: str, tensor: pb.Tensor, limits: Limits) -> Array:
    try:
        return decode_tensor(name, tensor, limits)
    except TensorError as error:
        raise _broken(error.text) from error


def _broken(what: str) -> StageFailed:
    return StageFailed(f"the server's answer breaks its own spec: {what}", reason=Reason.BAD_OUTPUT)
