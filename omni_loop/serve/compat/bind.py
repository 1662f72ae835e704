"""Ports of these endpoints: TLS, and why one could not be taken."""

from __future__ import annotations

import errno
import ssl
from typing import TYPE_CHECKING

from ...errors import ConfigError, Reason, ServerUnavailable

if TYPE_CHECKING:
    from ...endpoints import TlsConfig


def tls_context(config: TlsConfig | None) -> ssl.SSLContext | None:
    """For a server; None: plaintext. Raises :class:`ConfigError` for files that hold no certificate or key."""
    if config is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(config.certificate, config.key)
        if config.client_ca is not None:
            context.load_verify_locations(config.client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except (OSError, ssl.SSLError) as error:
        raise ConfigError("access.tls: the certificate, its key or the client CA cannot be read") from error
    return context


def why_not(error: OSError, what: str, host: str, port: int) -> ServerUnavailable:
    if error.errno == errno.EADDRINUSE:
        text = f"{what}: port {port} on {host} is busy; take another, or 0 for any"
        return ServerUnavailable(text, reason=Reason.PORT_BUSY)
    return ServerUnavailable(f"{what}: cannot listen on {host}:{port}: {error.strerror}", retryable=False)
