"""A recorder that also keeps in memory what it was told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omni_loop.config import Deployment, RecordConfig
from omni_loop.loop.tap import Failed, Opened, Ticked, Turned
from omni_loop.record.recorder import Recorder
from omni_loop.testing.faulty_disk import Disk


class Listener(Recorder):
    """``told``: everything, in order."""

    def __init__(self, folder: Path, disk: Disk | None = None, **config: Any) -> None:
        self.told: list[Opened | Turned | Ticked | Failed | tuple[str, str]] = []
        record = RecordConfig(folder=str(folder), **config)
        super().__init__(Deployment(pipelines=("toy",), record=record), disk)

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
