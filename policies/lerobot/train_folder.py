"""A folder that is there when it is complete, and not before."""

from __future__ import annotations

import contextlib
import re
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from omni_loop.errors import ConfigError

_PLAIN = re.compile(r"\w[\w .+-]{0,99}")


def plain_name(name: str) -> str:
    """``name``, if it is that of a folder and leads nowhere else. Raises ConfigError."""
    if not _PLAIN.fullmatch(name):
        raise ConfigError(f"--name: {name!r} is no plain name of a folder: letters, digits, '_', '-', '.', '+', ' '")
    return name


@contextlib.contextmanager
def made_beside(folder: Path) -> Iterator[Path]:
    """A hidden folder beside ``folder``, which takes its name when the block ends well; else it is removed, also when
    the process is asked to end. What a killed run left behind is removed at the next start."""
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        with _ended_by_signal():
            partial.mkdir(parents=True)
            yield partial
            partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


@contextlib.contextmanager
def _ended_by_signal() -> Iterator[None]:
    """SIGTERM is an exception here, so that what must be undone is, unless somebody else handles it already."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return

    def end(*_: object) -> NoReturn:
        raise SystemExit(128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
