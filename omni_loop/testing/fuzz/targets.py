"""What is fuzzed: every way bytes of a stranger become values, at the server and at the client.

The contract of each in one sentence: a value that keeps its promises, or one of the target's typed errors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from google.protobuf.message import Message

from ...errors import InvalidInput, OmniLoopError, Unsupported
from ...types import (
    MAX_COUNT,
    ActionChunk,
    FramePrediction,
    Observation,
    PlanSummary,
    Progress,
    TickResult,
)
from ...wire import codec
from ...wire import loop_pb2 as pb
from .. import bad_inputs
from ..board import expect
from ..toy_core import SPEC

LIMITS = bad_inputs.LIMITS
KEYS = bad_inputs.KEYS
Errors = tuple[type[OmniLoopError], ...]
SERVER: Errors = (InvalidInput, Unsupported)
CLIENT: Errors = (OmniLoopError,)  # a server may send any


@dataclass(frozen=True, slots=True)
class Target:
    """``run`` takes bytes of a message of ``kind``; what it may raise is in ``errors``."""

    name: str
    kind: type[Message]
    run: Callable[[bytes], Any]
    errors: Errors = SERVER


def check_value(value: Any) -> None:
    """What every accepted value promises, seen with other eyes than the codec's. Raises :class:`~..board.Broken`."""
    if isinstance(value, Observation | codec.Recondition | codec.Plan | codec.Predict):
        expect(1 <= value.seq <= MAX_COUNT, f"seq {value.seq} was accepted")
        expect(value.deadline_ms >= 0 and value.deadline_ms < np.inf, f"a deadline of {value.deadline_ms} was accepted")
    if isinstance(value, Observation | codec.Recondition):
        expect(tuple(sorted(value.arrays)) == tuple(sorted(KEYS)), f"keys {sorted(value.arrays)} were accepted")
        leading = int(isinstance(value, codec.Recondition))
        for name, array in value.arrays.items():
            spec = SPEC.observation(name)
            assert spec is not None
            _check_array(name, array, spec.dtype, spec.shape, leading, spec.low, spec.high)
        _check_actions(value.executed)
    if isinstance(value, Observation):
        expect(0 <= value.step <= MAX_COUNT, f"step {value.step} was accepted")
        through = value.executed_through
        expect(through is None or value.step - 1 <= through <= MAX_COUNT, f"executed_through {through} was accepted")
    elif isinstance(value, codec.Predict):
        _check_actions(value.actions)
    elif isinstance(value, codec.Plan):
        expect(1 <= value.horizon <= SPEC.max_predict, f"a horizon of {value.horizon} was accepted")
        _check_actions(value.init)
        if value.goal is not None:
            _check_array("goal", value.goal, "uint8", (8, 8, 3))


def _check_actions(actions: Any) -> None:
    if actions is not None:
        _check_array("actions", actions, "float32", (2,), 1, 0, 512)


def _check_array(
    name: str,
    array: Any,
    dtype: str,
    shape: tuple[int, ...],
    leading: int = 0,
    low: float | None = None,
    high: float | None = None,
) -> None:
    expect(array.dtype.name == dtype, f"{name} of {array.dtype} was accepted")
    tail = array.shape[leading:]
    fits = len(tail) == len(shape) and all(want in (-1, have) for want, have in zip(shape, tail, strict=False))
    expect(fits and array.nbytes <= LIMITS.max_tensor_bytes, f"{name} of shape {array.shape} was accepted")
    if array.size:
        least, most = array.min(), array.max()  # either is NaN when one value is
        expect(bool(least >= (-np.inf if low is None else low)), f"{name} with {least} was accepted")
        expect(bool(most <= (np.inf if high is None else high)), f"{name} with {most} was accepted")
        expect(bool(np.isfinite(least) and np.isfinite(most)), f"{name} that is not finite was accepted")


