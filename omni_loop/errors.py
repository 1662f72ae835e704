"""One hierarchy of errors: a code, a reason, whether a retry helps, and a text that may be shown to anyone.

The text of an :class:`OmniLoopError` is public: it names the offending thing and the nearest right one and
never holds a path, a traceback or another session's data.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from ._compat import StrEnum


class Code(StrEnum):
    """Coarse class of an error; each maps to one gRPC status."""

    INVALID_ARGUMENT = "invalid_argument"
    NOT_FOUND = "not_found"
    FAILED_PRECONDITION = "failed_precondition"
    ABORTED = "aborted"
    RESOURCE_EXHAUSTED = "resource_exhausted"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    UNAVAILABLE = "unavailable"
    UNAUTHENTICATED = "unauthenticated"
    INTERNAL = "internal"


class Reason(StrEnum):
    """What exactly went wrong, for programs."""

    BAD_TENSOR = "bad_tensor"
    BAD_SPEC = "bad_spec"
    BAD_CONFIG = "bad_config"
    BAD_CHECKPOINT = "bad_checkpoint"
    BAD_REQUEST = "bad_request"
    UNKNOWN_NAME = "unknown_name"
    UNKNOWN_SESSION = "unknown_session"
    UNSUPPORTED = "unsupported"
    MISSING_EXTRA = "missing_extra"
    PORT_BUSY = "port_busy"
    STALE_EPOCH = "stale_epoch"
    STALE_SEQ = "stale_seq"
    BUSY = "busy"
    OUT_OF_BLOCKS = "out_of_blocks"
    OUT_OF_BYTES = "out_of_bytes"
    TOO_MANY_SESSIONS = "too_many_sessions"
    TOO_LARGE = "too_large"
    SESSION_LOST = "session_lost"
    EVICTED = "evicted"  # between the runner and the orchestrator, which rebuilds the session or says it is lost
    BAD_SNAPSHOT = "bad_snapshot"
    STAGE_FAILED = "stage_failed"
    BAD_OUTPUT = "bad_output"
    RUNNER_GONE = "runner_gone"
    PAYLOAD_GONE = "payload_gone"
    PAYLOAD_CORRUPT = "payload_corrupt"
    EXPIRED = "expired"
    CLOSED = "closed"
    CANCELLED = "cancelled"
    DRAINING = "draining"
    BAD_TOKEN = "bad_token"
    FENCED = "fenced"  # a newer stream has attached
    SUPERSEDED = "superseded"
    QUOTA = "quota"  # of one principal
    ENV_FAILED = "env_failed"


class OmniLoopError(Exception):
    """Base of every error this project raises at a border."""

    code: Code = Code.INTERNAL
    reason: Reason = Reason.STAGE_FAILED
    retryable: bool = False
    epoch: int = 0  # on the client: of the session concerned; 0 when there is none
    retry_after_ms: float = 0.0  # when a retry may help; 0: nobody can say
    missing_bytes: int = 0  # of an exhausted bound

    def __init__(
        self,
        text: str,
        *,
        reason: Reason | None = None,
        retryable: bool | None = None,
        code: Code | None = None,
        retry_after_ms: float = 0.0,
        missing_bytes: int = 0,
    ) -> None:
        super().__init__(text)
        self.text = text
        if retry_after_ms:
            self.retry_after_ms = retry_after_ms
        if missing_bytes:
            self.missing_bytes = missing_bytes
        if code is not None:
            self.code = code
        if reason is not None:
            self.reason = reason
        if retryable is not None:
            self.retryable = retryable


class InvalidInput(OmniLoopError):
    """The caller sent something that does not fit the spec."""

    code, reason = Code.INVALID_ARGUMENT, Reason.BAD_REQUEST


class TensorError(InvalidInput):
    """A tensor of the wrong name, dtype, shape, size or with values that are not finite."""

    reason = Reason.BAD_TENSOR


class ConfigError(InvalidInput):
    """A deployment, recipe or suite that does not validate."""

    reason = Reason.BAD_CONFIG


class UnknownName(OmniLoopError):
    """A pipeline, stage, env or set of demonstrations nobody registered."""

    code, reason = Code.NOT_FOUND, Reason.UNKNOWN_NAME


class UnknownSession(OmniLoopError):
    """No such session, or not yours: the two look alike on purpose."""

    code, reason = Code.NOT_FOUND, Reason.UNKNOWN_SESSION


class Unsupported(OmniLoopError):
    """The pipeline exists but cannot do this."""

    code, reason = Code.FAILED_PRECONDITION, Reason.UNSUPPORTED


class MissingExtra(OmniLoopError):
    """An optional dependency is not installed; the text names the extra to install."""

    code, reason = Code.FAILED_PRECONDITION, Reason.MISSING_EXTRA


class CheckpointError(OmniLoopError):
    """A checkpoint is missing, corrupt or of another shape than its configuration says."""

    code, reason = Code.FAILED_PRECONDITION, Reason.BAD_CHECKPOINT


class StateError(OmniLoopError):
    """An operation the session's present state does not allow."""

    code, reason = Code.FAILED_PRECONDITION, Reason.STALE_SEQ


