"""What a client shows a server that is not open to all: a token, and certificates for TLS."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Union

import grpc
import grpc.aio

from ..errors import InvalidInput
from . import channel

log = logging.getLogger(__name__)

Pem = Union[str, os.PathLike[str], bytes]  # noqa: UP007  3.10
_BEGINS = b"-----BEGIN"


@dataclass(frozen=True, slots=True)
class Tls:
    """Talk TLS. Each is a path, or the PEM itself as bytes.

    ``ca``: the authority that vouches for the server; None: those this system trusts. ``certificate`` and ``key``: this
    client's own, where the server asks for one (mTLS). The server's name must be one its certificate holds.
    """

    ca: Pem | None = None
    certificate: Pem | None = None
    key: Pem | None = None

    def __repr__(self) -> str:
        return f"Tls(ca={'given' if self.ca else None}, certificate={'given' if self.certificate else None})"

    def credentials(self) -> grpc.ChannelCredentials:
        """Raises :class:`~omni_loop.errors.InvalidInput` for what cannot be read or is no PEM."""
        if (self.certificate is None) != (self.key is None):
            raise InvalidInput("tls needs certificate and key together, or neither")
        read = {name: _read(f"tls.{name}", getattr(self, name)) for name in ("ca", "certificate", "key")}
        return grpc.ssl_channel_credentials(read["ca"], read["key"], read["certificate"])


def open_channel(address: str, token: str | None, tls: Tls | None) -> Any:
    """A ``grpc.Channel`` whose every call carries the token. Raises :class:`~omni_loop.errors.InvalidInput`."""
    return _opened(grpc, address, token, tls)


def open_channel_async(address: str, token: str | None, tls: Tls | None) -> Any:
    """As :func:`open_channel`, a ``grpc.aio.Channel``."""
    return _opened(grpc.aio, address, token, tls)


def _opened(module: Any, address: str, token: str | None, tls: Tls | None) -> Any:
    header = None if token is None else f"Bearer {_checked(token)}"
    if tls is not None and not isinstance(tls, Tls):
        raise InvalidInput(f"tls is {type(tls).__name__}; it must be omni_loop.client.Tls, or None")
    if tls is None:
        if header is not None and not _stays_here(address):
            log.warning("the token travels to %s in the clear: whoever sees the network can take it; give tls", address)
        made = module.insecure_channel(address, options=channel.OPTIONS)
    else:
        made = module.secure_channel(address, tls.credentials(), options=channel.OPTIONS)
    return made if header is None else _Bearer(made, header)


class _Bearer:
    """A channel whose every call carries an ``authorization`` header. gRPC's own way wants TLS, also on loopback."""

    def __init__(self, channel_: Any, header: str) -> None:
        self._channel, self._metadata = channel_, (("authorization", header),)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)

    def unary_unary(self, *args: Any, **options: Any) -> Callable[..., Any]:
        return functools.partial(self._channel.unary_unary(*args, **options), metadata=self._metadata)

    def unary_stream(self, *args: Any, **options: Any) -> Callable[..., Any]:
        return functools.partial(self._channel.unary_stream(*args, **options), metadata=self._metadata)

    def stream_unary(self, *args: Any, **options: Any) -> Callable[..., Any]:
        return functools.partial(self._channel.stream_unary(*args, **options), metadata=self._metadata)

    def stream_stream(self, *args: Any, **options: Any) -> Callable[..., Any]:
        return functools.partial(self._channel.stream_stream(*args, **options), metadata=self._metadata)


def _checked(token: Any) -> str:
    """The token, which no error ever shows."""
    if not isinstance(token, str) or not token or not all("!" <= c <= "~" for c in token):
        raise InvalidInput("token must be a text of visible ASCII characters without spaces")
    return token


def _stays_here(address: str) -> bool:
    host = address.rpartition(":")[0]
    return host in ("localhost", "[::1]") or host.startswith("127.")


def _read(name: str, given: Any) -> bytes | None:
    if given is None:
        return None
    if isinstance(given, (str, os.PathLike)):
        try:
            content = Path(given).read_bytes()
        except OSError as error:
            raise InvalidInput(f"{name}: {os.fspath(given)!r} cannot be read: {error.strerror}") from None
    elif isinstance(given, bytes):
        content = given
    else:
        raise InvalidInput(f"{name} is {type(given).__name__}; it must be a path, or PEM as bytes")
    if _BEGINS not in content:
        raise InvalidInput(f"{name} is not PEM: nothing in it begins with {_BEGINS.decode()!r}")
    return content
