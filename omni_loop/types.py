"""The nouns: specs and the values that travel between a client and a pipeline.

numpy only, so that a robot can import it. Shapes are written ``[horizon, action_dim]``; frames are
``uint8[h, w, 3]``, RGB; times are monotonic nanoseconds of whoever took them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ._compat import StrEnum
from .errors import OmniLoopError

Array = NDArray[Any]

# Greatest step and seq: exact as a double, and far enough below 2**63 that no sum with a horizon or a number
# of predicted steps leaves an int64.
MAX_COUNT = 1 << 53


class Op(StrEnum):
    """What a tick is asked to do."""

    INFER = "infer"  # a real observation in, an action chunk out
    PREDICT = "predict"  # frames (and, where the policy imagines, a chunk) without a new observation
    RECONDITION = "recondition"  # real frames and the actions really executed replace imagined ones
    PLAN = "plan"  # the best of many imagined futures; the session's state stays as it is


class StageKind(StrEnum):
    CONTEXT = "context"
    FRAMES = "frames"
    ACT = "act"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """One named array. ``shape`` entries of -1 may have any length from 0 to ``max_length``."""

    name: str
    dtype: str  # numpy name: "uint8", "float32", ...
    shape: tuple[int, ...]
    unit: str = ""
    low: float | None = None
    high: float | None = None
    optional: bool = False  # optional keys are chosen at OpenSession, then fixed for the session
    max_length: int = 1024
    description: str = ""

    def __post_init__(self) -> None:
        # As they come back from the wire, so that both ends compute the same digest.
        object.__setattr__(self, "shape", tuple(int(d) for d in self.shape))
        for bound in ("low", "high"):
            value = getattr(self, bound)
            object.__setattr__(self, bound, None if value is None else float(value))


@dataclass(frozen=True, slots=True)
class SessionSpec:
    """Everything a client must know to talk to a pipeline; its ``digest`` is checked at OpenSession.

    ``action`` is one step ``float32[action_dim]``; a chunk is ``[horizon, action_dim]``. A pipeline without
    actions (a world model) still says which actions it takes. ``normalisation`` names who scales:
    ``"server"`` means the client sends and receives the units written here.
    """

    pipeline: str
    observations: tuple[ArraySpec, ...]
    action: ArraySpec
    horizon: int
    execution_horizon: int
    control_hz: float
    ops: tuple[Op, ...]
    frame: ArraySpec | None = None  # uint8[h, w, 3] of predicted frames; None: no frames
    max_predict: int = 0  # most frames (or imagined steps) one Predict may ask for
    prompt: bool = False  # whether the pipeline reads an instruction
    normalisation: str = "server"
    description: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "control_hz", float(self.control_hz))

    @property
    def digest(self) -> str:
        """Hex SHA-256 over the canonical JSON of the spec."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()

    def observation(self, name: str) -> ArraySpec | None:
        return next((s for s in self.observations if s.name == name), None)


@dataclass(frozen=True, slots=True)
class Observation:
    """One sensed step. ``seq`` counts messages of the session; ``step`` counts control steps.

    ``executed float32[k, action_dim]`` are the actions really executed since the observation before; the
    server never guesses them from wall clocks. Left out, the server takes the first
    ``step - previous step`` actions of the chunk it sent before.
    """

    seq: int
    step: int
    arrays: Mapping[str, Array]
    executed: NDArray[np.float32] | None = None
    captured_ns: int = 0
    frames: int = 0  # how many predicted frames the client wants besides (0: none)
    deadline_ms: float = 0.0  # 0: none
    previews: bool = False  # parts of these frames as they are made
    supersede: bool = False  # observations that wait and have not begun are replaced by this one
    # Real-time chunking: the last control step whose action will have been executed when the answer is there. Rows up
    # to it repeat the chunk before, those after it join it without a jump. None: the chunk is made afresh.
    executed_through: int | None = None


@dataclass(frozen=True, slots=True)
class Timings:
    """Milliseconds inside the server: ``total`` = ``model`` (forward passes) + everything else."""

    total_ms: float = 0.0
    model_ms: float = 0.0
    queue_ms: float = 0.0
    stages_ms: Mapping[str, float] = field(default_factory=dict)

    @property
    def overhead_ms(self) -> float:
        return self.total_ms - self.model_ms


@dataclass(frozen=True, slots=True)
class ActionChunk:
    """``actions float32[horizon, action_dim]``; the first is for control step ``first_step``.

    ``frozen`` rows at the front repeat the chunk before; ``joined`` says how the rest joins it: "" (it does not: the
    chunk was made afresh), "inpainted" (guided by it) or "overlap" (the policy cannot be guided: they may jump).
    """

    seq: int
    first_step: int
    actions: NDArray[np.float32]
    epoch: int
    policy_revision: str = ""
    timings: Timings = Timings()
    frozen: int = 0
    joined: str = ""


@dataclass(frozen=True, slots=True)
class FramePrediction:
    """``frames uint8[n, h, w, 3]``; the first shows the world at control step ``first_step``.

    ``scene float32[n, points, 2]`` are the readout's points in the units of the action space, when the
    pipeline has a readout.

    ``part`` 0 is all frames of the tick, committed. Parts 1, 2, ... come while they are made, where it was asked for:
    nothing of them is committed, and they are void when the tick fails. A ``preview`` shows frames that are not
    finished; a part without it shows the pixels that the whole will show, but for rounding.
    """

    seq: int
    first_step: int
    frames: NDArray[np.uint8]
    epoch: int
    scene: NDArray[np.float32] | None = None
    preview: bool = False
    part: int = 0


@dataclass(frozen=True, slots=True)
class Progress:
    """What the context model thinks: ``progress`` 0..1 (task coverage) and probability of ``done`` 0..1."""

    seq: int
    step: int
    progress: float
    done: float
    epoch: int


@dataclass(frozen=True, slots=True)
class PlanSummary:
    """How a plan was found: ``candidates`` futures imagined in ``iterations`` rounds of ``horizon`` steps each.
    ``cost`` of the chosen one and ``first_cost``, the best of the first round; lower is better.
    ``out_of_time``: the budget ended the search before its last round."""

    seq: int
    cost: float
    first_cost: float
    candidates: int
    iterations: int
    horizon: int
    out_of_time: bool = False


@dataclass(frozen=True, slots=True)
class TickResult:
    """All a tick answered. ``frames_error``: what was asked besides failed; the answer itself stands. ``early``: on the
    server, timings of the answer that left before the frames besides it; None: it came whole."""

    seq: int
    epoch: int
    chunk: ActionChunk | None = None
    frames: FramePrediction | None = None
    progress: Progress | None = None
    timings: Timings = Timings()
    frames_error: OmniLoopError | None = None
    plan: PlanSummary | None = None
    early: Timings | None = None
