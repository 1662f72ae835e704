"""From payloads to what a client reads. Nothing that is not finite or not as the spec says leaves the server,
and nothing that could not be encoded: that would be found only after the commit."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..action_queue import INPAINTED, JOINED, OVERLAP
from ..errors import Reason, StageFailed, nearest
from ..stage import Payload
from ..types import MAX_COUNT, ActionChunk, FramePrediction, Op, PlanSummary, Progress, SessionSpec, TickResult
from .graph import CompiledPlan
from .prepare import Work
from .tick import TickRun

_INFINITE = float("inf")
SEPARATOR = "+"  # in a chunk's revision, between what gave it and the rest of the pipeline


def read(spec: SessionSpec, plan: CompiledPlan, run: TickRun, work: Work, so_far: TickResult) -> TickResult:
    """``so_far`` with the final outputs that the open transaction of ``run`` gave."""
    final, seq, epoch = plan.plan, so_far.seq, so_far.epoch
    chunk, frames, progress, summary = so_far.chunk, so_far.frames, so_far.progress, so_far.plan
    if final.chunk is not None and run.gave(final.chunk):
        payload = run.output(final.chunk)
        rows = work.count if work.op is Op.PLAN else spec.horizon
        own = read_chunk(payload, spec, seq, work.present, epoch, rows)
        own = replace(own, policy_revision=of_all(own.policy_revision, run.revisions))
        chunk = joined(own, payload, work.frozen)
        summary = read_summary(payload, seq, rows) if work.op is Op.PLAN else None
    if final.frames is not None and run.gave(final.frames):
        first = work.step + (work.op is not Op.RECONDITION)
        frames = read_frames(run.output(final.frames), spec, seq, first, epoch, work.count)
    if final.progress is not None and run.gave(final.progress):
        progress = read_progress(run.output(final.progress), seq, work.present, epoch)
    return TickResult(seq, epoch, chunk, frames, progress, plan=summary)


def read_chunk(payload: Payload, spec: SessionSpec, seq: int, step: int, epoch: int, rows: int) -> ActionChunk:
    """``actions float32[rows, action_dim]`` within the spec's range; StageFailed (BAD_OUTPUT) otherwise."""
    actions = _array(payload, "actions")
    _expect("actions", actions, "float32", (rows, *spec.action.shape))
    low, high = spec.action.low, spec.action.high
    least, greatest = float(actions.min()), float(actions.max())  # NaN when any value is
    if not -_INFINITE < least <= greatest < _INFINITE:
        raise _bad("'actions' holds values that are not finite")
    if low is not None and least < low:
        raise _bad(f"an action of {least:g}{_unit(spec)} is below the spec's {low:g}")
    if high is not None and greatest > high:
        raise _bad(f"an action of {greatest:g}{_unit(spec)} is above the spec's {high:g}")
    return ActionChunk(seq, step, actions, epoch, _text(payload, "revision"))


@lru_cache(maxsize=64)
def of_all(own: str, stages: tuple[tuple[str, str], ...]) -> str:
    """The revision of a chunk: ``own``, which what gave it says, and where other ``stages`` of the pipeline have others
    a digest of those. A context that was trained anew acts otherwise under the same act head, and what a stage has of
    others, such as the codec, is in the revision of a stage of its own."""
    others = [(name, revision) for name, revision in stages if revision not in ("", own)]
    if not others:
        return own
    digest = hashlib.blake2b(json.dumps(others).encode(), digest_size=4).hexdigest()
    return f"{own}{SEPARATOR}{digest}"


def joined(chunk: ActionChunk, payload: Payload, frozen: NDArray[np.float32] | None) -> ActionChunk:
    """``chunk`` behind the ``frozen`` rows of the one before, bit for bit as they were sent, labelled with how its rest
    joins them: the policy's own word, or ``overlap``."""
    if frozen is None:
        return chunk
    how = _text(payload, JOINED)
    if how not in ("", INPAINTED):
        raise _bad(f"a chunk is {how!r:.40}, expected {INPAINTED!r} or nothing")
    actions = np.concatenate([frozen, chunk.actions[len(frozen) :]])
    return replace(chunk, actions=actions, frozen=len(frozen), joined=how or OVERLAP * bool(len(frozen)))


