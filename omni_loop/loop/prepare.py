"""From a request to the work of its tick: what fits the session, what the stages are told, where it leads."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..action_queue import FROZEN, JOINS
from ..errors import InvalidInput, Reason, StateError, Unsupported, nearest
from ..messages import PayloadKind, Scalar
from ..session.machine import Position
from ..session.manager import Session
from ..stage import Payload
from ..types import MAX_COUNT, ActionChunk, Op, SessionSpec
from ..wire.limits import MAX_CANDIDATES, MAX_ITERATIONS, MAX_PLANNED_FRAMES
from .graph import ACTIONS, EXECUTED, GOAL, OBSERVATION, CompiledPipeline, CompiledPlan
from .request import TickRequest

PLAN_METHODS = ("cem", "mppi")


@dataclass(frozen=True, slots=True)
class Work:
    """One tick, ready to run. ``count``: frames (or steps) it must deliver; ``position`` holds after its commit;
    ``present``: the step a chunk begins at and progress is judged at."""

    op: Op
    step: int
    present: int
    count: int
    params: Mapping[str, Scalar]
    sent: Mapping[str, Payload]  # by the client, under the names of its outputs
    position: Position
    past: bool  # replaces committed steps: a new epoch begins at its commit
    # float32[n, action_dim]: rows of the chunk before that the new one begins with; None: it joins none.
    frozen: NDArray[np.float32] | None = None


def check_keys(spec: SessionSpec, keys: Sequence[str]) -> tuple[str, ...]:
    """The observation keys of a session: required ones, and the optional ones chosen. Empty: the required."""
    known = [s.name for s in spec.observations]
    required = {s.name for s in spec.observations if not s.optional}
    if not keys:
        return tuple(k for k in known if k in required)
    for key in keys:
        if key not in known:
            raise InvalidInput(f"pipeline {spec.pipeline!r} has no observation key {key!r}.{nearest(key, known)}")
    if missing := sorted(required - set(keys)):
        raise InvalidInput(f"pipeline {spec.pipeline!r} needs the observation keys {', '.join(missing)} too")
    return tuple(k for k in known if k in set(keys))


def check_prompt(spec: SessionSpec, prompt: str) -> None:
    if prompt and not spec.prompt:
        raise Unsupported(f"pipeline {spec.pipeline!r} reads no prompt; leave it empty")


def check_seed(seed: int | None) -> int:
    """``seed``, or a fresh one."""
    if seed is None:
        return secrets.randbits(63)
    if not 0 <= seed < 1 << 64:
        raise InvalidInput(f"seed {seed} is outside 0..2**64 - 1")
    return seed


def check_options(known: Mapping[str, Scalar], given: Mapping[str, Scalar], pipeline: str) -> dict[str, Scalar]:
    """The pipeline's options with a session's choices; text from the wire becomes the default's type."""
    chosen = dict(known)
    for name, value in given.items():
        if name not in known:
            raise InvalidInput(f"pipeline {pipeline!r} has no option {name!r}.{nearest(name, known)}")
        chosen[name] = _as_type_of(known[name], value, name)
    return chosen


def _as_type_of(default: Scalar, value: Scalar, name: str) -> Scalar:
    kind = type(default)
    try:
        if kind is bool and isinstance(value, str):
            return {"true": True, "false": False}[value.lower()]
        if isinstance(value, str) or (kind is float and type(value) is int):
            return kind(value)
    except (KeyError, ValueError):
        pass  # the same refusal as for a value of another type
    if type(value) is not kind:
        raise InvalidInput(f"option {name!r} is {value!r}, expected {kind.__name__} as in {default!r}")
    return value


