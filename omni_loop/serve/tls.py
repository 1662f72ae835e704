"""TLS and mTLS of a server, from the PEM files that its deployment names."""

from __future__ import annotations

import os
import ssl
import tempfile

import grpc

from ..endpoints import TlsConfig
from ..errors import ConfigError
from .private import read_private, read_public

HANDSHAKE_MS = 10_000  # a connection that has not shaken hands by then is closed; gRPC's own bound is two minutes


def credentials(tls: TlsConfig) -> grpc.ServerCredentials:
    """For a gRPC port; with ``client_ca`` clients without a certificate of it do not get through the handshake.

    Raises:
        ConfigError: a file cannot be read, others may read the key, it is not the certificate's, or that has ended.
    """
    certificate, key, authority = _files(tls)
    return grpc.ssl_server_credentials(
        [(key, certificate)], root_certificates=authority, require_client_auth=authority is not None
    )


def context(tls: TlsConfig) -> ssl.SSLContext:
    """The same for a websocket or HTTP port. Raises as :func:`credentials` does."""
    certificate, key, authority = _files(tls)
    made = _loaded(tls, certificate, key)
    if authority is not None:
        made.verify_mode = ssl.CERT_REQUIRED
        made.load_verify_locations(cadata=authority.decode("ascii"))
    return made


def until(tls: TlsConfig) -> str:
    """When the server's certificate ends, as the certificate says it. Raises as :func:`credentials` does."""
    certificate, key, _ = _files(tls)
    return _shaken(tls, _loaded(tls, certificate, key), certificate)


def _files(tls: TlsConfig) -> tuple[bytes, bytes, bytes | None]:
    """Certificate chain, key and authority, seen to be of use: gRPC says nothing, and refuses every client."""
    certificate = read_public(tls.certificate, "access.tls.certificate")
    key = read_private(tls.key, "access.tls.key")
    authority = None if tls.client_ca is None else read_public(tls.client_ca, "access.tls.client_ca")
    _shaken(tls, _loaded(tls, certificate, key), certificate)
    if authority is not None:
        try:
            ssl.create_default_context(cadata=authority.decode("ascii"))
        except (ssl.SSLError, ValueError):
            raise ConfigError(f"access.tls.client_ca: {tls.client_ca!r} holds no certificate in PEM") from None
    return certificate, key, authority


def _loaded(tls: TlsConfig, certificate: bytes, key: bytes) -> ssl.SSLContext:
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.minimum_version = ssl.TLSVersion.TLSv1_2
    number, path = tempfile.mkstemp()  # mode 600; ssl takes paths only, and the files may have changed meanwhile
    try:
        with os.fdopen(number, "wb") as file:
            file.write(key.rstrip() + b"\n" + certificate)
        made.load_cert_chain(path, password=lambda: b"")  # an empty one, instead of a question on the terminal
    except (ssl.SSLError, ValueError) as error:
        why = getattr(error, "reason", None) or "not PEM, or the key has a password"
        raise ConfigError(f"access.tls: {tls.certificate!r} and {tls.key!r} are no pair: {why}") from None
    finally:
        os.unlink(path)
    return made


def _shaken(tls: TlsConfig, server: ssl.SSLContext, certificate: bytes) -> str:
    """When the certificate ends, as a client sees it that shakes hands in memory and trusts this one certificate."""
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False  # which name clients will use is not known here
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    client.load_verify_locations(cadata=certificate.decode("ascii"))
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    ours, theirs = client.wrap_bio(down, up), server.wrap_bio(up, down, server_side=True)
    waiting = [ours, theirs]
    try:
        while waiting:
            side = waiting.pop(0)
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                waiting.append(side)
    except ssl.SSLCertVerificationError as error:
        why = f"clients would refuse {tls.certificate!r}: {error.verify_message}"
        raise ConfigError(f"access.tls.certificate: {why}") from None
    return str((ours.getpeercert() or {}).get("notAfter", ""))