def read_frames(payload: Payload, spec: SessionSpec, seq: int, first: int, epoch: int, count: int) -> FramePrediction:
    """``frames uint8[count, h, w, 3]`` and maybe ``scene float32[count, points, 2]``."""
    frames = _array(payload, "frames")
    if spec.frame is None:  # the graph was checked against the spec
        raise _bad("frames from a pipeline whose spec has none")
    _expect("frames", frames, "uint8", (count, *spec.frame.shape))
    scene = None
    if "scene" in payload.arrays:
        scene = _array(payload, "scene")
        _expect("scene", scene, "float32", (count, -1, 2))
        _finite("scene", scene)
    return FramePrediction(seq, first, frames, epoch, scene)


def read_part(payload: Payload, spec: SessionSpec, seq: int, work: Work, epoch: int, part: int) -> FramePrediction:
    """Frames of the tick that are not all of them, and maybe not finished; what they are is in the payload's meta."""
    frames, first = _array(payload, "frames"), payload.meta.get("first_step")
    begin = work.step + (work.op is not Op.RECONDITION)
    count = len(frames) if frames.ndim else 0
    if type(first) is not int or not begin <= first < begin + work.count or not 0 < count <= begin + work.count - first:
        raise _bad(f"a part has {count} frames from step {first!r}, expected some of {work.count} from {begin}")
    preview = bool(payload.meta.get("preview", False))
    return replace(read_frames(payload, spec, seq, first, epoch, count), preview=preview, part=part)


def read_progress(payload: Payload, seq: int, step: int, epoch: int) -> Progress:
    """``progress`` and ``done``, scalars in 0..1. A stage that judged another step says so in ``meta['step']``."""
    at = int(payload.meta.get("step", step))
    if not 0 <= at <= 2 * MAX_COUNT:
        raise _bad(f"progress is of step {at}, expected 0..{2 * MAX_COUNT}")
    return Progress(seq, at, _share(payload, "progress"), _share(payload, "done"), epoch)


def read_summary(payload: Payload, seq: int, horizon: int) -> PlanSummary:
    """How a plan was found, from its payload's meta; StageFailed (BAD_OUTPUT) when that does not say."""
    meta = payload.meta
    for name in ("cost", "first_cost", "candidates", "iterations"):
        value = meta.get(name)
        if not isinstance(value, (int, float)) or not np.isfinite(value):
            raise _bad(f"a plan's {name!r} is {value!r}, expected a number")
    return PlanSummary(
        seq=seq,
        cost=float(meta["cost"]),
        first_cost=float(meta["first_cost"]),
        candidates=int(meta["candidates"]),
        iterations=int(meta["iterations"]),
        horizon=horizon,
        out_of_time=bool(meta.get("out_of_time", False)),
    )


def _share(payload: Payload, name: str) -> float:
    array = _array(payload, name)
    if array.size != 1:
        raise _bad(f"{name!r} has shape {list(array.shape)}, expected a scalar")
    value = float(array.reshape(()))
    if not 0.0 <= value <= 1.0:  # false for NaN too
        raise _bad(f"{name!r} is {value:g}, expected 0..1")
    return value


def _text(payload: Payload, name: str) -> str:
    text = str(payload.meta.get(name, ""))
    try:
        text.encode()
    except UnicodeEncodeError:
        raise _bad(f"{name!r} is not valid UTF-8") from None
    return text


def _array(payload: Payload, name: str) -> NDArray[Any]:
    if name not in payload.arrays:
        raise _bad(f"no array {name!r}.{nearest(name, payload.arrays)}")
    return np.asarray(payload.arrays[name])


def _expect(name: str, array: NDArray[Any], dtype: str, shape: tuple[int, ...]) -> None:
    fits = array.ndim == len(shape) and all(e in (-1, d) for e, d in zip(shape, array.shape, strict=True))
    if array.dtype != dtype or not fits:
        got = f"{array.dtype}{list(array.shape)}"
        raise _bad(f"{name!r} is {got}, expected {dtype}{list(shape)}")


def _finite(name: str, array: NDArray[Any]) -> None:
    if not np.isfinite(array).all():
        raise _bad(f"{name!r} holds values that are not finite")


def _unit(spec: SessionSpec) -> str:
    return f" {spec.action.unit}" if spec.action.unit else ""


def _bad(text: str) -> StageFailed:
    return StageFailed(f"the model's output is not as the spec says: {text}", reason=Reason.BAD_OUTPUT)
