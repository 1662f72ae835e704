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

from ..errors import SHOWN, InvalidInput, Reason, TensorError, Unsupported, nearest
from ..types import MAX_COUNT, Array, ArraySpec, Observation, Op, SessionSpec
from . import loop_pb2 as pb
from .check import check_actions, check_array, check_keys, check_observation
from .limits import MAX_CANDIDATES, MAX_ITERATIONS, Limits, check_name, shown
from .tensors import decode_tensor

M = TypeVar("M", bound=Message)
METHODS = ("cem", "mppi")
PLAN_HORIZON, PLAN_CANDIDATES, PLAN_ITERATIONS = 8, 64, 3  # where a request leaves the choice to the server


@dataclass(frozen=True, slots=True)
class Predict:
    """``actions float32[n, action_dim]`` or None; ``steps`` to imagine."""

    seq: int
    actions: NDArray[np.float32] | None
    steps: int
    deadline_ms: float
    previews: bool = False


@dataclass(frozen=True, slots=True)
class Recondition:
    """``arrays`` with a leading axis of n steps from ``first_step`` on; ``executed float32[k, action_dim]``."""

    seq: int
    first_step: int
    arrays: Mapping[str, Array]
    executed: NDArray[np.float32] | None
    deadline_ms: float


@dataclass(frozen=True, slots=True)
class Plan:
    """What to search for; ``goal uint8[h, w, 3]``, ``init float32[horizon, action_dim]``."""

    seq: int
    horizon: int
    candidates: int
    iterations: int
    method: str
    budget_ms: float
    goal: NDArray[np.uint8] | None
    init: NDArray[np.float32] | None
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
    for name, value in sorted(request.options.items()):
        check_name("the option", name)
        check_name(f"option {name!r}: the value", value)


def check_plan(message: pb.PlanRequest, spec: SessionSpec) -> int:
    """Everything in it but its arrays; the horizon to plan for.

    Raises :class:`Unsupported` when the pipeline cannot plan, else :class:`InvalidInput` that names what is out of
    its bounds, for another number of ``init``'s rows than of steps :class:`TensorError`.
    """
    _check_plans(spec)  # before the horizon, whose bound may be 0 there
    rows = message.init.shape[0] if message.init.shape else None
    if message.HasField("horizon"):
        horizon = message.horizon
    else:
        horizon = min(PLAN_HORIZON, spec.max_predict) if rows is None else rows
    _check_between("horizon", horizon, spec.max_predict)
    if message.HasField("candidates"):
        _check_between("candidates", message.candidates, MAX_CANDIDATES)
    if message.HasField("iterations"):
        _check_between("iterations", message.iterations, MAX_ITERATIONS)
    if message.method and message.method not in METHODS:
        cut = f"{message.method[:SHOWN]!r}..." if len(message.method) > SHOWN else repr(message.method)
        raise InvalidInput(f"unknown method {cut}.{nearest(message.method, METHODS)}")
    if not (math.isfinite(message.budget_ms) and message.budget_ms >= 0):
        raise InvalidInput(f"budget_ms is {message.budget_ms}; it must be 0 (none) or a positive number")
    if rows is not None and rows != horizon:
        raise TensorError(f"'init' has {rows} rows, but horizon is {horizon}: send one row per step")
    return horizon


def _check_between(name: str, value: int, most: int) -> None:
    if not 1 <= value <= most:
        raise InvalidInput(f"{name} is {value}; it must be at least 1 and at most {most}")


def check_list(request: pb.ListSessionsRequest, limits: Limits) -> None:
    """Raises :class:`InvalidInput` (too large) when it asks for more sessions than there can be."""
    if len(request.sessions) > limits.max_sessions:
        raise InvalidInput(
            f"details of {len(request.sessions)} sessions are asked for; at most {limits.max_sessions} are open",
            reason=Reason.TOO_LARGE,
        )


def check_rewind(request: pb.RewindRequest) -> None:
    """Raises :class:`InvalidInput` for a step nobody can stand at."""
    _check_step("step", request.step, 2 * MAX_COUNT)  # an observation at the last one, and what was imagined after it


def _check_step(name: str, step: int, most: int) -> None:
    if step < 0:
        raise InvalidInput(f"{name} {step} is negative; step 0 is the first observation after a reset")
    if step > most:
        raise InvalidInput(f"{name} is {step}; it must be at most {most}")


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
        previews=message.previews,
        supersede=message.supersede,
        executed_through=_executed_through(message),
    )


