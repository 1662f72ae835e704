"""Errors <-> proto: what a program needs to rebuild the same typed error on the other side."""

from __future__ import annotations

import math

from ..errors import OmniLoopError, rebuild
from . import loop_pb2 as pb

ERROR_KEY = "omni-loop-error-bin"  # trailing metadata of a failed unary call: a serialized Error
# Metadata is limited to 8 KiB by default; a longer text would cost the client the whole error.
MAX_TEXT = 1024
_UINT64 = (1 << 64) - 1


def encode_error(error: OmniLoopError, seq: int = 0, epoch: int = 0) -> pb.Error:
    text = error.text if len(error.text) <= MAX_TEXT else error.text[: MAX_TEXT - 3] + "..."
    return pb.Error(
        seq=seq,
        code=str(error.code),
        reason=str(error.reason),
        retryable=error.retryable,
        text=text.encode(errors="replace").decode(),
        epoch=epoch,
        retry_after_ms=_bounded(error.retry_after_ms),
        missing_bytes=min(max(error.missing_bytes, 0), _UINT64),
    )


def decode_error(message: pb.Error) -> OmniLoopError:
    """An error of the same class, code and reason, with the session's epoch."""
    error = rebuild(
        message.code,
        message.reason,
        message.retryable,
        message.text,
        _bounded(message.retry_after_ms),
        message.missing_bytes,
    )
    error.epoch = message.epoch
    return error


def _bounded(ms: float) -> float:
    """A wait that makes sense; 0, "nobody can say", for any other."""
    return ms if math.isfinite(ms) and ms > 0 else 0.0
