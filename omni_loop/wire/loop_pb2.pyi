from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DTYPE_UNSPECIFIED: _ClassVar[DType]
    DTYPE_UINT8: _ClassVar[DType]
    DTYPE_INT32: _ClassVar[DType]
    DTYPE_INT64: _ClassVar[DType]
    DTYPE_FLOAT32: _ClassVar[DType]
    DTYPE_FLOAT64: _ClassVar[DType]
    DTYPE_BOOL: _ClassVar[DType]

class Encoding(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ENCODING_RAW: _ClassVar[Encoding]
    ENCODING_PNG: _ClassVar[Encoding]
    ENCODING_JPEG: _ClassVar[Encoding]
DTYPE_UNSPECIFIED: DType
DTYPE_UINT8: DType
DTYPE_INT32: DType
DTYPE_INT64: DType
DTYPE_FLOAT32: DType
DTYPE_FLOAT64: DType
DTYPE_BOOL: DType
ENCODING_RAW: Encoding
ENCODING_PNG: Encoding
ENCODING_JPEG: Encoding

class Tensor(_message.Message):
    __slots__ = ("dtype", "shape", "data", "encoding")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    ENCODING_FIELD_NUMBER: _ClassVar[int]
    dtype: DType
    shape: _containers.RepeatedScalarFieldContainer[int]
    data: bytes
    encoding: Encoding
    def __init__(self, dtype: _Optional[_Union[DType, str]] = ..., shape: _Optional[_Iterable[int]] = ..., data: _Optional[bytes] = ..., encoding: _Optional[_Union[Encoding, str]] = ...) -> None: ...

class ArraySpec(_message.Message):
    __slots__ = ("name", "dtype", "shape", "unit", "low", "high", "optional", "max_length", "description")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    UNIT_FIELD_NUMBER: _ClassVar[int]
    LOW_FIELD_NUMBER: _ClassVar[int]
    HIGH_FIELD_NUMBER: _ClassVar[int]
    OPTIONAL_FIELD_NUMBER: _ClassVar[int]
    MAX_LENGTH_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: DType
    shape: _containers.RepeatedScalarFieldContainer[int]
    unit: str
    low: float
    high: float
    optional: bool
    max_length: int
    description: str
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[_Union[DType, str]] = ..., shape: _Optional[_Iterable[int]] = ..., unit: _Optional[str] = ..., low: _Optional[float] = ..., high: _Optional[float] = ..., optional: bool = ..., max_length: _Optional[int] = ..., description: _Optional[str] = ...) -> None: ...

class SessionSpec(_message.Message):
    __slots__ = ("pipeline", "observations", "action", "horizon", "execution_horizon", "control_hz", "ops", "frame", "max_predict", "prompt", "normalisation", "description", "digest")
    PIPELINE_FIELD_NUMBER: _ClassVar[int]
    OBSERVATIONS_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    HORIZON_FIELD_NUMBER: _ClassVar[int]
    EXECUTION_HORIZON_FIELD_NUMBER: _ClassVar[int]
    CONTROL_HZ_FIELD_NUMBER: _ClassVar[int]
    OPS_FIELD_NUMBER: _ClassVar[int]
    FRAME_FIELD_NUMBER: _ClassVar[int]
    MAX_PREDICT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    NORMALISATION_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    pipeline: str
    observations: _containers.RepeatedCompositeFieldContainer[ArraySpec]
    action: ArraySpec
    horizon: int
    execution_horizon: int
    control_hz: float
    ops: _containers.RepeatedScalarFieldContainer[str]
    frame: ArraySpec
    max_predict: int
    prompt: bool
    normalisation: str
    description: str
    digest: str
    def __init__(self, pipeline: _Optional[str] = ..., observations: _Optional[_Iterable[_Union[ArraySpec, _Mapping]]] = ..., action: _Optional[_Union[ArraySpec, _Mapping]] = ..., horizon: _Optional[int] = ..., execution_horizon: _Optional[int] = ..., control_hz: _Optional[float] = ..., ops: _Optional[_Iterable[str]] = ..., frame: _Optional[_Union[ArraySpec, _Mapping]] = ..., max_predict: _Optional[int] = ..., prompt: bool = ..., normalisation: _Optional[str] = ..., description: _Optional[str] = ..., digest: _Optional[str] = ...) -> None: ...

