"""A session's side of the protocol without IO: requests are built and answers read here, for both clients.

Arrays are checked against the session's spec before they are sent, so a mistake is found where it was made.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import InvalidInput, TensorError
from ..types import MAX_COUNT, Array, ArraySpec, SessionSpec, TickResult
from ..wire import codec
from ..wire import loop_pb2 as pb
from .arguments import check_encoding, check_options, duration, names, text, whole

# What a server may send: frames of a long prediction are larger than anything a client sends.
ANSWER_BYTES = 256 << 20
UINT32, UINT64 = (1 << 32) - 1, (1 << 64) - 1
ANSWERS = codec.Limits(max_message_bytes=ANSWER_BYTES, max_tensor_bytes=ANSWER_BYTES)


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """``pipelines`` by name. ``ready``: every stage has run once."""

    version: str
    protocol: str
    pipelines: Mapping[str, SessionSpec]
    limits: codec.Limits
    ready: bool


def read_info(reply: pb.GetServerInfoReply) -> ServerInfo:
    return ServerInfo(
        version=reply.version,
        protocol=reply.protocol,
        pipelines={spec.pipeline: codec.decode_spec(spec) for spec in reply.pipelines},
        limits=codec.decode_limits(reply.limits),
        ready=reply.ready,
    )


def open_request(
    pipeline: str,
    prompt: str,
    seed: int | None,
    keys: Sequence[str],
    options: Mapping[str, Any],
    spec_digest: str,
    image_encoding: str = "raw",
) -> pb.OpenSessionRequest:
    """Raises :class:`InvalidInput` naming the argument; ``image_encoding`` is checked here and used later."""
    check_encoding("image_encoding", image_encoding)
    return pb.OpenSessionRequest(
        pipeline=text("pipeline", pipeline, codec.MAX_NAME),
        prompt=text("prompt", prompt),
        seed=None if seed is None else whole("seed", seed, UINT64),
        observation_keys=names("keys", keys),
        spec_digest=text("spec_digest", spec_digest, codec.MAX_NAME),
        options=check_options("options", options),
    )


@dataclass(frozen=True, slots=True)
class SessionSummary:
    """One of the caller's sessions. ``phase``: see loop.proto; ``last_seq``: the highest that was accepted."""

    id: str
    pipeline: str
    phase: str
    epoch: int
    step: int
    last_seq: int


@dataclass(frozen=True, slots=True)
class SessionList:
    """``counts``: sessions of all clients by pipeline; ``sessions``: those that were asked for and are open."""

    counts: Mapping[str, int]
    sessions: tuple[SessionSummary, ...]


def restore_request(name: str, image_encoding: str = "raw") -> pb.RestoreRequest:
    """Raises :class:`InvalidInput` naming the argument."""
    check_encoding("image_encoding", image_encoding)
    return pb.RestoreRequest(name=codec.check_snapshot_name(text("name", name)))


def list_request(books: Iterable[Book]) -> pb.ListSessionsRequest:
    return pb.ListSessionsRequest(sessions=[book.ref for book in books])


def read_list(reply: pb.ListSessionsReply) -> SessionList:
    return SessionList(
        counts=dict(reply.counts),
        sessions=tuple(
            SessionSummary(s.session, s.pipeline, s.phase, s.epoch, s.step, s.last_seq) for s in reply.sessions
        ),
    )


