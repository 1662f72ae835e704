"""Evaluations run as anybody would: ``omni-loop eval`` in a process of its own, read from the folder it writes."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from omni_loop.errors import EnvFailed
from omni_loop_sim_eval.episodes import EpisodeResult
from omni_loop_sim_eval.store import JOURNAL, read_journal

from .rows import Settings

MAIN = "from omni_loop.cli import main; main()"


@dataclass(frozen=True, slots=True)
class Ran:
    """A finished evaluation. ``done_s``: from the first episode's begin until the report is written; ``command_s``: of
    the whole command; ``cpu_s``: user and system time of the command with its server and all its processes."""

    results: tuple[EpisodeResult, ...]
    done_s: float
    command_s: float
    cpu_s: float

    @property
    def rate(self) -> float:
        return sum(r.success for r in self.results) / len(self.results)

    def of(self, task: str) -> Ran:
        """The episodes of one task; the times stay those of all."""
        chosen = tuple(r for r in self.results if r.task == task)
        return replace(self, results=chosen)


@dataclass(frozen=True, slots=True)
class Spent:
    """What a command cost, and what it said."""

    wall_s: float
    cpu_s: float
    code: int
    said: str


def spend(command: Sequence[str], **variables: str) -> Spent:
    """Run ``command`` to its end, one thread to a process for torch."""
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    began, before = time.monotonic(), _children()
    done = subprocess.run(
        command, env={**os.environ, **threads, **variables}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    return Spent(
        time.monotonic() - began, _children() - before, done.returncode, done.stdout.decode(errors="replace")[-4000:]
    )


def _children() -> float:
    """CPU seconds of processes that ended and were waited for, with theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def evaluate(suite: str, folder: Path, *options: str) -> Ran:
    """``omni-loop eval SUITE --out FOLDER OPTIONS``. Episodes that broke are no successes.

    Raises:
        EnvFailed: the command did not finish; the text ends with what it said.
    """
    spent = spend([sys.executable, "-c", MAIN, "eval", suite, "--out", str(folder), "--fresh", *options])
    summary = folder / "summary.json"
    if spent.code not in (0, 1) or not summary.exists():  # 1: episodes broke
        raise EnvFailed(f"omni-loop eval {suite} ended with {spent.code}:\n{spent.said}")
    results = sorted(read_journal(folder), key=lambda r: (r.task, r.episode))
    loop_s = max(r.ended_s for r in results) - min(r.ended_s - r.wall_s for r in results)
    after_s = (folder / "report.html").stat().st_mtime - (folder / JOURNAL).stat().st_mtime
    return Ran(tuple(results), loop_s + after_s, spent.wall_s, spent.cpu_s)


class Runs:
    """Evaluations of a bench, each in a folder of its own below one that goes away at the end."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self.settings, self._folder = settings, folder
        self._made = 0

    def run(self, suite: str, episodes: int, *options: str) -> Ran:
        """``episodes`` of every task of ``suite``; one when figures mean nothing. No films but by ``options``."""
        count = 1 if self.settings.quick else episodes
        self.settings.say(f"{suite} {' '.join(options)}: {count} episodes of each task")
        return evaluate(suite, self.folder(), "--episodes", str(count), "--videos", "none", *options)

    def folder(self) -> Path:
        self._made += 1
        return self._folder / str(self._made)


@contextmanager
def runs(settings: Settings) -> Iterator[Runs]:
    with TemporaryDirectory() as folder:
        yield Runs(settings, Path(folder))
