"""A recorder over a disk that fails when a test says so, and what it should have recorded."""

from __future__ import annotations

import errno
import threading
from pathlib import Path
from typing import Any

from zarr.storage import LocalStore

from omni_loop.config import Deployment, RecordConfig
from omni_loop.loop.tap import Failed, Opened, Ticked, Turned
from omni_loop.record.recorder import Recorder


class Disk:
    """``full``: no write succeeds. While :attr:`open` is cleared every write hangs."""

    def __init__(self) -> None:
        self.full = False
        self.open = threading.Event()
        self.open.set()
        self.refused = 0

    def store(self, folder: Path) -> LocalStore:
        return _Store(folder, self)


class _Store(LocalStore):
    def __init__(self, root: Path, disk: Disk) -> None:
        super().__init__(root)
        self._disk = disk

    async def set(self, key: str, value: Any) -> None:
        self._disk.open.wait(30)
        if self._disk.full:
            self._disk.refused += 1
            raise OSError(errno.ENOSPC, "No space left on device")
        await super().set(key, value)


class Listener(Recorder):
    """A recorder that also keeps, in memory, what it was told."""

    def __init__(self, folder: Path, disk: Disk | None = None, **config: Any) -> None:
        self.told: list[Opened | Turned | Ticked | Failed | tuple[str, str]] = []
        record = RecordConfig(folder=str(folder), **config)
        super().__init__(Deployment(pipelines=("toy",), record=record), (disk or Disk()).store)

    @property
    def ticks(self) -> list[Ticked]:
        return [event for event in self.told if isinstance(event, Ticked)]

    def opened(self, event: Opened) -> None:
        self.told.append(event)
        super().opened(event)

    def turned(self, event: Turned) -> None:
        self.told.append(event)
        super().turned(event)

    def ticked(self, event: Ticked) -> None:
        self.told.append(event)
        super().ticked(event)

    def failed(self, event: Failed) -> None:
        self.told.append(event)
        super().failed(event)

    def ended(self, session: str, why: str) -> None:
        self.told.append((session, why))
        super().ended(session, why)
