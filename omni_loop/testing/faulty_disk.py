"""A disk for recordings that is full, or hangs, when somebody says so."""

from __future__ import annotations

import errno
import threading
from pathlib import Path
from typing import Any

from zarr.storage import LocalStore

WAIT_S = 60.0  # a write that hangs goes on by itself after this, so that a test which fails ends


class Disk:
    """``full``: no write succeeds. While :attr:`flows` is cleared every write hangs. ``refused`` counts writes."""

    def __init__(self) -> None:
        self.full = False
        self.flows = threading.Event()
        self.flows.set()
        self.refused = 0

    def store(self, folder: Path) -> LocalStore:
        """Where a recorder writes the episode in ``folder``."""
        return _Store(folder, self)


class _Store(LocalStore):
    def __init__(self, root: Path, disk: Disk) -> None:
        super().__init__(root)
        self._disk = disk

    async def set(self, key: str, value: Any) -> None:
        self._disk.flows.wait(WAIT_S)
        if self._disk.full:
            self._disk.refused += 1
            raise OSError(errno.ENOSPC, "No space left on device")
        await super().set(key, value)
