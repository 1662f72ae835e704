"""Options of commands that connect to a server which is not open to all."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Annotated

import typer

from ..client import Tls
from ..errors import InvalidInput

_FROM = "OMNI_LOOP_TOKEN_FILE"

TokenFile = Annotated[
    Path | None,
    typer.Option("--token-file", envvar=_FROM, help="File that holds the token of this client.", show_default=False),
]
Ca = Annotated[
    Path | None,
    typer.Option(
        "--tls-ca", help="Talk TLS; PEM of the authority that vouches for the server. 'system': those of this machine."
    ),
]
Certificate = Annotated[Path | None, typer.Option("--tls-cert", help="PEM of this client's own certificate (mTLS).")]
Key = Annotated[Path | None, typer.Option("--tls-key", help="PEM of its key.")]


def read_token(path: Path | None) -> str | None:
    """The token in ``path``, without the space around it; None without a path. Not an option of its own: command lines
    are seen by everybody on the machine.

    Raises:
        InvalidInput: the file cannot be read, or others may read it.
    """
    if path is None:
        return None
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode & 0o077:
            raise InvalidInput(
                f"--token-file: others may read or write {os.fspath(path)!r} (mode {mode:o}); chmod 600 it"
            )
        token = path.read_text(encoding="ascii").strip()
    except OSError as error:
        raise InvalidInput(f"--token-file: {os.fspath(path)!r} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InvalidInput(f"--token-file: {os.fspath(path)!r} holds other than ASCII") from None
    if not token:
        raise InvalidInput(f"--token-file: {os.fspath(path)!r} is empty")
    return token


def tls_of(ca: Path | None, certificate: Path | None, key: Path | None) -> Tls | None:
    """None: plaintext. Raises InvalidInput."""
    if ca is None:
        if certificate is not None or key is not None:
            raise InvalidInput("--tls-cert and --tls-key need --tls-ca: a file, or 'system'")
        return None
    return Tls(None if str(ca) == "system" else ca, certificate, key)
