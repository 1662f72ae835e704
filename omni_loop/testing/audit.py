"""What a piece of code makes the interpreter do, seen through its audit events (PEP 578)."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# Code made, loaded or started, other programs, files and connections.
FORBIDDEN = frozenset(
    {
        *("compile", "exec", "import", "code.__new__", "function.__new__", "marshal.loads", "pickle.find_class"),
        *("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty"),
        *("open", "os.remove", "os.rename", "os.mkdir", "os.chmod", "shutil.rmtree", "tempfile.mkstemp"),
        *("ctypes.dlopen", "ctypes.dlsym", "socket.connect", "socket.bind", "urllib.Request", "sys.addaudithook"),
    }
)
_here = threading.local()
_installed = False


@contextmanager
def watched() -> Iterator[list[str]]:
    """Forbidden events of this thread while the block runs, each with its first argument."""
    _install()
    seen: list[str] = []
    _here.seen = seen
    try:
        yield seen
    finally:
        _here.seen = None


def _install() -> None:
    """An audit hook can never be removed; while nobody watches it does next to nothing."""
    global _installed
    if not _installed:
        sys.addaudithook(_hook)
        _installed = True


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if event in FORBIDDEN:
        seen = getattr(_here, "seen", None)
        if seen is not None:
            seen.append(f"{event} {str(args[0])[:80] if args else ''}".strip())
