"""Requests of a session -> checked values: no array leaves here that the session's spec does not allow.

Whether the session's state and its pipeline allow the request is the orchestrator's to say.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from google.protobuf.message import DecodeError, Message
from numpy.typing import NDArray

from ..errors import InvalidInput, TensorError
from ..types import MAX_COUNT, Array, Observation, SessionSpec
from . import loop_pb2 as pb
from .check import check_actions, check_keys, check_observation
from .limits import Limits, check_name, shown
from .tensors import decode_tensor

M = TypeVar("M", bound=Message)


@dataclass(frozen=True, slots=True)
class Predict:
    """``actions float32[n, action_dim]`` or None; ``steps`` to imagine."""

    seq: int
    actions: NDArray[np.float32] | None
    steps: int
    deadline_ms: float


@dataclass(frozen=True, slots=True)
class Recondition:
    """``arrays`` with a leading axis of n steps from ``first_step`` on; ``executed float32[k, action_dim]``."""

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
        raise InvalidInput(f"the bytes are no {kind.DESCRIPTOR.full_name}, or text in them is not UTF-8") from None


def check_open(request: pb.OpenSessionRequest, limits: Limits) -> None:
    """Sizes of everything in it, before any name is looked up. Raises :class:`InvalidInput` (too large)."""
    limits.check_prompt(request.prompt)
    limits.check_count(len(request.observation_keys))
    limits.check_count(len(request.options))
    check_name("the pipeline", request.pipeline)
    check_name("the spec digest", request.spec_digest)
    for key in request.observation_keys:
        check_name("the observation key", key)
    for name, value in request.options.items():
        check_name("the option", name)
        check_name(f"option {name!r}: the value", value)


def decode_observation(message: pb.Observation, spec: SessionSpec, keys: Sequence[str], limits: Limits) -> Observation:
    """An INFER's observation with exactly the session's ``keys``. Raises :class:`InvalidInput`, for arrays
    its kind :class:`TensorError`."""
    _check_counts(message.seq, "step", message.step, message.deadline_ms)
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
    _check_counts(message.seq, "step", 0, message.deadline_ms)
    actions = _decode_actions("actions", message.actions, spec, limits) if message.HasField("actions") else None
    return Predict(message.seq, actions, message.steps, message.deadline_ms)


def decode_recondition(
    message: pb.ReconditionRequest, spec: SessionSpec, keys: Sequence[str], limits: Limits
) -> Recondition:
    """Raises as :func:`decode_observation` does."""
    _check_counts(message.seq, "first_step", message.first_step, message.deadline_ms)
    arrays = _decode_arrays(message.arrays, keys, limits)
    check_observation(spec, keys, arrays, leading=1)
    executed = _decode_actions("executed", message.executed, spec, limits) if message.HasField("executed") else None
    return Recondition(message.seq, message.first_step, arrays, executed, message.deadline_ms)


def _check_counts(seq: int, field: str, step: int, deadline_ms: float) -> None:
    if seq < 1:
        raise InvalidInput("seq starts at 1")
    if seq > MAX_COUNT:
        raise InvalidInput(f"seq is {seq}; it must be at most {MAX_COUNT}")
    if step < 0:
        raise InvalidInput(f"{field} {step} is negative; step 0 is the first observation after a reset")
    if step > MAX_COUNT:
        raise InvalidInput(f"{field} is {step}; it must be at most {MAX_COUNT}")
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