def _server(kind: type[Message], decode: Callable[[Any], Any]) -> Callable[[bytes], Any]:
    return lambda raw: decode(codec.parse(kind, raw, LIMITS))


def _observation(message: pb.Observation) -> Observation:
    return codec.decode_observation(message, SPEC, KEYS, LIMITS)


def _client_message(message: pb.ClientMessage) -> Any:
    """As the server's stream takes it."""
    decoders: Mapping[str, Callable[[Any], Any]] = {
        "observation": _observation,
        "predict": lambda m: codec.decode_predict(m, SPEC, LIMITS),
        "recondition": lambda m: codec.decode_recondition(m, SPEC, KEYS, LIMITS),
        "plan": lambda m: codec.decode_plan(m, SPEC, LIMITS),
        "rewind": codec.check_rewind,
        "reset": lambda m: LIMITS.check_prompt(m.prompt),
    }
    kind = message.WhichOneof("kind")
    return decoders[kind](getattr(message, kind)) if kind in decoders else None


def _server_message(message: pb.ServerMessage) -> Any:
    """As the client's stream takes it."""
    kind = message.WhichOneof("kind")
    if kind == "tick":
        return codec.decode_result(message.tick, SPEC, LIMITS)
    if kind == "frames":
        return codec.decode_frames(message.frames, SPEC, LIMITS)
    return codec.decode_error(message.error) if kind == "error" else None


def _opened(message: pb.OpenSessionReply) -> Any:
    return codec.decode_spec(message.spec).digest


TARGETS: tuple[Target, ...] = (
    Target("infer", pb.InferRequest, _server(pb.InferRequest, lambda m: _observation(m.observation))),
    Target("stream", pb.ClientMessage, _server(pb.ClientMessage, _client_message)),
    Target("predict", pb.PredictRequest, _server(pb.PredictRequest, lambda m: codec.decode_predict(m, SPEC, LIMITS))),
    Target(
        "recondition",
        pb.ReconditionRequest,
        _server(pb.ReconditionRequest, lambda m: codec.decode_recondition(m, SPEC, KEYS, LIMITS)),
    ),
    Target("plan", pb.PlanRequest, _server(pb.PlanRequest, lambda m: codec.decode_plan(m, SPEC, LIMITS))),
    Target("open", pb.OpenSessionRequest, _server(pb.OpenSessionRequest, lambda m: codec.check_open(m, LIMITS))),
    Target("snapshot", pb.SnapshotRequest, _server(pb.SnapshotRequest, lambda m: codec.check_snapshot_name(m.name))),
    Target("list", pb.ListSessionsRequest, _server(pb.ListSessionsRequest, lambda m: codec.check_list(m, LIMITS))),
    Target("answer", pb.ServerMessage, _server(pb.ServerMessage, _server_message), CLIENT),
    Target("opened", pb.OpenSessionReply, _server(pb.OpenSessionReply, _opened), CLIENT),
)