def check_request(graph: CompiledPipeline, keys: tuple[str, ...], request: TickRequest) -> CompiledPlan:
    """Refuse what can never run in this session, whatever its state; returns the plan to run."""
    spec = graph.spec
    plan = graph.plans.get(request.op)
    if plan is None:
        can = ", ".join(sorted(graph.plans))
        raise Unsupported(f"pipeline {spec.pipeline!r} cannot {request.op}; it can {can}")
    if request.frames:
        _check_frames(spec, plan, request)
    if request.step < 0:
        raise InvalidInput(f"step is {request.step}; the first observation after a reset is step 0")
    for name, value in (("seq", request.seq), ("step", request.step)):
        if value > MAX_COUNT:  # the answer, which comes after the commit, could not be encoded
            raise InvalidInput(f"{name} is {value}; it must be at most {MAX_COUNT}")
    if request.deadline_ms < 0:
        raise InvalidInput(f"deadline_ms is {request.deadline_ms:g}; 0 means none")
    if request.executed_through is not None and request.executed_through < request.step - 1:
        text = f"executed_through is {request.executed_through}; it must be at least {request.step - 1}"
        raise InvalidInput(f"{text}, the step before the observation's")
    expected = () if request.op in (Op.PREDICT, Op.PLAN) else keys
    if request.arrays.keys() != set(expected):
        raise InvalidInput(_keys_text(request, expected))
    if request.op is Op.PREDICT:
        _predicted_steps(spec, plan, request)
    elif request.actions is not None or request.steps:
        raise InvalidInput(f"{request.op} takes no actions and no steps; send what was executed as 'executed'")
    if request.executed is not None and request.op is not Op.PREDICT:
        _check_actions("executed", request.executed, spec)
    if request.op is Op.PLAN:
        _check_plan(spec, request)
    elif request.plan is not None:
        raise InvalidInput(f"{request.op} searches for nothing; send what to plan for with a plan")
    return plan


def _check_frames(spec: SessionSpec, plan: CompiledPlan, request: TickRequest) -> None:
    if request.op is not Op.INFER:
        raise InvalidInput(f"frames are asked for besides an infer; {request.op} has its own count")
    if plan.plan.frames is None:
        raise Unsupported(f"pipeline {spec.pipeline!r} predicts no frames besides a chunk")
    if not 0 < request.frames <= spec.max_predict:
        raise InvalidInput(f"frames is {request.frames}; pipeline {spec.pipeline!r} predicts 1..{spec.max_predict}")


def _keys_text(request: TickRequest, expected: tuple[str, ...]) -> str:
    missing = sorted(set(expected) - request.arrays.keys())
    extra = sorted(request.arrays.keys() - set(expected))
    parts = []
    if missing:
        parts.append(f"missing {', '.join(missing)}")
    if extra:
        parts.append(f"extra {', '.join(extra)}")
    return f"observation keys: {'; '.join(parts)} (this session sends {', '.join(expected) or 'none'})"


def _check_plan(spec: SessionSpec, request: TickRequest) -> None:
    wanted = request.plan
    if wanted is None:
        raise InvalidInput("plan says nothing of what to search for: send 'plan'")
    if request.executed is not None:
        raise InvalidInput("plan takes no 'executed' actions: it continues from where the session stands")
    for name, value, most in (
        ("horizon", wanted.horizon, spec.max_predict),
        ("candidates", wanted.candidates, MAX_CANDIDATES),
        ("iterations", wanted.iterations, MAX_ITERATIONS),
    ):
        if not 1 <= value <= most:
            raise InvalidInput(f"{name} is {value}; pipeline {spec.pipeline!r} plans with 1..{most}")
    if (frames := wanted.candidates * wanted.horizon * wanted.iterations) > MAX_PLANNED_FRAMES:
        text = f"candidates x horizon x iterations imagine {frames} frames; one plan may imagine {MAX_PLANNED_FRAMES}"
        raise InvalidInput(text, reason=Reason.TOO_LARGE)
    if wanted.method not in PLAN_METHODS:
        raise InvalidInput(f"no method is called {wanted.method!r}.{nearest(wanted.method, PLAN_METHODS)}")
    if not 0 <= wanted.budget_ms < float("inf"):
        raise InvalidInput(f"budget_ms is {wanted.budget_ms:g}; 0 means none")
    if wanted.goal is not None:
        shape = None if spec.frame is None else spec.frame.shape
        if wanted.goal.shape != shape or wanted.goal.dtype != np.uint8:
            got, want = (
                f"{wanted.goal.dtype}{list(wanted.goal.shape)}",
                "no goal" if shape is None else f"uint8{[*shape]}",
            )
            raise InvalidInput(f"'goal' is {got}, expected {want}", reason=Reason.BAD_TENSOR)
    if wanted.init is not None:
        _check_actions("init", wanted.init, spec)
        if len(wanted.init) != wanted.horizon:
            text = f"'init' has {len(wanted.init)} rows for a horizon of {wanted.horizon}"
            raise InvalidInput(text, reason=Reason.BAD_TENSOR)


