"""Runs a suite's episodes on worker threads, each with its own connection and env, and watches over them."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from omni_loop.env import Env
from omni_loop.errors import OmniLoopError
from omni_loop.types import SessionSpec

from .api import Connect, LoopClient, attach
from .episodes import EpisodeResult, Outcome, run_episode
from .match import check_match
from .store import Store
from .suite import EvalSuite

log = logging.getLogger(__name__)

GRACE_S = 10.0  # an episode checks its own time limit; one that cannot (a call hangs) is given up after this


@dataclass
class Run:
    """All episodes of a suite, in order."""

    suite: EvalSuite
    results: list[EpisodeResult]
    spec: SessionSpec
    score: str | None = None  # what the env calls its score
    wall_s: float = 0.0

    @property
    def successes(self) -> int:
        return sum(r.success for r in self.results)


def preflight(suite: EvalSuite, connect: Connect) -> tuple[SessionSpec, str | None]:
    """Open and close one session, so that whatever is wrong with all episodes is said once, at the start.

    Returns the pipeline's spec and what the env calls its score.

    Raises:
        OmniLoopError: unknown pipeline or key, no server, a pipeline that does not fit the env, ...
    """
    env = suite.make_env()
    client = connect()
    try:
        attach(client, env)
        session = client.open(
            suite.pipeline, prompt=suite.prompt, seed=suite.first_seed, keys=suite.keys, options=suite.options
        )
        try:
            check_match(suite, env, session.spec)
            return session.spec, env.score
        finally:
            session.close()
    finally:
        client.close()
        env.close()


def run_suite(
    suite: EvalSuite,
    connect: Connect,
    on_result: Callable[[EpisodeResult], None] | None = None,
    grace_s: float = GRACE_S,
    *,
    store: Store | None = None,
) -> Run:
    """Run every episode. Episodes that fail are results; what stops the run is only a failed preflight."""
    (spec, score), began = preflight(suite, connect), time.monotonic()
    watch = _Watch(suite, connect, grace_s)
    results = []
    for result in watch.results():
        results.append(result)
        if on_result:
            on_result(result)
    return Run(suite, sorted(results, key=lambda r: r.episode), spec, score, round(time.monotonic() - began, 2))


@dataclass(eq=False)
class _Worker:
    """One thread. ``current`` is the episode at work and since when; ``abandoned`` ends it after that."""

    suite: EvalSuite
    connect: Connect
    todo: queue.SimpleQueue[int]
    done: queue.SimpleQueue[tuple[_Worker, EpisodeResult | None]]
    abandoned: bool = False
    current: tuple[int, float] | None = None
    thread: threading.Thread = field(init=False)

    def start(self) -> _Worker:
        self.thread = threading.Thread(target=self._work, daemon=True, name="episodes")
        self.thread.start()
        return self

    def _work(self) -> None:
        client: LoopClient | None = None
        env: Env | None = None
        try:
            while not self.abandoned:
                try:
                    episode = self.todo.get_nowait()
                except queue.Empty:
                    break
                self.current = (episode, time.monotonic())
                try:
                    client = client or self.connect()
                    env = env or self.suite.make_env()
                    result = run_episode(client, env, self.suite, episode)
                except Exception as e:
                    log.exception("episode %d could not be started", episode)
                    result = _lost(self.suite, episode, Outcome.ERROR, f"{type(e).__name__}: {e}")
                self.current = None
                self.done.put((self, result))
        finally:
            self.done.put((self, None))
            for resource in (client, env):
                if resource is not None:
                    try:
                        resource.close()
                    except OmniLoopError as e:
                        log.warning("closing after the last episode: %s", e.text)


class _Watch:
    """Starts workers, yields their results, and replaces a worker whose episode hangs."""

    def __init__(self, suite: EvalSuite, connect: Connect, grace_s: float) -> None:
        self._suite, self._connect, self._limit = suite, connect, suite.time_limit_s + grace_s
        self._todo: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[_Worker, EpisodeResult | None]] = queue.SimpleQueue()
        for episode in range(suite.episodes):
            self._todo.put(episode)
        self._workers = [self._start() for _ in range(min(suite.workers, suite.episodes))]

    def _start(self) -> _Worker:
        return _Worker(self._suite, self._connect, self._todo, self._done).start()

    def results(self) -> Iterator[EpisodeResult]:
        left = self._suite.episodes
        while left:
            try:
                worker, result = self._done.get(timeout=self._patience())
            except queue.Empty:
                for result in self._give_up_on_the_overdue():
                    left -= 1
                    yield result
                continue
            if worker.abandoned or result is None:
                continue
            left -= 1
            yield result
        for worker in self._workers:  # their sessions and envs are closed before a report is written
            worker.thread.join(timeout=GRACE_S)

    def _patience(self) -> float:
        since = [w.current[1] for w in self._workers if w.current]
        return max(0.01, (min(since) if since else time.monotonic()) + self._limit - time.monotonic())

    def _give_up_on_the_overdue(self) -> list[EpisodeResult]:
        lost, now = [], time.monotonic()
        for worker in list(self._workers):
            current = worker.current
            if current and now - current[1] >= self._limit:
                worker.abandoned = True
                self._workers.remove(worker)
                self._workers.append(self._start())
                reason = f"no answer within {self._limit:g} s; given up"
                lost.append(_lost(self._suite, current[0], Outcome.TIMEOUT, reason))
        return lost


def _lost(suite: EvalSuite, episode: int, outcome: Outcome, reason: str) -> EpisodeResult:
    return EpisodeResult(
        episode, suite.first_seed + episode, outcome, 0, 0.0, np.zeros((0, 0), np.float32), reason=reason
    )
