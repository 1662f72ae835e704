"""What a session did, bounded in bytes: enough to make its state anew, and to know where it can go back to.

::

    base ──► entry ──► entry ──► ... ──► entry      the log: replayed from its base it gives the state there is
                              [version, version]    the last few, with what they fed to the next tick

The base is a fresh session, or a snapshot. A log that outgrows its bytes moves its base to the last snapshot; where
there is none it is incomplete, and state that is evicted then is lost. Every operation of a tick is O(1).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from ..stage import Payload
from ..types import ActionChunk
from .machine import Position

W = TypeVar("W")
ENTRY_BYTES = 2048  # what an entry takes beside its arrays, so that entries without any are bounded too


@dataclass(frozen=True, slots=True)
class Version:
    """Where a session stood when tick ``tick`` of ``epoch`` had committed."""

    epoch: int
    tick: int
    position: Position
    chunk: ActionChunk | None = None

    @property
    def key(self) -> tuple[int, int]:
        return self.epoch, self.tick


@dataclass(frozen=True, slots=True)
class Kept:
    """A version with the payloads it fed to the next tick, by feedback edge."""

    version: Version
    feedback: Mapping[str, Payload] = field(default_factory=dict)


@dataclass(slots=True)
class Entry(Generic[W]):
    """A committed tick. ``work`` is what the loop needs to run it again; ``besides``: what was asked besides has
    committed too."""

    version: Version
    seed: int
    work: W
    nbytes: int
    besides: bool = False
    holders: int = 1  # logs it stands in: a child shares its parent's past


@dataclass(frozen=True, slots=True)
class Base:
    """A snapshot that a log can begin from. ``digest`` tells it from a later one of the same name."""

    name: str
    digest: str
    version: Version


@dataclass(slots=True)
class Room:
    """Bytes of the logs of all sessions together; what several share is counted once."""

    limit: int
    used: int = 0

    def enter(self, entry: Entry[Any]) -> None:
        self.used += entry.nbytes

    def leave(self, entry: Entry[Any]) -> None:
        """One log less has ``entry``."""
        entry.holders -= 1
        if entry.holders == 0:
            self.used -= entry.nbytes

    @property
    def full(self) -> bool:
        return self.used > self.limit


class SessionLog(Generic[W]):
    """See the module's text. ``limit`` bytes of entries; ``keep`` versions can be gone back to without a replay;
    ``room`` is shared with other logs: the one that grows beyond it gives way, so that no other session's state, which
    the runners believe can be made anew, is lost unawares."""

    def __init__(self, limit: int, keep: int, room: Room | None = None) -> None:
        self._limit, self._keep, self._room = limit, keep, room or Room(limit)
        self.base: Base | None = None  # None: the session as freshly opened
        self.saved: Base | None = None  # the last snapshot of a state that is still in this session's past
        self.complete = True
        self.entries: list[Entry[W]] = []
        self.nbytes = 0
        self.kept: deque[Kept] = deque(maxlen=keep)

    @property
    def recomputable(self) -> bool:
        """The state can be made anew without anything else."""
        return self.complete and self.base is None

    def add(self, version: Version, seed: int, work: W, nbytes: int) -> Entry[W]:
        """A tick commits."""
        entry = Entry(version, seed, work, nbytes + ENTRY_BYTES)
        if self.complete:
            self.entries.append(entry)
            self.nbytes += entry.nbytes
            self._room.enter(entry)
            if self.nbytes > self._limit or self._room.full:
                self._shrink()
        return entry

    def keep(self, version: Version, feedback: Mapping[str, Payload]) -> None:
        """The tick is over, and this is what it fed to the next one."""
        self.kept.append(Kept(version, feedback))

    def reaches(self, version: Version) -> bool:
        """Whether a replay can lead to ``version``: the log is whole from a base that is not after it."""
        return self.complete and (self.base is None or self.base.version.key <= version.key)

    def snapshotted(self, base: Base) -> None:
        """The present state was saved. A log that began with a snapshot of that name, which is no more, or that was not
        complete, begins here now."""
        self.saved = base
        if not self.complete or (self.base is not None and self.base.name == base.name):
            self.base, self.complete = base, True
            self._begin_after(base.version)

    def find(self, step: int) -> Version | None:
        """The latest version that stands at ``step``."""
        return max((v for v in self._versions() if v.position.step == step), key=lambda v: v.key, default=None)

    def steps(self) -> list[int]:
        """Every step that can be gone back to."""
        return sorted({v.position.step for v in self._versions()})

    def feedback(self, version: Version) -> Mapping[str, Payload] | None:
        """What ``version`` fed to the next tick; None: only a replay can tell."""
        return next((k.feedback for k in reversed(self.kept) if k.version.key == version.key), None)

    def forget(self, version: Version) -> None:
        """``version`` and those before it can no longer be gone back to without a replay."""
        while self.kept and self.kept[0].version.key <= version.key:
            self.kept.popleft()

    def cut(self, version: Version) -> None:
        """Forget everything after ``version``."""
        while self.kept and self.kept[-1].version.key > version.key:
            self.kept.pop()
        while self.entries and self.entries[-1].version.key > version.key:
            self._gone(self.entries.pop())
        if self.saved is not None and self.saved.version.key > version.key:
            self.saved = None
        if self.base is not None and self.base.version.key > version.key:
            self._lose()  # the base lies in a future that is no more

    def lose(self) -> None:
        """Its base is no more what it was."""
        self._lose()

    def until(self, version: Version | None) -> list[Entry[W]]:
        """The entries that lead from the base to ``version`` (None: to the end)."""
        return [e for e in self.entries if version is None or e.version.key <= version.key]

    def clear(self, base: Base | None = None) -> None:
        """The session is fresh, or as ``base`` says."""
        self.base = self.saved = base
        self.complete = True
        self._empty()
        self.kept.clear()

    def forked(self) -> SessionLog[W]:
        """A child's log: the same past. What the runners keep to go back to is the parent's alone."""
        child: SessionLog[W] = SessionLog(self._limit, self._keep, self._room)
        child.base, child.saved, child.complete = self.base, self.saved, self.complete
        child.entries, child.nbytes = list(self.entries), self.nbytes
        for entry in child.entries:
            entry.holders += 1
        return child

    def _versions(self) -> Iterable[Version]:
        """All that are known; the recent ones stand in the log too."""
        for kept in self.kept:
            yield kept.version
        for entry in self.entries:
            yield entry.version
        if self.base is not None:
            yield self.base.version

    def _shrink(self) -> None:
        saved = self.saved
        if saved is None or (self.base is not None and self.base.version.key >= saved.version.key):
            self._lose()
            return
        self.base = saved
        self._begin_after(saved.version)
        if self.nbytes > self._limit or self._room.full:
            self._lose()

    def _lose(self) -> None:
        self.base, self.complete = None, False
        self._empty()

    def _begin_after(self, version: Version) -> None:
        gone = [e for e in self.entries if e.version.key <= version.key]
        self.entries = [e for e in self.entries if e.version.key > version.key]
        for entry in gone:
            self._gone(entry)

    def _empty(self) -> None:
        for entry in self.entries:
            self._gone(entry)
        self.entries = []

    def _gone(self, entry: Entry[W]) -> None:
        self.nbytes -= entry.nbytes
        self._room.leave(entry)