class SnapshotError(OmniLoopError):
    """A snapshot is missing, corrupt, or of other weights or specs than the server's."""

    code, reason = Code.FAILED_PRECONDITION, Reason.BAD_SNAPSHOT


class Exhausted(OmniLoopError):
    """A bound is reached: sessions, blocks or bytes. Nothing was half-allocated."""

    code, reason, retryable = Code.RESOURCE_EXHAUSTED, Reason.OUT_OF_BLOCKS, True


class DeadlineExceeded(OmniLoopError):
    """The request's deadline passed; the tick was undone."""

    code, reason, retryable = Code.DEADLINE_EXCEEDED, Reason.EXPIRED, True


class StageFailed(OmniLoopError):
    """A stage raised; the tick was rolled back and the session is as after its last commit."""

    code, reason = Code.INTERNAL, Reason.STAGE_FAILED


class PayloadError(OmniLoopError):
    """A payload could not be fetched: not there, stale, corrupt or gone."""

    code, reason = Code.UNAVAILABLE, Reason.PAYLOAD_GONE


class ServerUnavailable(OmniLoopError):
    """The server cannot serve: port busy, runner gone, draining."""

    code, reason, retryable = Code.UNAVAILABLE, Reason.RUNNER_GONE, True


class EnvFailed(OmniLoopError):
    """A simulator crashed, hung, raised or answered nonsense. Its env is of no more use: close it, and begin the
    episode anew in a fresh one."""

    code, reason, retryable = Code.UNAVAILABLE, Reason.ENV_FAILED, True


SHOWN = 64  # characters of somebody else's name that a text repeats or a look-up compares


def nearest(name: str, known: Iterable[str]) -> str:
    """`` Did you mean 'x'?`` for the known name nearest to ``name``, else the list of known names."""
    names = sorted(known)
    # Matching takes time that grows with the name, and the name may be anything a client sent.
    close = difflib.get_close_matches(name[:SHOWN], names, n=1, cutoff=0.5)
    if close:
        return f" Did you mean {close[0]!r}?"
    return f" Known: {', '.join(names) if names else 'none'}."


# Classes a code stands for when its reason is not some class's own.
_BY_CODE: dict[Code, type[OmniLoopError]] = {
    Code.INVALID_ARGUMENT: InvalidInput,
    Code.NOT_FOUND: UnknownName,
    Code.FAILED_PRECONDITION: StateError,
    Code.ABORTED: StateError,
    Code.RESOURCE_EXHAUSTED: Exhausted,
    Code.DEADLINE_EXCEEDED: DeadlineExceeded,
    Code.UNAVAILABLE: ServerUnavailable,
    Code.INTERNAL: StageFailed,
}
_BY_REASON: dict[Reason, type[OmniLoopError]] = {
    kind.reason: kind
    for kind in (
        *(TensorError, ConfigError, UnknownName, UnknownSession, Unsupported, MissingExtra, CheckpointError),
        *(StateError, Exhausted, DeadlineExceeded, StageFailed, PayloadError, ServerUnavailable, InvalidInput),
        *(SnapshotError, EnvFailed),
    )
}
_BY_REASON[Reason.PAYLOAD_CORRUPT] = PayloadError


def rebuild(
    code: str, reason: str, retryable: bool, text: str, retry_after_ms: float = 0.0, missing_bytes: int = 0
) -> OmniLoopError:
    """The error another process described by its parts, as the class that says most about it.

    Codes and reasons of a newer version than this one become INTERNAL and STAGE_FAILED; the text stays.
    """
    known_code = Code(code) if code in Code._value2member_map_ else Code.INTERNAL
    known_reason = Reason(reason) if reason in Reason._value2member_map_ else Reason.STAGE_FAILED
    kind = _BY_REASON.get(known_reason)
    if kind is None or kind.code is not known_code:
        kind = _BY_CODE.get(known_code, OmniLoopError)
    return kind(
        text,
        code=known_code,
        reason=known_reason,
        retryable=retryable,
        retry_after_ms=retry_after_ms,
        missing_bytes=missing_bytes,
    )
