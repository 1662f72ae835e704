"""Channel options, and gRPC failures as typed errors."""

from __future__ import annotations

from typing import Any

import grpc
from google.protobuf.message import DecodeError

from ..errors import Code, OmniLoopError, Reason, rebuild
from ..wire import loop_pb2 as pb
from ..wire.codec import ERROR_KEY, decode_error
from .book import ANSWER_BYTES

SERVICE = pb.DESCRIPTOR.services_by_name["Loop"].full_name
TIMEOUT_S = 60.0  # of a call, unless the client says otherwise

# Pings half as often as the server permits: more often and it closes the connection (too_many_pings).
OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", ANSWER_BYTES),
    ("grpc.max_send_message_length", -1),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),  # else the core waits a minute for a peer that went silent
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # A robot whose network came back is not to wait for gRPC's minutes: whoever retries waits by itself.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 2_000),  # also what one attempt may take
    ("grpc.max_reconnect_backoff_ms", 1_000),
]

# Statuses that gRPC itself makes, without our trailer.
_OWN: dict[grpc.StatusCode, tuple[Code, Reason, bool]] = {
    grpc.StatusCode.UNAVAILABLE: (Code.UNAVAILABLE, Reason.RUNNER_GONE, True),
    grpc.StatusCode.DEADLINE_EXCEEDED: (Code.DEADLINE_EXCEEDED, Reason.EXPIRED, True),
    # Nobody here cancels and then waits: the server ended the call, as it does when it stops.
    grpc.StatusCode.CANCELLED: (Code.UNAVAILABLE, Reason.CANCELLED, True),
    # Ours has a trailer: this is what gRPC says of a connection that broke.
    grpc.StatusCode.INTERNAL: (Code.UNAVAILABLE, Reason.RUNNER_GONE, True),
    grpc.StatusCode.UNKNOWN: (Code.UNAVAILABLE, Reason.RUNNER_GONE, True),
    grpc.StatusCode.RESOURCE_EXHAUSTED: (Code.INVALID_ARGUMENT, Reason.TOO_LARGE, False),
    grpc.StatusCode.UNIMPLEMENTED: (Code.FAILED_PRECONDITION, Reason.UNSUPPORTED, False),
    grpc.StatusCode.UNAUTHENTICATED: (Code.UNAUTHENTICATED, Reason.BAD_TOKEN, False),
}


def method(name: str) -> str:
    return f"/{SERVICE}/{name}"


def typed(error: grpc.RpcError, address: str) -> OmniLoopError:
    """The server's own error where it sent one, else what gRPC's status means."""
    trailers: Any = error.trailing_metadata() or ()
    for key, value in trailers:
        if key == ERROR_KEY and (sent := _sent(value)) is not None:
            return sent
    status = error.code()
    details = error.details() or status.name
    code, reason, retryable = _OWN.get(status, (Code.INTERNAL, Reason.STAGE_FAILED, False))
    if status is grpc.StatusCode.UNAVAILABLE:
        details = f"no server answers at {address}: {details}"
    elif status is grpc.StatusCode.CANCELLED:
        details = f"{address} ended the call: {details}"
    return rebuild(code, reason, retryable, details)


def _sent(value: Any) -> OmniLoopError | None:
    """The error in a trailer; None when a bad network has spoilt it."""
    try:
        return decode_error(pb.Error.FromString(value))
    except DecodeError:
        return None
