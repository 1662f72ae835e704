"""Why a port of these endpoints could not be taken."""

from __future__ import annotations

import errno
import socket

from ...errors import Reason, ServerUnavailable


def why_not(error: OSError, what: str, host: str, port: int) -> ServerUnavailable:
    if error.errno == errno.EADDRINUSE:
        text = f"{what}: port {port} on {host} is busy; take another, or 0 for any"
        return ServerUnavailable(text, reason=Reason.PORT_BUSY)
    return ServerUnavailable(f"{what}: cannot listen on {host}:{port}: {error.strerror}", retryable=False)


def why_not_bound(what: str, host: str, port: int) -> ServerUnavailable:
    """gRPC does not say why it could not bind; the operating system does."""
    try:
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as error:
        return why_not(error, what, host, port)
    return ServerUnavailable(f"{what}: port {port} on {host} was busy; try again", reason=Reason.PORT_BUSY)