def _executed_through(message: pb.Observation) -> int | None:
    if not message.HasField("executed_through"):
        return None
    through = message.executed_through
    if not message.step - 1 <= through <= MAX_COUNT:
        raise InvalidInput(
            f"executed_through is {through}; it must be at least {message.step - 1}, the step before the observation's"
        )
    return through


def decode_predict(message: pb.PredictRequest, spec: SessionSpec, limits: Limits) -> Predict:
    """Raises as :func:`decode_observation` does."""
    _check_counts(message.seq, "step", 0, message.deadline_ms)
    actions = _decode_actions("actions", message.actions, spec, limits) if message.HasField("actions") else None
    return Predict(message.seq, actions, message.steps, message.deadline_ms, message.previews)


def decode_recondition(
    message: pb.ReconditionRequest, spec: SessionSpec, keys: Sequence[str], limits: Limits
) -> Recondition:
    """Raises as :func:`decode_observation` does."""
    _check_counts(message.seq, "first_step", message.first_step, message.deadline_ms)
    arrays = _decode_arrays(message.arrays, keys, limits)
    check_observation(spec, keys, arrays, leading=1)
    executed = _decode_actions("executed", message.executed, spec, limits) if message.HasField("executed") else None
    return Recondition(message.seq, message.first_step, arrays, executed, message.deadline_ms)


def decode_plan(message: pb.PlanRequest, spec: SessionSpec, limits: Limits) -> Plan:
    """With the server's choice for what is absent. Raises as :func:`decode_observation` does;
    :class:`Unsupported` when the pipeline cannot plan, or takes no goal frame."""
    _check_counts(message.seq, "step", 0, message.deadline_ms)
    horizon = check_plan(message, spec)
    return Plan(
        seq=message.seq,
        horizon=horizon,
        candidates=message.candidates if message.HasField("candidates") else PLAN_CANDIDATES,
        iterations=message.iterations if message.HasField("iterations") else PLAN_ITERATIONS,
        method=message.method or METHODS[0],
        budget_ms=message.budget_ms,
        goal=_decode_goal(message.goal, spec, limits) if message.HasField("goal") else None,
        init=_decode_actions("init", message.init, spec, limits) if message.HasField("init") else None,
        deadline_ms=message.deadline_ms,
    )


def goal_spec(spec: SessionSpec) -> ArraySpec:
    """What a goal frame must be; raises :class:`Unsupported` where there is no Plan, or no frames."""
    _check_plans(spec)
    if spec.frame is None:
        raise Unsupported(f"pipeline {spec.pipeline!r} has no frames, so it takes no goal frame; leave it out")
    return spec.frame


def _check_plans(spec: SessionSpec) -> None:
    if Op.PLAN not in spec.ops:
        raise Unsupported(f"pipeline {spec.pipeline!r} cannot plan; it can {', '.join(sorted(spec.ops))}")


def _decode_goal(tensor: pb.Tensor, spec: SessionSpec, limits: Limits) -> NDArray[np.uint8]:
    wanted = goal_spec(spec)
    goal = decode_tensor("goal", tensor, limits)
    check_array(wanted, goal, name="goal")
    return goal


def _check_counts(seq: int, field: str, step: int, deadline_ms: float) -> None:
    if seq < 1:
        raise InvalidInput("seq starts at 1")
    if seq > MAX_COUNT:
        raise InvalidInput(f"seq is {seq}; it must be at most {MAX_COUNT}")
    _check_step(field, step, MAX_COUNT)
    if not (math.isfinite(deadline_ms) and deadline_ms >= 0):
        raise InvalidInput(f"deadline_ms is {deadline_ms}; it must be 0 (none) or a positive number")


def _decode_arrays(arrays: Any, keys: Sequence[str], limits: Limits) -> dict[str, Array]:
    # Names first: 100,000 wrong keys must not cost 100,000 decodings.
    limits.check_count(len(arrays))
    check_keys(keys, arrays)
    # In the session's order: a protobuf map's own changes from process to process, and with it which error is named.
    return {name: decode_tensor(name, arrays[name], limits) for name in keys}


def _decode_actions(name: str, tensor: pb.Tensor, spec: SessionSpec, limits: Limits) -> NDArray[np.float32]:
    actions = decode_tensor(name, tensor, limits)
    if actions.ndim != 2:
        raise TensorError(f"{name!r} has shape {shown(actions.shape)}; it must be [n,{spec.action.shape[0]}]")
    check_actions(spec, actions, name)
    return actions