def seeds() -> dict[str, list[bytes]]:
    """Good messages and all named bad ones, by target."""
    observation = bad_inputs.good_request().observation
    plan = bad_inputs.good_plan()
    actions = codec.encode_tensor(np.full((3, 2), 7, np.float32))
    predict = [pb.PredictRequest(seq=1, actions=actions, previews=True), pb.PredictRequest(seq=2, steps=3)]
    runs = {
        name: codec.encode_tensor(np.stack([array] * 2).astype(array.dtype))
        for name, array in bad_inputs.good_arrays().items()
    }
    recondition = pb.ReconditionRequest(seq=3, first_step=1, arrays=runs, executed=actions)
    pictures = bad_inputs.good_request().observation
    pictures.arrays["image"].CopyFrom(codec.encode_tensor(bad_inputs.good_arrays()["image"], "png"))
    pictures.executed_through, pictures.supersede = 5, True
    photo = bad_inputs.good_request().observation
    photo.arrays["image"].CopyFrom(codec.encode_tensor(np.full((64, 64, 3), 77, np.uint8), "jpeg"))
    stream = [
        pb.ClientMessage(
            attach=pb.Attach(session=pb.SessionRef(session="a" * 32, resume_token="b"), last_received_seq=3)
        ),
        pb.ClientMessage(observation=observation),
        pb.ClientMessage(observation=pictures),
        pb.ClientMessage(observation=photo),
        pb.ClientMessage(predict=predict[0]),
        pb.ClientMessage(recondition=recondition),
        pb.ClientMessage(plan=plan),
        pb.ClientMessage(rewind=pb.RewindRequest(step=2)),
        pb.ClientMessage(reset=pb.ResetRequest(seed=3, prompt="push T")),
        pb.ClientMessage(cancel=pb.Cancel(seq=4)),
    ]
    opened = pb.OpenSessionRequest(
        pipeline="toy", prompt="push", seed=1, observation_keys=KEYS, options={"a": "b"}, spec_digest=SPEC.digest
    )
    opened_reply = pb.OpenSessionReply(session="a", spec=codec.encode_spec(SPEC))
    found: dict[str, list[bytes]] = {
        "infer": [bad_inputs.good_request().SerializeToString(deterministic=True), *_named()],
        "stream": [m.SerializeToString(deterministic=True) for m in stream],
        "predict": [m.SerializeToString(deterministic=True) for m in predict],
        "recondition": [recondition.SerializeToString(deterministic=True)],
        "plan": [plan.SerializeToString(deterministic=True), *_named_plans()],
        "open": [opened.SerializeToString(deterministic=True)],
        "snapshot": [pb.SnapshotRequest(name="a-1").SerializeToString(deterministic=True)],
        "list": [pb.ListSessionsRequest(sessions=[pb.SessionRef(session="a")]).SerializeToString(deterministic=True)],
        "answer": [m.SerializeToString(deterministic=True) for m in _answers()],
        "opened": [opened_reply.SerializeToString(deterministic=True)],
    }
    return found


def _named() -> list[bytes]:
    raws = []
    for case in bad_inputs.cases():
        request = bad_inputs.good_request()
        raws.append(case.spoil(request) or request.SerializeToString(deterministic=True))
    return [raw for raw in raws if len(raw) < 4096]  # the long ones are row B3's


def _named_plans() -> list[bytes]:
    raws = []
    for case in bad_inputs.plan_cases():
        request = bad_inputs.good_plan()
        raws.append(case.spoil(request) or request.SerializeToString(deterministic=True))
    return [raw for raw in raws if len(raw) < 4096]


def _answers() -> list[pb.ServerMessage]:
    actions = np.full((4, 2), 3, np.float32)
    frames = FramePrediction(4, 5, np.zeros((2, 8, 8, 3), np.uint8), 1, np.zeros((2, 3, 2), np.float32))
    result = TickResult(4, 1, ActionChunk(4, 4, actions, 1, "r", frozen=1, joined="overlap"), frames)
    plan = PlanSummary(4, 0.25, 0.5, 16, 2, 3)
    error = codec.encode_error(Unsupported("cannot"), 4, 1)
    return [
        pb.ServerMessage(attached=pb.Attached(epoch=1, last_seq=3, attachment=1, accepted=4, pending=[4])),
        pb.ServerMessage(tick=codec.encode_result(result)),
        pb.ServerMessage(tick=codec.encode_result(replace(result, frames=None, plan=plan))),
        pb.ServerMessage(tick=codec.encode_result(replace(result, progress=Progress(4, 4, 0.5, 0.1, 1)))),
        pb.ServerMessage(frames=codec.encode_frames(frames)),
        pb.ServerMessage(frames=codec.encode_frames_error(Unsupported("cannot"), 4, 1)),
        pb.ServerMessage(skipped=pb.Skipped(seq=4, reason="expired", epoch=1)),
        pb.ServerMessage(error=error),
        pb.ServerMessage(draining="soon"),
    ]
