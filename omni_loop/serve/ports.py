"""Ports of a server, taken or refused with a reason. What can be refused is refused before gRPC makes a server, since
it frees none well that never ran."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable

import grpc
import grpc.aio

from ..errors import Reason, ServerUnavailable


def bound(
    make: Callable[[], grpc.aio.Server],
    credentials: grpc.ServerCredentials | None,
    host: str,
    port: int,
    what: str = "",
) -> tuple[grpc.aio.Server, str]:
    """What ``make`` gives, bound to ``port`` (0: any) of ``host``, and its address; ``what`` names it in a refusal.

    Raises:
        ServerUnavailable: (port busy) or whatever else keeps the system from it.
    """
    try:
        listen(host, port).close()  # gRPC does not say why it could not bind; the operating system does
    except OSError as error:
        raise why_not(error, host, port, what) from error
    server, at = make(), f"{_shown(host)}:{port}"
    try:
        taken = server.add_insecure_port(at) if credentials is None else server.add_secure_port(at, credentials)
    except RuntimeError:
        taken = 0
    if taken == 0:  # since a moment ago
        raise _busy(host, port, what)
    return server, f"{_shown(host)}:{taken}"


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens there. Raises OSError; see :func:`why_not`."""
    return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)


def address(listening: socket.socket) -> str:
    """Where ``listening`` can be reached."""
    host, port = listening.getsockname()[:2]
    return f"{_shown(host)}:{port}"


def why_not(error: OSError, host: str, port: int, what: str = "") -> ServerUnavailable:
    """``error`` of the system, for people."""
    if error.errno == errno.EADDRINUSE:
        return _busy(host, port, what)
    return ServerUnavailable(f"{_of(what)}cannot listen on {_shown(host)}:{port}: {error.strerror}", retryable=False)


def _busy(host: str, port: int, what: str) -> ServerUnavailable:
    text = f"{_of(what)}port {port} on {host} is busy; take another, or 0 for any"
    return ServerUnavailable(text, reason=Reason.PORT_BUSY)


def _of(what: str) -> str:
    return f"{what}: " if what else ""


def _shown(host: str) -> str:
    return f"[{host}]" if ":" in host else host
