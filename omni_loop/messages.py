"""What crosses the runner boundary: frozen messages and payload receipts, never a shared object.

An orchestrator talks to a runner with :class:`Command` messages and hears :class:`Report` messages. Arrays
travel beside them through a connector; a message holds their :class:`Receipt` only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ._compat import StrEnum
from .types import Op

Scalar = str | int | float | bool


class PayloadKind(StrEnum):
    OBSERVATION = "observation"
    ACTIONS = "actions"
    LATENTS = "latents"
    FRAMES = "frames"
    HIDDEN = "hidden"
    TOKENS = "tokens"
    KV = "kv"
    SCENE = "scene"
    PROGRESS = "progress"
    STATE = "state"  # exported typed state of one stage
    GOAL = "goal"  # what a plan is to reach


@dataclass(frozen=True, slots=True)
class PayloadKey:
    """Names a payload: which edge of the pipeline, which session, epoch and tick; ``part`` 0 is the whole, others
    were made on the way there."""

    edge: str
    session: str
    epoch: int
    tick: int
    part: int = 0


@dataclass(frozen=True, slots=True)
class Receipt:
    """Proof that a payload was put; enough to get it. ``location`` is the backend's own.

    One without a ``location`` is pending: a runner finds what it will itself have put under ``key`` when the command's
    turn comes, so a stage can be submitted before the one it reads from has run.
    """

    key: PayloadKey
    kind: str  # of PayloadKind, or one's own
    connector: str
    location: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class OpenSession:
    """Allocate the typed state of a session in ``stages`` (empty: every stage of the runner)."""

    session: str
    seed: int
    prompt: str
    options: Mapping[str, Scalar] = field(default_factory=dict)
    stages: tuple[str, ...] = ()  # full names "pipeline/stage"


@dataclass(frozen=True, slots=True)
class RunStage:
    """Run one stage of one tick. ``inputs`` maps the stage's input names to receipts. ``unhurried``: a later command of
    the session is on its way, and what this one gave may be reported together with it. ``streams``: outputs of which
    parts are wanted as they are made; each is told by a :class:`Part`.

    With a ``part`` it runs a stage without state on that part of its input, beside whatever its session does: it waits
    for no other command, nothing is staged, and when the stage's run on the whole begins it gives nothing."""

    session: str
    epoch: int
    tick: int
    stage: str
    op: Op
    step: int
    inputs: Mapping[str, Receipt]
    params: Mapping[str, Scalar] = field(default_factory=dict)  # e.g. {"frames": 8, "actions": 8}
    unhurried: bool = False
    streams: tuple[str, ...] = ()
    part: int = 0


@dataclass(frozen=True, slots=True)
class Commit:
    """Make everything ``stages`` staged during the tick permanent, together. ``recomputable``: the session's log
    is complete, so that its state may be evicted and made anew."""

    session: str
    epoch: int
    tick: int
    stages: tuple[str, ...]
    recomputable: bool = False


@dataclass(frozen=True, slots=True)
class Discard:
    """Undo everything ``stages`` staged during the tick. What of it has not run does not run any more, and a stage of
    many passes ends between two of them: it fails as cancelled, before this is done."""

    session: str
    epoch: int
    tick: int
    stages: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ResetSession:
    """Begin a new epoch: typed state as freshly opened. ``prompt`` None keeps the old one."""

    session: str
    epoch: int
    seed: int | None = None
    prompt: str | None = None


@dataclass(frozen=True, slots=True)
class ForkSession:
    """Open ``child`` with the committed state of ``session``: blocks are shared, nothing is copied. ``seed`` None:
    the parent's, so that equal requests are answered equally."""

    session: str
    child: str
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class RewindSession:
    """Begin ``epoch`` with the state as it was when ``(to_epoch, to_tick)`` had committed."""

    session: str
    epoch: int
    to_epoch: int
    to_tick: int


@dataclass(frozen=True, slots=True)
class ExportSession:
    """Put the committed state of every stage as one payload each; :class:`Done` has them by full stage name.
    ``epoch``: of the session, which may be newer than the runner's last command."""

    session: str
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class ImportSession:
    """Open ``session`` with exported state: receipts by full stage name. All of it or nothing."""

    session: str
    seed: int
    prompt: str
    epoch: int
    stages: Mapping[str, Receipt]
    options: Mapping[str, Scalar] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CloseSession:
    """Free everything of the session."""

    session: str


@dataclass(frozen=True, slots=True)
class ReleasePayloads:
    """The consumer is done with payloads this runner put."""

    keys: tuple[PayloadKey, ...]


@dataclass(frozen=True, slots=True)
class Probe:
    """Get one small payload by each backend and put its arrays again, under the same names; :class:`Done` has them by
    the same names. What comes back says whether payloads travel both ways."""

    inputs: Mapping[str, Receipt]


Command = (
    OpenSession
    | RunStage
    | Commit
    | Discard
    | ResetSession
    | ForkSession
    | RewindSession
    | ExportSession
    | ImportSession
    | CloseSession
    | ReleasePayloads
    | Probe
)


@dataclass(frozen=True, slots=True)
class Done:
    """A command succeeded. For :class:`RunStage`: receipts by output name; ``model_ms`` is the time of the forward
    passes it took part in, whole ones whoever ran beside it, ``queue_ms`` from its turn to the first of them,
    ``batch`` how many ran in the fullest of them. For :class:`Probe`: ``used``, bytes of sessions' state by device. Of
    a runner's start: ``revisions`` of its stages, by full name."""

    request: int
    outputs: Mapping[str, Receipt] = field(default_factory=dict)
    model_ms: float = 0.0
    queue_ms: float = 0.0
    batch: int = 0
    used: Mapping[str, int] = field(default_factory=dict)
    revisions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Failed:
    """A command failed; ``text`` is public, ``detail`` (a traceback) is for the server's log only."""

    request: int
    code: str
    reason: str
    retryable: bool
    text: str
    detail: str = ""
    retry_after_ms: float = 0.0
    missing_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Part:
    """A :class:`RunStage` that still runs has made something it can show: receipts by output name, put as ``part``
    (1, 2, ...) of the tick. It comes before the command's :class:`Done` or :class:`Failed`."""

    request: int
    part: int
    outputs: Mapping[str, Receipt] = field(default_factory=dict)


Answer = Done | Failed  # one to every command
Report = Answer | Part
