"""Whether a command can write where it was told to, asked before any work is done."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from ..errors import ConfigError


def folder(path: Path, option: str, *files: str) -> None:
    """Make ``path`` and see that a file can be written there, and that each of ``files`` can, leaving them alone.

    Raises:
        ConfigError: it cannot; the text names ``option``, the path and why.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path, prefix=".probe-"):
            pass
    except OSError as e:
        why = "a file is in the way" if isinstance(e, (FileExistsError, NotADirectoryError)) else _why(e)
        raise ConfigError(f"{option}: cannot write into the folder {path}: {why}") from None
    for name in files:
        file(path / name, option)


def file(path: Path, option: str) -> None:
    """See that the file ``path`` can be written, making its folder; what is there stays as it is.

    Raises:
        ConfigError: as for :func:`folder`.
    """
    try:
        if path.is_dir():
            raise ConfigError(f"{option}: {path} is a folder, wanted the name of a file")
        if not path.exists():
            folder(path.parent, option)
        elif path.is_file():
            path.open("ab").close()
        elif not os.access(path, os.W_OK):  # a pipe: opening and closing it would end it
            raise ConfigError(f"{option}: {path} cannot be written")
    except OSError as e:
        raise ConfigError(f"{option}: cannot write {path}: {_why(e)}") from None


def _why(error: OSError) -> str:
    return error.strerror or type(error).__name__
