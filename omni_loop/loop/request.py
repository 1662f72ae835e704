"""What the orchestrator is asked and what an opened session looks like, for servers in front of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ..types import Array, Op, SessionSpec, TickResult


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What to search for, with the TickRequest's ``op`` PLAN. ``goal uint8[h, w, 3]``: the frame to reach; None: the
    most progress, in a pipeline that judges it. ``method``: ``cem`` or ``mppi``. A ``budget_ms`` of 0 is no bound:
    all ``iterations`` are run. ``init float32[horizon, action_dim]``: where the search begins; None: at no motion.
    """

    horizon: int = 8
    candidates: int = 64
    iterations: int = 3
    method: str = "cem"
    budget_ms: float = 0.0
    goal: NDArray[np.uint8] | None = None
    init: NDArray[np.float32] | None = None


@dataclass(frozen=True, slots=True)
class TickRequest:
    """One seq of one session. Tensors were checked by the wire codec against the session's spec.

    ``step``: INFER: control step of the observation; RECONDITION: control step of the first frame; PREDICT:
    not read (the session's present step is continued).
    ``arrays``: the observation keys; in a RECONDITION each with a leading axis of n frames.
    ``executed float32[k, action_dim]``: actions executed since the last committed observation (INFER), or up
    to the last frame (RECONDITION: n rows, or n - 1 when the first frame has no predecessor). None in an
    INFER: the first ``step - previous step`` rows of the session's last chunk.
    ``actions float32[n, action_dim]``: PREDICT with the client's actions; else ``steps`` imagined ones.
    ``frames``: predicted frames wanted besides an INFER's chunk. ``previews``: parts of the frames are wanted while
    they are made. ``deadline_ms``: from arrival; 0: none. ``supersede``: INFERs of the session that wait and have not
    begun are answered as superseded. ``executed_through``: INFER: the last control step whose action of the chunk
    before will have been executed when the answer is there; see :class:`~omni_loop.types.Observation`.
    """

    session: str
    token: str
    seq: int
    op: Op
    step: int = 0
    arrays: Mapping[str, Array] = field(default_factory=dict)
    executed: NDArray[np.float32] | None = None
    actions: NDArray[np.float32] | None = None
    steps: int = 0
    frames: int = 0
    deadline_ms: float = 0.0
    plan: PlanRequest | None = None
    previews: bool = False
    supersede: bool = False
    executed_through: int | None = None
    spent_ms: float = 0.0  # since the request's bytes came: counted into the answer's timings


# A robot comes back for what it saw; imagination that nobody waits for is not worth a pass of a model.
KEPT = (Op.INFER, Op.RECONDITION)


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """An open session as its owner sees it. ``token`` is the resume token: a secret. ``last_seq``: the highest seq
    accepted so far, above which the next must be; ``step``: where the session stands."""

    id: str
    token: str
    epoch: int
    seed: int
    spec: SessionSpec
    observation_keys: tuple[str, ...]
    last_seq: int = 0
    step: int = 0


@dataclass(frozen=True, slots=True)
class SessionSummary:
    """A session as a list of all of them shows it; holds nothing that gives access to it."""

    id: str
    pipeline: str
    phase: str  # of omni_loop.session.machine.Phase
    epoch: int
    step: int
    last_seq: int
    owner: str = ""


@dataclass(frozen=True, slots=True)
class Attachment:
    """A stream's hold on its session; the one with the highest ``number`` is the present one. ``last_seq``: the highest
    seq answered; ``accepted``: the highest accepted; ``pending``: those accepted and not answered yet. ``replies`` are
    kept answers after what the client has received, in order; ``forgotten`` the highest seq after it whose answer is
    kept no longer, 0 for none."""

    number: int
    epoch: int
    last_seq: int
    accepted: int
    pending: tuple[int, ...]
    replies: tuple[TickResult, ...]
    forgotten: int
