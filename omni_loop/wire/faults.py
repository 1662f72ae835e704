"""Errors <-> proto: what a program needs to rebuild the same typed error on the other side."""

from __future__ import annotations

from ..errors import (
    CheckpointError,
    Code,
    ConfigError,
    Exhausted,
    InvalidInput,
    MissingExtra,
    OmniLoopError,
    PayloadError,
    Reason,
    ServerUnavailable,
    StageFailed,
    StateError,
    TensorError,
    UnknownName,
    UnknownSession,
    Unsupported,
)
from . import loop_pb2 as pb

ERROR_KEY = "omni-loop-error-bin"  # trailing metadata of a failed unary call: a serialized Error
# Metadata is limited to 8 KiB by default; a longer text would cost the client the whole error.
MAX_TEXT = 1024

_KINDS: tuple[type[OmniLoopError], ...] = (
    TensorError,
    ConfigError,
    UnknownName,
    UnknownSession,
    Unsupported,
    MissingExtra,
    CheckpointError,
    PayloadError,
)
_BY_REASON: dict[tuple[Code, Reason], type[OmniLoopError]] = {
    **{(kind.code, kind.reason): kind for kind in _KINDS},
    (Code.INVALID_ARGUMENT, Reason.TOO_LARGE): TensorError,
    (Code.UNAVAILABLE, Reason.PAYLOAD_CORRUPT): PayloadError,
}
_BY_CODE: dict[Code, type[OmniLoopError]] = {
    Code.INVALID_ARGUMENT: InvalidInput,
    Code.FAILED_PRECONDITION: StateError,
    Code.ABORTED: StateError,
    Code.RESOURCE_EXHAUSTED: Exhausted,
    Code.UNAVAILABLE: ServerUnavailable,
    Code.INTERNAL: StageFailed,
}


def build_error(code: Code, reason: Reason, text: str, retryable: bool) -> OmniLoopError:
    """The narrowest class for that code and reason."""
    cls = _BY_REASON.get((code, reason)) or _BY_CODE.get(code, OmniLoopError)
    return cls(text, code=code, reason=reason, retryable=retryable)


def encode_error(error: OmniLoopError, seq: int = 0, epoch: int = 0) -> pb.Error:
    text = error.text if len(error.text) <= MAX_TEXT else error.text[: MAX_TEXT - 3] + "..."
    return pb.Error(
        seq=seq,
        code=str(error.code),
        reason=str(error.reason),
        retryable=error.retryable,
        text=text.encode(errors="replace").decode(),
        epoch=epoch,
    )


def decode_error(message: pb.Error) -> OmniLoopError:
    """An error of the same class, code and reason; codes and reasons of a newer server become internal ones."""
    try:
        code, reason = Code(message.code), Reason(message.reason)
    except ValueError:
        code, reason = Code.INTERNAL, Reason.STAGE_FAILED
    error = build_error(code, reason, message.text, message.retryable)
    error.epoch = message.epoch
    return error
