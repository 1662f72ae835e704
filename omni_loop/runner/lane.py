"""What waits for a stage, what runs in it, and what found no room there."""

from __future__ import annotations

from typing import Any

from ..errors import Exhausted
from ..messages import Command, RunStage
from ..stage import Job, Stage, SteppedStage, StreamingStage

_LATELY_NS = 1_000_000_000  # a session that ran a stage within this time is expected again


class Work:
    """One command under way. Times are in nanoseconds of the batcher's clock. Ordered by age."""

    __slots__ = (
        "age",
        "aside",  # it runs on a part, and keeps no order
        "batch",  # how many ran in the fullest pass it took part in
        "began",  # its first batch
        "command",
        "company",  # it has run beside others
        "cost_ns",
        "ended",  # nobody wants it any more
        "error",  # that it found no room
        "final",  # it cannot run twice
        "give_up",  # looking for room
        "item",
        "job",
        "model_ns",
        "parked",  # it waits for room
        "parts",  # that it has shown
        "ready",  # submitted, or its turn came
        "request",
        "shows",  # parts are wanted of it
        "solo",  # it runs alone
        "tried",  # again, after it had found no room
        "turn",  # it is the oldest of its sessions
    )

    def __init__(self, age: int, request: int, command: Command, submitted: int) -> None:
        self.age, self.request, self.command, self.ready = age, request, command, submitted
        self.item: Any = None
        self.job: Job | None = None
        self.error: Exhausted | None = None
        self.turn = self.solo = self.company = self.parked = self.tried = self.ended = self.shows = False
        self.aside = self.final = type(command) is RunStage and command.part > 0
        self.batch = self.began = self.give_up = self.model_ns = self.parts = 0
        self.cost_ns = 0.0

    def __lt__(self, other: Work) -> bool:
        return self.age < other.age


class Lane:
    """One stage's work; at most ``size`` items run together, and a batch waits at most ``wait_ns``."""

    def __init__(self, name: str, stage: Stage, size: int, wait_ns: int) -> None:
        self.name, self.stage = name, stage
        self.stepped = stage if isinstance(stage, SteppedStage) else None
        self.streaming = stage if isinstance(stage, StreamingStage) else None
        self.waiting: list[Work] = []  # oldest first
        self.jobs: list[Work] = []  # begun and not finished, of a stage of many passes
        self.parked: list[Work] = []  # found no room; oldest first
        self.asides: list[Work] = []  # on parts; oldest first
        self.room = False  # state was freed since
        self._size, self._wait_ns = size, wait_ns
        self._lately: dict[str, int] = {}  # when a session last ran here, oldest first

    def take(self) -> list[Work]:
        """The oldest that may run beside those that run; one that must be alone waits until it is."""
        waiting, room = self.waiting, self._size - len(self.jobs)
        if not waiting or room <= 0:
            return []
        if waiting[0].solo:
            return [] if self.jobs else [waiting.pop(0)]
        if self.jobs and self.jobs[0].solo:
            return []
        end = 1
        while end < min(room, len(waiting)) and not waiting[end].solo:
            end += 1
        taken, self.waiting = waiting[:end], waiting[end:]
        return taken

    def take_aside(self, one_each: bool) -> list[Work]:
        """The oldest on parts, a batch of them; ``one_each`` of every session."""
        taken: list[Work] = []
        seen: set[str] = set()
        for work in self.asides:
            session = work.command.session  # type: ignore[union-attr]
            if len(taken) < self._size and not (one_each and session in seen):
                taken.append(work)
                seen.add(session)
        self.asides = [work for work in self.asides if work not in taken]
        return taken

    def due(self, now: int) -> int:
        """When those that wait should run: at once, unless sessions that ran here lately may soon join them."""
        waiting = self.waiting
        if not self._wait_ns or len(waiting) >= self._size or waiting[0].solo:
            return now
        here = {work.command.session for work in waiting}  # type: ignore[union-attr]
        if not any(at > now - _LATELY_NS and name not in here for name, at in self._lately.items()):
            return now
        return min(work.ready for work in waiting) + self._wait_ns

    def served(self, work: Work, now: int) -> None:
        if not self._wait_ns:
            return
        session = work.command.session  # type: ignore[union-attr]
        self._lately.pop(session, None)
        self._lately[session] = now
        while self._lately[oldest := next(iter(self._lately))] <= now - _LATELY_NS:
            del self._lately[oldest]

    def forget(self, session: str) -> None:
        """It is closed: nobody waits for it."""
        self._lately.pop(session, None)
