"""Files that hold secrets: read only where nobody but their owner can."""

from __future__ import annotations

import os
import stat

from ..errors import ConfigError

_MOST = 1 << 20  # bytes: a list of tokens or a chain of certificates is far below it


def read_private(path: str, what: str) -> bytes:
    """The content of a file that its owner alone may read or write. Raises :class:`ConfigError`, with the path."""
    return _read(path, what, private=True)


def read_public(path: str, what: str) -> bytes:
    """The content of a file that anyone may read. Raises :class:`ConfigError`, with the path."""
    return _read(path, what, private=False)


def _read(path: str, what: str, *, private: bool) -> bytes:
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            status = os.fstat(file.fileno())  # of what is open, not of what the name meant a moment ago
            if not stat.S_ISREG(status.st_mode):
                raise ConfigError(f"{what}: {path!r} is no file")
            if private and status.st_mode & 0o077:
                mode = stat.S_IMODE(status.st_mode)
                raise ConfigError(f"{what}: others may read or write {path!r} (mode {mode:o}); chmod 600 it")
            content = file.read(_MOST + 1)
    except OSError as error:
        raise ConfigError(f"{what}: {path!r} cannot be read: {error.strerror}") from None
    if len(content) > _MOST:
        raise ConfigError(f"{what}: {path!r} is larger than {_MOST} bytes")
    return content
