"""A session as it is kept outside the server, and what keeps it. Plain values: a store decides how they lie on disk."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from ..messages import Scalar
from ..stage import Payload
from ..types import ActionChunk
from .machine import Position

RESERVED = "session-"  # before a session's id: the name it is kept under to outlive its server
_KEPT = re.compile(RESERVED + "[0-9a-f]{16}")


def reserved(name: str) -> bool:
    """Whether ``name`` is that of a session which outlives its server, and nobody else's to write or restore."""
    return _KEPT.fullmatch(name) is not None


@dataclass(frozen=True, slots=True)
class SnapshotData:
    """Everything that makes a session go on elsewhere as if nothing had happened.

    ``spec``: digest of the pipeline's spec. ``tick`` is that of the next tick, ``seq`` the last one that is over.
    ``stages`` holds the exported state by full stage name, ``feedback`` what was fed to the next tick, by edge.
    """

    pipeline: str
    spec: str
    seed: int
    prompt: str
    keys: tuple[str, ...]
    options: Mapping[str, Scalar]
    epoch: int
    tick: int
    seq: int
    position: Position
    chunk: ActionChunk | None
    stages: Mapping[str, Payload]
    feedback: Mapping[str, Payload]
    # Of a session that outlives its server.
    token: str = ""  # SHA-256 of its resume token, in hex
    owner: str = ""
    attachment: int = 0
    answered: int = 0
    forgotten: int = 0
    replies: tuple[bytes, ...] = ()  # kept answers, as TickReply messages
    whole: bool = False  # no tick followed it: it was written when the server stopped


@dataclass(frozen=True, slots=True)
class Saved:
    """What became of a snapshot: ``nbytes`` on disk; ``digest`` differs from that of any other content."""

    nbytes: int
    digest: str


class SnapshotStore(Protocol):
    """Blocking calls, safe from several threads at once."""

    def names(self) -> list[str]:
        """Of all snapshots that are kept."""

    def save(self, name: str, data: SnapshotData) -> Saved:
        """Write ``data`` as ``name``; one of that name is replaced when the new one is complete.

        Raises:
            InvalidInput: ``name`` cannot be one. Exhausted: the store's bytes. SnapshotError: it cannot be written.
        """

    def load(self, name: str) -> tuple[SnapshotData, Saved]:
        """The snapshot, whole and as it was written.

        Raises:
            InvalidInput: ``name`` cannot be one. UnknownName: there is none. SnapshotError: corrupt, or of a version
            that is not known.
        """
