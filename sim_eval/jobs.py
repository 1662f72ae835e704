"""Which episode is run next: those of one task together, so that an env is made once and used again."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass

from .suite import EvalSuite


@dataclass(frozen=True, slots=True, order=True)
class Job:
    """One episode of a suite. ``task`` is "" in a suite without tasks; ``failed`` says how it ended before, where a
    process or an env died with it."""

    task: str
    episode: int
    failed: tuple[str, ...] = ()

    @property
    def key(self) -> tuple[str, int]:
        return self.task, self.episode


class Jobs:
    """The episodes of ``suite`` that are not ``done`` yet."""

    def __init__(self, suite: EvalSuite, done: Collection[tuple[str, int]] = ()) -> None:
        self._waiting = {
            task: deque(Job(task, i) for i in range(suite.episodes) if (task, i) not in done)
            for task in suite.task_names
        }
        self._at_work: dict[str, int] = dict.fromkeys(self._waiting, 0)
        self.left = sum(len(jobs) for jobs in self._waiting.values())  # not finished

    @property
    def waiting(self) -> int:
        return sum(len(jobs) for jobs in self._waiting.values())

    def take(self, task: str | None) -> Job | None:
        """The next for a worker that has an env of ``task``: of the same task while there are any, else of the one with
        most left for each who is at work on it. None: nothing waits."""
        if task is None or not self._waiting.get(task):
            most = max(self._waiting, key=lambda name: len(self._waiting[name]) / (1 + self._at_work[name]))
            task = most if self._waiting[most] else None
        if task is None:
            return None
        self._at_work[task] += 1
        return self._waiting[task].popleft()

    def finished(self, job: Job) -> None:
        self._at_work[job.task] -= 1
        self.left -= 1

    def again(self, job: Job, why: str) -> None:
        """Put ``job`` back, to be run next: a process or its env died with it."""
        self._at_work[job.task] -= 1
        self._waiting[job.task].appendleft(Job(job.task, job.episode, (*job.failed, why)))