def _predicted_steps(spec: SessionSpec, plan: CompiledPlan, request: TickRequest) -> int:
    if request.executed is not None:
        raise InvalidInput("predict takes 'actions' to imagine, not 'executed' ones")
    if request.actions is None:
        if plan.needs_actions:
            raise InvalidInput(f"pipeline {spec.pipeline!r} predicts with the client's actions: send 'actions'")
        count = request.steps
    else:
        if not plan.takes_actions:
            raise InvalidInput(f"pipeline {spec.pipeline!r} imagines with its own policy: send 'steps', not 'actions'")
        _check_actions("actions", request.actions, spec)
        count = len(request.actions)
        if request.steps not in (0, count):
            raise InvalidInput(f"steps is {request.steps}, but 'actions' has {count} rows; send one of them")
    if not 1 <= count <= spec.max_predict:
        raise InvalidInput(f"predict of {count} steps; pipeline {spec.pipeline!r} predicts 1..{spec.max_predict}")
    return count


def _check_actions(name: str, actions: NDArray[np.float32], spec: SessionSpec) -> None:
    width = spec.action.shape[0]
    if actions.ndim != 2 or actions.shape[1] != width:
        raise InvalidInput(f"{name!r} has shape {list(actions.shape)}, expected [n, {width}]", reason=Reason.BAD_TENSOR)


def prepare(graph: CompiledPipeline, plan: CompiledPlan, session: Session, request: TickRequest) -> Work:
    """Fit ``request`` to the session's present state; called when its turn has come."""
    if request.op is Op.INFER:
        return _infer(graph.spec, plan, session, request)
    if request.op is Op.RECONDITION:
        return _recondition(graph.spec, session, request)
    if request.op is Op.PLAN:
        return _plan(graph, session, request)
    return _predict(graph, plan, session, request)


def _params(session: Session, spec: SessionSpec, **params: Scalar) -> dict[str, Scalar]:
    given = any(s.optional and s.name in session.keys for s in spec.observations)
    return {**session.options, "state_given": given, **params}


def _infer(spec: SessionSpec, plan: CompiledPlan, session: Session, request: TickRequest) -> Work:
    now, step = session.machine.position, request.step
    executed = _executed_before(spec, session, request)
    # Where the answer itself holds frames, the world has moved on in imagination when the tick commits.
    imagines = any(s.name == (plan.plan.frames or "").split(".")[0] for s in plan.answer)
    count = request.frames or (min(spec.execution_horizon, spec.max_predict) if imagines else 0)
    frozen, joins = _joins(session.chunk, request)
    return Work(
        op=Op.INFER,
        step=step,
        present=step,
        count=count,
        params=_params(session, spec, frames=count, first_step=step, **joins),
        sent={OBSERVATION: _observation(request, executed, step)},
        position=Position(step + count if imagines else step, step, step if now.origin < 0 else now.origin),
        past=False,
        frozen=frozen,
    )


def _joins(before: ActionChunk | None, request: TickRequest) -> tuple[NDArray[np.float32] | None, dict[str, Scalar]]:
    """The rows of the chunk ``before`` that are executed while the new one is made, and what a stage is told of it.
    Without real-time chunking, or where nothing of that chunk is left, the new one is made afresh."""
    if request.executed_through is None or before is None:
        return None, {}
    left = before.actions[max(request.step - before.first_step, 0) :]
    if request.step < before.first_step or not len(left):
        return None, {}
    frozen = left[: request.executed_through - request.step + 1]
    return frozen, {FROZEN: len(frozen), JOINS: before.first_step}


def _executed_before(spec: SessionSpec, session: Session, request: TickRequest) -> NDArray[np.float32]:
    """``float32[step - last observed step, action_dim]``, as sent or from the session's last chunk."""
    last, step, sent = session.machine.position.observed, request.step, request.executed
    if step < last:
        text = f"step {step} is before the session's last observation, step {last}: reset, or recondition"
        raise StateError(text, reason=Reason.BAD_REQUEST)
    rows = step - last if last >= 0 else 0
    if sent is not None:
        if len(sent) != rows:
            since = f"step {step} follows step {last}" if last >= 0 else "no observation came before"
            raise InvalidInput(f"'executed' has {len(sent)} rows, but {since}: send {rows}", reason=Reason.BAD_TENSOR)
        return sent
    if rows == 0:
        return np.zeros((0, spec.action.shape[0]), np.float32)
    chunk = session.chunk
    if chunk is None or chunk.first_step > last or step > chunk.first_step + len(chunk.actions):
        raise InvalidInput(f"send 'executed': the last chunk does not cover steps {last} to {step}")
    return chunk.actions[last - chunk.first_step : step - chunk.first_step]


