"""How an error leaves the server: as a gRPC status with the typed error in the trailing metadata."""

from __future__ import annotations

import logging
from typing import Any, NoReturn

import grpc
import grpc.aio

from ..errors import OmniLoopError, StageFailed
from ..wire.codec import ERROR_KEY, encode_error

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]


async def refuse(context: Context, error: OmniLoopError, epoch: int = 0) -> NoReturn:
    """End the call with ``error``. Always raises."""
    message = encode_error(error, epoch=epoch)
    details = message.text.encode("ascii", "backslashreplace").decode()[: len(message.text)]
    # Code and StatusCode share their names.
    status = grpc.StatusCode[error.code.name]
    await context.abort(status, details, ((ERROR_KEY, message.SerializeToString()),))
    raise AssertionError("abort returned")


def public(error: BaseException, doing: str) -> OmniLoopError:
    """``error`` itself when it is a typed one; anything else goes to the log, and its place is taken by an
    internal error that says nothing."""
    if isinstance(error, OmniLoopError):
        return error
    log.error("%s failed", doing, exc_info=error)
    return StageFailed(f"{doing} failed inside the server; its log says why")
