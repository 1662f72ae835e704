"""A disk for recordings that is full, or hangs, when somebody says so."""

from __future__ import annotations

import errno
import threading
from pathlib import Path

from ..record.files import Files

WAIT_S = 60.0  # a write that hangs goes on by itself after this, so that a test which fails ends


class Disk(Files):
    """``full``: no write succeeds. While :attr:`flows` is cleared every write hangs. ``refused`` counts writes."""

    def __init__(self) -> None:
        self.full = False
        self.flows = threading.Event()
        self.flows.set()
        self.refused = 0

    def write(self, path: Path, data: bytes) -> int:
        self.flows.wait(WAIT_S)
        if self.full:
            self.refused += 1
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(path, data)