def _recondition(spec: SessionSpec, session: Session, request: TickRequest) -> Work:
    now, first = session.machine.position, request.step
    counts = {name: array.shape[0] if array.ndim else 0 for name, array in request.arrays.items()}
    count = next(iter(counts.values()), 0)
    if count < 1 or any(c != count for c in counts.values()):
        shown = ", ".join(f"{name} {c}" for name, c in counts.items())
        raise InvalidInput(f"recondition wants the same number of frames (>= 1) in every key, not {shown}")
    fresh = now.origin < 0 or first <= now.origin  # nothing is left before the first frame
    if not fresh and first > now.step + 1:
        text = f"frames from step {first} leave a gap: the session is at step {now.step}, the next is {now.step + 1}"
        raise StateError(text, reason=Reason.BAD_REQUEST)
    rows = count - 1 if fresh else count
    executed = request.executed if request.executed is not None else np.zeros((0, spec.action.shape[0]), np.float32)
    if len(executed) != rows:
        why = "each has a predecessor"
        if fresh:
            there = f"first_step is {first}, the session's frames begin at step {now.origin}"
            why = f"the first has no predecessor{f' ({there})' if now.origin >= 0 else ''}"
        raise InvalidInput(
            f"'executed' has {len(executed)} rows for {count} frames, expected {rows}: {why}", reason=Reason.BAD_TENSOR
        )
    last = first + count - 1
    return Work(
        op=Op.RECONDITION,
        step=first,
        present=last,
        count=count,
        params=_params(session, spec, frames=count, first_step=first),
        sent={OBSERVATION: _observation(request, executed, first)},
        position=Position(last, last, first if fresh else now.origin),
        past=now.origin >= 0 and first <= now.step,
    )


def _predict(graph: CompiledPipeline, plan: CompiledPlan, session: Session, request: TickRequest) -> Work:
    now, count = session.machine.position, _predicted_steps(graph.spec, plan, request)
    _check_begun(graph, session, Op.PREDICT)
    sent = {}
    if request.actions is not None:
        sent[ACTIONS] = Payload(PayloadKind.ACTIONS, {ACTIONS: request.actions}, {"step": now.step})
    return Work(
        op=Op.PREDICT,
        step=now.step,
        present=now.step,
        count=count,
        params=_params(session, graph.spec, frames=count, steps=count, first_step=now.step),
        sent=sent,
        position=Position(now.step + count, now.observed, now.origin),
        past=False,
    )


def _plan(graph: CompiledPipeline, session: Session, request: TickRequest) -> Work:
    now, wanted = session.machine.position, request.plan
    if wanted is None:  # check_request was not asked
        raise InvalidInput("plan says nothing of what to search for: send 'plan'")
    _check_begun(graph, session, Op.PLAN)
    arrays = {name: array for name, array in (("goal", wanted.goal), ("init", wanted.init)) if array is not None}
    params = _params(
        session,
        graph.spec,
        frames=wanted.horizon,
        first_step=now.step,
        horizon=wanted.horizon,
        candidates=wanted.candidates,
        iterations=wanted.iterations,
        method=wanted.method,
        # A search nobody waits for any more would hold its runner.
        budget_ms=min((ms for ms in (wanted.budget_ms, request.deadline_ms) if ms > 0), default=0.0),
    )
    return Work(
        op=Op.PLAN,
        step=now.step,
        present=now.step,
        count=wanted.horizon,
        params=params,
        sent={GOAL: Payload(PayloadKind.GOAL, arrays, {"step": now.step})},
        position=now,
        past=False,
    )


def _check_begun(graph: CompiledPipeline, session: Session, op: Op) -> None:
    starts = [start for start in (Op.INFER, Op.RECONDITION) if start in graph.plans]
    if session.machine.position.observed < 0 and starts:
        text = f"{op} continues from an observation: {' or '.join(starts)} first"
        raise StateError(text, reason=Reason.BAD_REQUEST)


def _observation(request: TickRequest, executed: NDArray[np.float32], step: int) -> Payload:
    return Payload(PayloadKind.OBSERVATION, {**request.arrays, EXECUTED: executed}, {"step": step})
