"""Episodes at work: in processes, each with an env and a connection of its own, or in threads where a process could not
be told how to connect (a test's double) or would not find the env (registered in this process alone)."""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any, Protocol

from omni_loop import registry
from omni_loop.errors import InvalidInput

from . import journal_line
from .api import Connect
from .jobs import Job
from .results import EpisodeResult
from .shard import READY, describe
from .suite import EvalSuite
from .worker import Worker

START_S = 180.0  # for a process to start, and for its simulator
_TAIL = 1000  # characters of a dead process's output that are repeated
# Shards share the machine with each other and the server: one thread each, also in libraries that take every core.
_ONE_THREAD = dict.fromkeys(
    ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS", "LP_NUM_THREADS"), "1"
)


@dataclass(frozen=True, slots=True)
class Ready:
    """The shard takes episodes."""


@dataclass(frozen=True, slots=True)
class Died:
    """The shard is gone, and ``why``."""

    why: str


Said = EpisodeResult | Ready | Died
Heard = queue.SimpleQueue[tuple["Shard", Said]]


class Shard(Protocol):
    """One at work. It says Ready once, a result for each :meth:`give`, and Died at most once, as its last."""

    job: Job | None  # at work
    task: str | None  # of the env it has
    starts: bool  # it has to make an env, or a process, first
    since: float  # when that, or the start, began, by time.monotonic()
    ready: bool
    fresh: bool  # one process for one env: an env that broke takes it along

    def give(self, job: Job) -> None: ...

    def end(self) -> None:
        """No more episodes: close env and connection, in its own time."""

    def wait(self, seconds: float) -> None:
        """For what :meth:`end` began."""

    def drop(self) -> None:
        """End at once, in the middle of whatever; nothing more is said that counts."""


def start(suite: EvalSuite, connect: Connect, heard: Heard) -> Shard:
    told = None if registry.only_here(registry.ENVS, suite.env) else describe(connect)
    return ThreadShard(suite, connect, heard) if told is None else ProcessShard(suite, told, heard)


class ThreadShard:
    """Episodes on a thread of this process."""

    fresh = False

    def __init__(self, suite: EvalSuite, connect: Connect, heard: Heard) -> None:
        self.job: Job | None = None
        self.task: str | None = None
        self.starts = True
        self.since = time.monotonic()
        self.ready = False
        self._dropped = False
        self._worker, self._heard = Worker(suite, connect), heard
        self._todo: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, daemon=True, name="episodes")
        self._thread.start()
        heard.put((self, Ready()))

    def give(self, job: Job) -> None:
        self.starts = self.task != job.task
        self.job, self.task, self.since = job, job.task, time.monotonic()
        self._todo.put(job)

    def end(self) -> None:
        self._todo.put(None)

    def wait(self, seconds: float) -> None:
        self._thread.join(timeout=seconds)

    def drop(self) -> None:
        self._dropped = True
        self._todo.put(None)

    def _work(self) -> None:
        while (job := self._todo.get()) is not None and not self._dropped:
            self._heard.put((self, self._worker.run(job)))
        self._worker.close()


class ProcessShard:
    """Episodes in a process of its own: ``python -m omni_loop_sim_eval.shard``."""

    fresh = True

    def __init__(self, suite: EvalSuite, connect: dict[str, Any], heard: Heard) -> None:
        self.job: Job | None = None
        self.task: str | None = None
        self.starts = True
        self.since = time.monotonic()
        self.ready = False
        self._heard = heard
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  closed with the process
        self._link, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "omni_loop_sim_eval.shard", "--fd", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs.fileno(),),
                env=os.environ | _ONE_THREAD,
                start_new_session=True,  # Ctrl-C in the terminal reaches the parent, which then ends it
            )
        self._tell({"suite": suite.model_dump(mode="json"), "connect": connect})
        self._thread = threading.Thread(target=self._read, daemon=True, name=f"shard {self._process.pid}")
        self._thread.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def give(self, job: Job) -> None:
        self.starts = self.task != job.task
        self.job, self.task, self.since = job, job.task, time.monotonic()
        self._tell({"task": job.task, "episode": job.episode})

    def end(self) -> None:
        self._send(b"\n")

    def wait(self, seconds: float) -> None:
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._thread.join()

    def drop(self) -> None:
        self._process.kill()
        self._thread.join()

    def _tell(self, said: dict[str, Any]) -> None:
        self._send(json.dumps(said).encode() + b"\n")

    def _send(self, data: bytes) -> None:
        with suppress(OSError):  # it is gone, which the reading thread says
            self._link.sendall(data)

    def _read(self) -> None:
        with self._link, self._link.makefile("rb") as lines:
            try:
                for line in lines:
                    said: Said = Ready() if line.strip() == READY else journal_line.decode(line)
                    self._heard.put((self, said))
            except (OSError, InvalidInput):  # a line that was torn when it died
                pass
        code = self._process.wait()
        with self._log:
            size = self._log.seek(0, os.SEEK_END)
            self._log.seek(max(0, size - _TAIL))
            tail = self._log.read().decode(errors="replace").strip()
        self._heard.put((self, Died(_why(code, tail))))


def _why(code: int, tail: str) -> str:
    """How a process ended; nothing of its output when a signal explains it."""
    if code < 0:
        return f"its process was ended by {signal.Signals(-code).name}"
    last = tail.splitlines()[-1] if tail else "it said nothing"
    return f"its process ended with exit code {code}: {last}"