class Book:
    """What a client knows of its session: id, token, spec, epoch, the last ``seq`` used, and ``start_step``, where
    the session stood when it was opened, forked, restored, reset or rewound."""

    def __init__(self, reply: pb.OpenSessionReply, image_encoding: str = "raw") -> None:
        self.ref = pb.SessionRef(session=reply.session, resume_token=reply.resume_token)
        self.spec = codec.decode_spec(reply.spec)
        self.keys = tuple(reply.observation_keys)
        self.epoch = reply.epoch
        self.seed = reply.seed
        self.seq = reply.last_seq
        self.start_step = reply.step
        self.image_encoding = image_encoding

    def forked(self, reply: pb.OpenSessionReply) -> Book:
        """The child's book. A seq the parent has used may have failed, or be of an epoch that is over: then the server
        answers for less than the parent's book says, and takes any greater one."""
        child = Book(reply, self.image_encoding)
        child.seq = max(child.seq, self.seq)
        return child

    def infer(
        self,
        arrays: Mapping[str, ArrayLike],
        step: int,
        executed: ArrayLike | None = None,
        frames: int = 0,
        deadline_ms: float = 0.0,
        captured_ns: int = 0,
        supersede: bool = False,
        executed_through: int | None = None,
    ) -> pb.Observation:
        message = pb.Observation(
            step=whole("step", step, MAX_COUNT),
            arrays=self._encoded(arrays, leading=0),
            executed=self._actions("executed", executed),
            captured_ns=whole("captured_ns", captured_ns, UINT64),
            frames=whole("frames", frames, UINT32),
            deadline_ms=duration("deadline_ms", deadline_ms),
            supersede=supersede,
            executed_through=None if executed_through is None else _through(executed_through, step),
        )
        message.seq = self._next()  # last: a refused observation uses no seq
        return message

    def predict(self, actions: ArrayLike | None, steps: int, deadline_ms: float = 0.0) -> pb.PredictRequest:
        message = pb.PredictRequest(
            session=self.ref,
            actions=self._actions("actions", actions),
            steps=whole("steps", steps, UINT32),
            deadline_ms=duration("deadline_ms", deadline_ms),
        )
        message.seq = self._next()
        return message

    def recondition(
        self,
        arrays: Mapping[str, ArrayLike],
        executed: ArrayLike | None,
        first_step: int,
        deadline_ms: float = 0.0,
    ) -> pb.ReconditionRequest:
        message = pb.ReconditionRequest(
            session=self.ref,
            first_step=whole("first_step", first_step, MAX_COUNT),
            arrays=self._encoded(arrays, leading=1),
            executed=self._actions("executed", executed),
            deadline_ms=duration("deadline_ms", deadline_ms),
        )
        message.seq = self._next()
        return message

    def plan(
        self,
        horizon: int | None,
        candidates: int | None,
        iterations: int | None,
        method: str,
        budget_ms: float,
        goal: ArrayLike | None,
        init: ArrayLike | None,
        deadline_ms: float = 0.0,
    ) -> pb.PlanRequest:
        message = pb.PlanRequest(
            session=self.ref,
            horizon=None if horizon is None else whole("horizon", horizon, UINT32),
            candidates=None if candidates is None else whole("candidates", candidates, UINT32),
            iterations=None if iterations is None else whole("iterations", iterations, UINT32),
            method=text("method", method),
            budget_ms=duration("budget_ms", budget_ms),
            goal=None if goal is None else self._encode(codec.goal_spec(self.spec), goal, "goal"),
            init=self._actions("init", init),
            deadline_ms=duration("deadline_ms", deadline_ms),
        )
        codec.check_plan(message, self.spec)
        message.seq = self._next()
        return message

    def fork(self, seed: int | None) -> pb.ForkRequest:
        return pb.ForkRequest(session=self.ref, seed=None if seed is None else whole("seed", seed, UINT64))

    def rewind(self, step: int) -> pb.RewindRequest:
        return pb.RewindRequest(session=self.ref, step=whole("step", step, 2 * MAX_COUNT))

    def snapshot(self, name: str) -> pb.SnapshotRequest:
        return pb.SnapshotRequest(session=self.ref, name=codec.check_snapshot_name(text("name", name)))

    def reset(self, seed: int | None, prompt: str | None) -> pb.ResetRequest:
        return pb.ResetRequest(
            session=self.ref,
            seed=None if seed is None else whole("seed", seed, UINT64),
            prompt=None if prompt is None else text("prompt", prompt),
        )

    def read(self, reply: pb.TickReply) -> TickResult:
        result = codec.decode_result(reply, self.spec, ANSWERS)
        self.epoch = max(self.epoch, result.epoch)  # a recondition to the past began a new one
        return result

    def read_reset(self, reply: pb.ResetReply) -> int:
        self.epoch, self.start_step = reply.epoch, 0
        return self.epoch

    def read_rewind(self, reply: pb.RewindReply) -> int:
        self.epoch, self.start_step = reply.epoch, reply.step
        return self.epoch

    def _next(self) -> int:
        self.seq += 1
        return self.seq

    def _encoded(self, arrays: Mapping[str, ArrayLike], leading: int) -> dict[str, pb.Tensor]:
        if not isinstance(arrays, Mapping):
            raise InvalidInput(
                f"arrays is a {type(arrays).__name__}; it must be a mapping of observation keys to arrays"
            )
        names("arrays", tuple(arrays))
        codec.check_keys(self.keys, arrays)
        encoded = {}
        for name, value in arrays.items():
            spec = self.spec.observation(name)
            if spec is None:
                raise TensorError(f"pipeline {self.spec.pipeline!r} has no observation {name!r}")
            encoded[name] = self._encode(spec, value, name, leading)
        return encoded

    def _encode(self, spec: ArraySpec, value: ArrayLike, name: str, leading: int = 0) -> pb.Tensor:
        """Any array of ``spec``; one that is an image is compressed as the session was told."""
        array = as_array(spec, value, name)
        codec.check_array(spec, array, leading, name)
        image = array.dtype == np.uint8 and array.ndim == 3 and array.shape[2] == 3
        return codec.encode_tensor(array, self.image_encoding if image else "raw")

    def _actions(self, name: str, value: ArrayLike | None) -> pb.Tensor | None:
        if value is None:
            return None
        actions: NDArray[np.float32] = as_array(self.spec.action, value, name)
        if actions.size == 0:
            actions = actions.reshape(0, *self.spec.action.shape)
        codec.check_actions(self.spec, actions, name)
        return codec.encode_tensor(actions)


def _through(executed_through: int, step: int) -> int:
    """Checked: ``step`` is. The step before the observation's is the least there is, of step 0 too."""
    if executed_through == step - 1:
        return int(executed_through)
    through = whole("executed_through", executed_through, MAX_COUNT)
    if through < step:
        raise InvalidInput(
            f"executed_through is {through}; it must be at least {step - 1}, before the observation's step"
        )
    return through


def as_array(spec: ArraySpec, value: ArrayLike, name: str) -> Array:
    """``value`` as a finite array. An array keeps its dtype; numbers in lists have none yet and get the
    spec's, when that changes no value. Raises :class:`TensorError`."""
    if isinstance(value, np.ndarray):
        array = value
    else:
        try:
            plain = np.asarray(value)
        except ValueError:
            raise TensorError(f"{name!r} is a ragged list") from None
        if plain.dtype.kind not in "biuf":
            raise TensorError(f"{name!r} holds {plain.dtype.name}, not numbers")
        with np.errstate(all="ignore"):
            array = plain.astype(spec.dtype)
        if array.dtype.kind != "f" and plain.size and not np.array_equal(array, plain):
            raise TensorError(f"{name!r} holds numbers that {spec.dtype} cannot")
    codec.check_finite(name, array)
    return array