class Limits(_message.Message):
    __slots__ = ("max_message_bytes", "max_tensor_bytes", "max_tensors", "max_rank", "max_image_pixels", "max_prompt_bytes", "max_sessions", "max_waiting", "idle_ttl_s", "grace_s", "replies", "min_ping_s", "max_in_flight", "outbox_bytes")
    MAX_MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_TENSOR_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_TENSORS_FIELD_NUMBER: _ClassVar[int]
    MAX_RANK_FIELD_NUMBER: _ClassVar[int]
    MAX_IMAGE_PIXELS_FIELD_NUMBER: _ClassVar[int]
    MAX_PROMPT_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    MAX_WAITING_FIELD_NUMBER: _ClassVar[int]
    IDLE_TTL_S_FIELD_NUMBER: _ClassVar[int]
    GRACE_S_FIELD_NUMBER: _ClassVar[int]
    REPLIES_FIELD_NUMBER: _ClassVar[int]
    MIN_PING_S_FIELD_NUMBER: _ClassVar[int]
    MAX_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    OUTBOX_BYTES_FIELD_NUMBER: _ClassVar[int]
    max_message_bytes: int
    max_tensor_bytes: int
    max_tensors: int
    max_rank: int
    max_image_pixels: int
    max_prompt_bytes: int
    max_sessions: int
    max_waiting: int
    idle_ttl_s: float
    grace_s: float
    replies: int
    min_ping_s: float
    max_in_flight: int
    outbox_bytes: int
    def __init__(self, max_message_bytes: _Optional[int] = ..., max_tensor_bytes: _Optional[int] = ..., max_tensors: _Optional[int] = ..., max_rank: _Optional[int] = ..., max_image_pixels: _Optional[int] = ..., max_prompt_bytes: _Optional[int] = ..., max_sessions: _Optional[int] = ..., max_waiting: _Optional[int] = ..., idle_ttl_s: _Optional[float] = ..., grace_s: _Optional[float] = ..., replies: _Optional[int] = ..., min_ping_s: _Optional[float] = ..., max_in_flight: _Optional[int] = ..., outbox_bytes: _Optional[int] = ...) -> None: ...

class GetServerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetServerInfoReply(_message.Message):
    __slots__ = ("version", "protocol", "pipelines", "limits", "ready")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    PIPELINES_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    version: str
    protocol: str
    pipelines: _containers.RepeatedCompositeFieldContainer[SessionSpec]
    limits: Limits
    ready: bool
    def __init__(self, version: _Optional[str] = ..., protocol: _Optional[str] = ..., pipelines: _Optional[_Iterable[_Union[SessionSpec, _Mapping]]] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., ready: bool = ...) -> None: ...

class OpenSessionRequest(_message.Message):
    __slots__ = ("pipeline", "prompt", "seed", "observation_keys", "spec_digest", "options")
    class OptionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    PIPELINE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    OBSERVATION_KEYS_FIELD_NUMBER: _ClassVar[int]
    SPEC_DIGEST_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    pipeline: str
    prompt: str
    seed: int
    observation_keys: _containers.RepeatedScalarFieldContainer[str]
    spec_digest: str
    options: _containers.ScalarMap[str, str]
    def __init__(self, pipeline: _Optional[str] = ..., prompt: _Optional[str] = ..., seed: _Optional[int] = ..., observation_keys: _Optional[_Iterable[str]] = ..., spec_digest: _Optional[str] = ..., options: _Optional[_Mapping[str, str]] = ...) -> None: ...

class OpenSessionReply(_message.Message):
    __slots__ = ("session", "resume_token", "epoch", "seed", "spec", "observation_keys", "last_seq", "step")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    RESUME_TOKEN_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    OBSERVATION_KEYS_FIELD_NUMBER: _ClassVar[int]
    LAST_SEQ_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    session: str
    resume_token: str
    epoch: int
    seed: int
    spec: SessionSpec
    observation_keys: _containers.RepeatedScalarFieldContainer[str]
    last_seq: int
    step: int
    def __init__(self, session: _Optional[str] = ..., resume_token: _Optional[str] = ..., epoch: _Optional[int] = ..., seed: _Optional[int] = ..., spec: _Optional[_Union[SessionSpec, _Mapping]] = ..., observation_keys: _Optional[_Iterable[str]] = ..., last_seq: _Optional[int] = ..., step: _Optional[int] = ...) -> None: ...

