"""Requests of a session -> checked values. Nothing leaves here that the session's spec does not allow."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from google.protobuf.message import DecodeError, Message
from numpy.typing import NDArray

from ..errors import InvalidInput, TensorError
from ..types import Array, Observation, Op, SessionSpec
from . import loop_pb2 as pb
from .check import check_actions, check_frames, check_keys, check_observation, check_op
from .limits import Limits, shown
from .tensors import decode_tensor

M = TypeVar("M", bound=Message)


@dataclass(frozen=True, slots=True)
class Predict:
    """``actions float32[n, action_dim]``, or None and ``steps`` imagined ones."""

    seq: int
    actions: NDArray[np.float32] | None
    steps: int
    deadline_ms: float


@dataclass(frozen=True, slots=True)
class Recondition:
    """``arrays`` with a leading axis of n steps from ``first_step`` on; ``executed float32[n or n - 1, dim]``."""

    seq: int
    first_step: int
    arrays: Mapping[str, Array]
    executed: NDArray[np.float32] | None
    deadline_ms: float


def parse(kind: type[M], raw: bytes, limits: Limits) -> M:
    """The message in ``raw``; raises :class:`InvalidInput` for anything that is none, or too large."""
    limits.check_message(len(raw))
    try:
        return kind.FromString(raw)
    except DecodeError:
        raise InvalidInput(f"not a {kind.DESCRIPTOR.full_name} message, or text in it is not UTF-8") from None


def decode_observation(message: pb.Observation, spec: SessionSpec, keys: Sequence[str], limits: Limits) -> Observation:
    """An INFER's observation with exactly the session's ``keys``. Raises :class:`InvalidInput`, of which
    :class:`TensorError` for arrays, or :class:`Unsupported`."""
    check_op(spec, Op.INFER)
    _check_counts(message.seq, message.step, message.deadline_ms)
    check_frames(spec, message.frames)
    arrays = _decode_arrays(message.arrays, keys, limits)
    check_observation(spec, keys, arrays)
    executed = _decode_actions("executed", message.executed, spec, limits) if message.HasField("executed") else None
    return Observation(
        seq=message.seq,
        step=message.step,
        arrays=arrays,
        executed=executed,
        captured_ns=message.captured_ns,
        frames=message.frames,
        deadline_ms=message.deadline_ms,
    )


def decode_predict(message: pb.PredictRequest, spec: SessionSpec, limits: Limits) -> Predict:
    """Raises as :func:`decode_observation` does."""
    check_op(spec, Op.PREDICT)
    _check_counts(message.seq, 0, message.deadline_ms)
    actions = _decode_actions("actions", message.actions, spec, limits) if message.HasField("actions") else None
    steps = message.steps if actions is None else len(actions)
    if actions is not None and message.steps not in (0, steps):
        raise InvalidInput(f"{steps} actions came with steps={message.steps}; leave steps out when sending actions")
    if not 1 <= steps <= spec.max_predict:
        raise InvalidInput(f"Predict of {steps} steps; between 1 and {spec.max_predict} are taken")
    return Predict(message.seq, actions, steps, message.deadline_ms)


def decode_recondition(
    message: pb.ReconditionRequest, spec: SessionSpec, keys: Sequence[str], limits: Limits
) -> Recondition:
    """Raises as :func:`decode_observation` does."""
    check_op(spec, Op.RECONDITION)
    _check_counts(message.seq, message.first_step, message.deadline_ms)
    arrays = _decode_arrays(message.arrays, keys, limits)
    check_observation(spec, keys, arrays, leading=1)
    executed = _decode_actions("executed", message.executed, spec, limits) if message.HasField("executed") else None
    check_run(arrays, executed)
    return Recondition(message.seq, message.first_step, arrays, executed, message.deadline_ms)


def check_run(arrays: Mapping[str, Array], executed: Array | None) -> int:
    """n of a run of steps: every array has n >= 1 of them, ``executed`` n or n - 1 rows. :class:`TensorError`."""
    lengths = {name: len(array) for name, array in arrays.items()}
    n = next(iter(lengths.values()), 0)
    if n < 1 or any(length != n for length in lengths.values()):
        raise TensorError(f"every array must have the same number of steps, at least 1; they have {lengths}")
    rows = 0 if executed is None else len(executed)
    if rows not in (n - 1, n):
        raise TensorError(f"'executed' has {rows} rows for {n} steps; it must have {n}, or {n - 1} at the start")
    return n


def _check_counts(seq: int, step: int, deadline_ms: float) -> None:
    if seq < 1:
        raise InvalidInput("seq starts at 1")
    if step < 0:
        raise InvalidInput(f"step {step} is negative; step 0 is the first observation after a reset")
    if not (math.isfinite(deadline_ms) and deadline_ms >= 0):
        raise InvalidInput(f"deadline_ms is {deadline_ms}; it must be 0 (none) or a positive number")


def _decode_arrays(arrays: Any, keys: Sequence[str], limits: Limits) -> dict[str, Array]:
    # Names first: 100,000 wrong keys must not cost 100,000 decodings.
    limits.check_count(len(arrays))
    check_keys(keys, arrays)
    return {name: decode_tensor(name, tensor, limits) for name, tensor in arrays.items()}


def _decode_actions(name: str, tensor: pb.Tensor, spec: SessionSpec, limits: Limits) -> NDArray[np.float32]:
    actions = decode_tensor(name, tensor, limits)
    if actions.ndim != 2:
        raise TensorError(f"{name!r} has shape {shown(actions.shape)}; it must be [n,{spec.action.shape[0]}]")
    check_actions(spec, actions, name)
    return actions
