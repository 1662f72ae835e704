"""How recorded episodes ended in the world: only who drove them knows, and says so beside the recording."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .reader import Episode, Recording, RecordingError

FILE = "outcomes.json"


@dataclass(frozen=True, slots=True)
class Outcomes:
    """By session: ``success`` (bool) and whatever else its driver wrote, such as ``score`` and ``seed``."""

    sessions: Mapping[str, Mapping[str, Any]]

    @classmethod
    def read(cls, recording: Recording) -> Outcomes:
        """Those beside ``recording`` and beside its runs; none where nobody wrote any.

        Raises:
            RecordingError: a file of outcomes that is none.
        """
        found: dict[str, Mapping[str, Any]] = {}
        folders = {recording.path, *(folder.parent for episode in recording for folder in episode.folders)}
        folders |= {folder.parent for folder in tuple(folders)}
        for folder in folders:
            if (folder / FILE).is_file():
                found |= _read(folder / FILE)
        return cls(found)

    def success(self, episode: Episode) -> bool | None:
        """Whether ``episode`` succeeded; None: nobody said."""
        about = self.sessions.get(episode.session)
        return None if about is None else bool(about["success"])


def write(folder: Path, sessions: Mapping[str, Mapping[str, Any]]) -> None:
    """Say how ``sessions`` ended, beside what ``folder`` says already."""
    place = folder / FILE
    known = _read(place) if place.is_file() else {}
    place.write_text(json.dumps({**known, **sessions}, indent=1) + "\n", encoding="utf-8")


def _read(place: Path) -> dict[str, Mapping[str, Any]]:
    try:
        data = json.loads(place.read_text(encoding="utf-8"))
        return {str(session): {**about, "success": bool(about["success"])} for session, about in data.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RecordingError(f"{place.name} cannot be read: {type(error).__name__}") from error