class SessionRef(_message.Message):
    __slots__ = ("session", "resume_token")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    RESUME_TOKEN_FIELD_NUMBER: _ClassVar[int]
    session: str
    resume_token: str
    def __init__(self, session: _Optional[str] = ..., resume_token: _Optional[str] = ...) -> None: ...

class Observation(_message.Message):
    __slots__ = ("seq", "step", "arrays", "executed", "captured_ns", "frames", "deadline_ms", "previews", "supersede", "executed_through")
    class ArraysEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Tensor
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Tensor, _Mapping]] = ...) -> None: ...
    SEQ_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    ARRAYS_FIELD_NUMBER: _ClassVar[int]
    EXECUTED_FIELD_NUMBER: _ClassVar[int]
    CAPTURED_NS_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    PREVIEWS_FIELD_NUMBER: _ClassVar[int]
    SUPERSEDE_FIELD_NUMBER: _ClassVar[int]
    EXECUTED_THROUGH_FIELD_NUMBER: _ClassVar[int]
    seq: int
    step: int
    arrays: _containers.MessageMap[str, Tensor]
    executed: Tensor
    captured_ns: int
    frames: int
    deadline_ms: float
    previews: bool
    supersede: bool
    executed_through: int
    def __init__(self, seq: _Optional[int] = ..., step: _Optional[int] = ..., arrays: _Optional[_Mapping[str, Tensor]] = ..., executed: _Optional[_Union[Tensor, _Mapping]] = ..., captured_ns: _Optional[int] = ..., frames: _Optional[int] = ..., deadline_ms: _Optional[float] = ..., previews: bool = ..., supersede: bool = ..., executed_through: _Optional[int] = ...) -> None: ...

class InferRequest(_message.Message):
    __slots__ = ("session", "observation")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    OBSERVATION_FIELD_NUMBER: _ClassVar[int]
    session: SessionRef
    observation: Observation
    def __init__(self, session: _Optional[_Union[SessionRef, _Mapping]] = ..., observation: _Optional[_Union[Observation, _Mapping]] = ...) -> None: ...

class PredictRequest(_message.Message):
    __slots__ = ("session", "seq", "actions", "steps", "deadline_ms", "previews")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    ACTIONS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    PREVIEWS_FIELD_NUMBER: _ClassVar[int]
    session: SessionRef
    seq: int
    actions: Tensor
    steps: int
    deadline_ms: float
    previews: bool
    def __init__(self, session: _Optional[_Union[SessionRef, _Mapping]] = ..., seq: _Optional[int] = ..., actions: _Optional[_Union[Tensor, _Mapping]] = ..., steps: _Optional[int] = ..., deadline_ms: _Optional[float] = ..., previews: bool = ...) -> None: ...

class ReconditionRequest(_message.Message):
    __slots__ = ("session", "seq", "first_step", "arrays", "executed", "deadline_ms")
    class ArraysEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Tensor
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Tensor, _Mapping]] = ...) -> None: ...
    SESSION_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    FIRST_STEP_FIELD_NUMBER: _ClassVar[int]
    ARRAYS_FIELD_NUMBER: _ClassVar[int]
    EXECUTED_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    session: SessionRef
    seq: int
    first_step: int
    arrays: _containers.MessageMap[str, Tensor]
    executed: Tensor
    deadline_ms: float
    def __init__(self, session: _Optional[_Union[SessionRef, _Mapping]] = ..., seq: _Optional[int] = ..., first_step: _Optional[int] = ..., arrays: _Optional[_Mapping[str, Tensor]] = ..., executed: _Optional[_Union[Tensor, _Mapping]] = ..., deadline_ms: _Optional[float] = ...) -> None: ...

class ResetRequest(_message.Message):
    __slots__ = ("session", "seed", "prompt")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    session: SessionRef
    seed: int
    prompt: str
    def __init__(self, session: _Optional[_Union[SessionRef, _Mapping]] = ..., seed: _Optional[int] = ..., prompt: _Optional[str] = ...) -> None: ...

class ResetReply(_message.Message):
    __slots__ = ("epoch",)
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    def __init__(self, epoch: _Optional[int] = ...) -> None: ...

class CloseRequest(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: SessionRef
    def __init__(self, session: _Optional[_Union[SessionRef, _Mapping]] = ...) -> None: ...

class CloseReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ForkRequest(_message.Message):
    __slots__ = ("session", "seed")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    session: SessionRef
    seed: int
    def __init__(self, session: _Optional[_Union[SessionRef, _Mapping]] = ..., seed: _Optional[int] = ...) -> None: ...

class RewindRequest(_message.Message):
    __slots__ = ("session", "step")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    session: SessionRef
    step: int
    def __init__(self, session: _Optional[_Union[SessionRef, _Mapping]] = ..., step: _Optional[int] = ...) -> None: ...

class RewindReply(_message.Message):
    __slots__ = ("epoch", "step")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    step: int
    def __init__(self, epoch: _Optional[int] = ..., step: _Optional[int] = ...) -> None: ...

class SnapshotRequest(_message.Message):
    __slots__ = ("session", "name")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    session: SessionRef
    name: str
    def __init__(self, session: _Optional[_Union[SessionRef, _Mapping]] = ..., name: _Optional[str] = ...) -> None: ...

class SnapshotReply(_message.Message):
    __slots__ = ("bytes",)
    BYTES_FIELD_NUMBER: _ClassVar[int]
    bytes: int
    def __init__(self, bytes: _Optional[int] = ...) -> None: ...

class RestoreRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class PlanRequest(_message.Message):
    __slots__ = ("session", "seq", "horizon", "candidates", "iterations", "method", "budget_ms", "goal", "init", "deadline_ms")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    HORIZON_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    ITERATIONS_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    BUDGET_MS_FIELD_NUMBER: _ClassVar[int]
    GOAL_FIELD_NUMBER: _ClassVar[int]
    INIT_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    session: SessionRef
    seq: int
    horizon: int
    candidates: int
    iterations: int
    method: str
    budget_ms: float
    goal: Tensor
    init: Tensor
    deadline_ms: float
    def __init__(self, session: _Optional[_Union[SessionRef, _Mapping]] = ..., seq: _Optional[int] = ..., horizon: _Optional[int] = ..., candidates: _Optional[int] = ..., iterations: _Optional[int] = ..., method: _Optional[str] = ..., budget_ms: _Optional[float] = ..., goal: _Optional[_Union[Tensor, _Mapping]] = ..., init: _Optional[_Union[Tensor, _Mapping]] = ..., deadline_ms: _Optional[float] = ...) -> None: ...

class PlanSummary(_message.Message):
    __slots__ = ("cost", "first_cost", "candidates", "iterations", "horizon", "out_of_time")
    COST_FIELD_NUMBER: _ClassVar[int]
    FIRST_COST_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    ITERATIONS_FIELD_NUMBER: _ClassVar[int]
    HORIZON_FIELD_NUMBER: _ClassVar[int]
    OUT_OF_TIME_FIELD_NUMBER: _ClassVar[int]
    cost: float
    first_cost: float
    candidates: int
    iterations: int
    horizon: int
    out_of_time: bool
    def __init__(self, cost: _Optional[float] = ..., first_cost: _Optional[float] = ..., candidates: _Optional[int] = ..., iterations: _Optional[int] = ..., horizon: _Optional[int] = ..., out_of_time: bool = ...) -> None: ...

class ListSessionsRequest(_message.Message):
    __slots__ = ("sessions",)
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    sessions: _containers.RepeatedCompositeFieldContainer[SessionRef]
    def __init__(self, sessions: _Optional[_Iterable[_Union[SessionRef, _Mapping]]] = ...) -> None: ...

class ListSessionsReply(_message.Message):
    __slots__ = ("counts", "sessions")
    class CountsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    counts: _containers.ScalarMap[str, int]
    sessions: _containers.RepeatedCompositeFieldContainer[SessionSummary]
    def __init__(self, counts: _Optional[_Mapping[str, int]] = ..., sessions: _Optional[_Iterable[_Union[SessionSummary, _Mapping]]] = ...) -> None: ...

class SessionSummary(_message.Message):
    __slots__ = ("session", "pipeline", "phase", "epoch", "step", "last_seq")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    PIPELINE_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    LAST_SEQ_FIELD_NUMBER: _ClassVar[int]
    session: str
    pipeline: str
    phase: str
    epoch: int
    step: int
    last_seq: int
    def __init__(self, session: _Optional[str] = ..., pipeline: _Optional[str] = ..., phase: _Optional[str] = ..., epoch: _Optional[int] = ..., step: _Optional[int] = ..., last_seq: _Optional[int] = ...) -> None: ...

class Timings(_message.Message):
    __slots__ = ("total_ms", "model_ms", "queue_ms", "stages_ms")
    class StagesMsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    TOTAL_MS_FIELD_NUMBER: _ClassVar[int]
    MODEL_MS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    STAGES_MS_FIELD_NUMBER: _ClassVar[int]
    total_ms: float
    model_ms: float
    queue_ms: float
    stages_ms: _containers.ScalarMap[str, float]
    def __init__(self, total_ms: _Optional[float] = ..., model_ms: _Optional[float] = ..., queue_ms: _Optional[float] = ..., stages_ms: _Optional[_Mapping[str, float]] = ...) -> None: ...

class ActionChunk(_message.Message):
    __slots__ = ("first_step", "actions", "policy_revision", "frozen", "joined")
    FIRST_STEP_FIELD_NUMBER: _ClassVar[int]
    ACTIONS_FIELD_NUMBER: _ClassVar[int]
    POLICY_REVISION_FIELD_NUMBER: _ClassVar[int]
    FROZEN_FIELD_NUMBER: _ClassVar[int]
    JOINED_FIELD_NUMBER: _ClassVar[int]
    first_step: int
    actions: Tensor
    policy_revision: str
    frozen: int
    joined: str
    def __init__(self, first_step: _Optional[int] = ..., actions: _Optional[_Union[Tensor, _Mapping]] = ..., policy_revision: _Optional[str] = ..., frozen: _Optional[int] = ..., joined: _Optional[str] = ...) -> None: ...

class FramePrediction(_message.Message):
    __slots__ = ("first_step", "frames", "scene", "preview", "seq", "epoch", "error", "part")
    FIRST_STEP_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    SCENE_FIELD_NUMBER: _ClassVar[int]
    PREVIEW_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    first_step: int
    frames: Tensor
    scene: Tensor
    preview: bool
    seq: int
    epoch: int
    error: Error
    part: int
    def __init__(self, first_step: _Optional[int] = ..., frames: _Optional[_Union[Tensor, _Mapping]] = ..., scene: _Optional[_Union[Tensor, _Mapping]] = ..., preview: bool = ..., seq: _Optional[int] = ..., epoch: _Optional[int] = ..., error: _Optional[_Union[Error, _Mapping]] = ..., part: _Optional[int] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("step", "progress", "done")
    STEP_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    step: int
    progress: float
    done: float
    def __init__(self, step: _Optional[int] = ..., progress: _Optional[float] = ..., done: _Optional[float] = ...) -> None: ...

class TickReply(_message.Message):
    __slots__ = ("seq", "epoch", "chunk", "frames", "progress", "timings", "frames_error", "plan")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    FRAMES_ERROR_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    seq: int
    epoch: int
    chunk: ActionChunk
    frames: FramePrediction
    progress: Progress
    timings: Timings
    frames_error: Error
    plan: PlanSummary
    def __init__(self, seq: _Optional[int] = ..., epoch: _Optional[int] = ..., chunk: _Optional[_Union[ActionChunk, _Mapping]] = ..., frames: _Optional[_Union[FramePrediction, _Mapping]] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ..., timings: _Optional[_Union[Timings, _Mapping]] = ..., frames_error: _Optional[_Union[Error, _Mapping]] = ..., plan: _Optional[_Union[PlanSummary, _Mapping]] = ...) -> None: ...

class Skipped(_message.Message):
    __slots__ = ("seq", "reason", "epoch")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    seq: int
    reason: str
    epoch: int
    def __init__(self, seq: _Optional[int] = ..., reason: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class Error(_message.Message):
    __slots__ = ("seq", "code", "reason", "retryable", "text", "epoch", "retry_after_ms", "missing_bytes")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    RETRYABLE_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    MISSING_BYTES_FIELD_NUMBER: _ClassVar[int]
    seq: int
    code: str
    reason: str
    retryable: bool
    text: str
    epoch: int
    retry_after_ms: float
    missing_bytes: int
    def __init__(self, seq: _Optional[int] = ..., code: _Optional[str] = ..., reason: _Optional[str] = ..., retryable: bool = ..., text: _Optional[str] = ..., epoch: _Optional[int] = ..., retry_after_ms: _Optional[float] = ..., missing_bytes: _Optional[int] = ...) -> None: ...

class Attach(_message.Message):
    __slots__ = ("session", "last_received_seq")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    LAST_RECEIVED_SEQ_FIELD_NUMBER: _ClassVar[int]
    session: SessionRef
    last_received_seq: int
    def __init__(self, session: _Optional[_Union[SessionRef, _Mapping]] = ..., last_received_seq: _Optional[int] = ...) -> None: ...

class Attached(_message.Message):
    __slots__ = ("epoch", "last_seq", "attachment", "accepted", "pending", "replayed", "forgotten")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LAST_SEQ_FIELD_NUMBER: _ClassVar[int]
    ATTACHMENT_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    PENDING_FIELD_NUMBER: _ClassVar[int]
    REPLAYED_FIELD_NUMBER: _ClassVar[int]
    FORGOTTEN_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    last_seq: int
    attachment: int
    accepted: int
    pending: _containers.RepeatedScalarFieldContainer[int]
    replayed: int
    forgotten: int
    def __init__(self, epoch: _Optional[int] = ..., last_seq: _Optional[int] = ..., attachment: _Optional[int] = ..., accepted: _Optional[int] = ..., pending: _Optional[_Iterable[int]] = ..., replayed: _Optional[int] = ..., forgotten: _Optional[int] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("seq",)
    SEQ_FIELD_NUMBER: _ClassVar[int]
    seq: int
    def __init__(self, seq: _Optional[int] = ...) -> None: ...

class ClientMessage(_message.Message):
    __slots__ = ("attach", "observation", "predict", "recondition", "reset", "plan", "rewind", "cancel")
    ATTACH_FIELD_NUMBER: _ClassVar[int]
    OBSERVATION_FIELD_NUMBER: _ClassVar[int]
    PREDICT_FIELD_NUMBER: _ClassVar[int]
    RECONDITION_FIELD_NUMBER: _ClassVar[int]
    RESET_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    REWIND_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    attach: Attach
    observation: Observation
    predict: PredictRequest
    recondition: ReconditionRequest
    reset: ResetRequest
    plan: PlanRequest
    rewind: RewindRequest
    cancel: Cancel
    def __init__(self, attach: _Optional[_Union[Attach, _Mapping]] = ..., observation: _Optional[_Union[Observation, _Mapping]] = ..., predict: _Optional[_Union[PredictRequest, _Mapping]] = ..., recondition: _Optional[_Union[ReconditionRequest, _Mapping]] = ..., reset: _Optional[_Union[ResetRequest, _Mapping]] = ..., plan: _Optional[_Union[PlanRequest, _Mapping]] = ..., rewind: _Optional[_Union[RewindRequest, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ...) -> None: ...

class ServerMessage(_message.Message):
    __slots__ = ("attached", "tick", "frames", "skipped", "error", "reset", "draining", "rewind")
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    TICK_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    RESET_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    REWIND_FIELD_NUMBER: _ClassVar[int]
    attached: Attached
    tick: TickReply
    frames: FramePrediction
    skipped: Skipped
    error: Error
    reset: ResetReply
    draining: str
    rewind: RewindReply
    def __init__(self, attached: _Optional[_Union[Attached, _Mapping]] = ..., tick: _Optional[_Union[TickReply, _Mapping]] = ..., frames: _Optional[_Union[FramePrediction, _Mapping]] = ..., skipped: _Optional[_Union[Skipped, _Mapping]] = ..., error: _Optional[_Union[Error, _Mapping]] = ..., reset: _Optional[_Union[ResetReply, _Mapping]] = ..., draining: _Optional[str] = ..., rewind: _Optional[_Union[RewindReply, _Mapping]] = ...) -> None: ...
