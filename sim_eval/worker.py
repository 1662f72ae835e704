"""Who runs episodes: one env and one connection, used again from episode to episode."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np

from omni_loop.env import Env
from omni_loop.errors import OmniLoopError

from .api import Connect, LoopClient
from .episodes import run_episode
from .jobs import Job
from .results import EpisodeResult, Outcome
from .suite import EvalSuite

log = logging.getLogger(__name__)


class Worker:
    """Belongs to one thread. An env that broke is not used again."""

    def __init__(self, suite: EvalSuite, connect: Connect) -> None:
        self._suite, self._connect = suite, connect
        self._client: LoopClient | None = None
        self._env: Env | None = None
        self._task = ""

    def run(self, job: Job) -> EpisodeResult:
        """The result of ``job``, whatever happens."""
        try:
            self._client = self._client or self._connect()
            if self._env is None or self._task != job.task:
                self._drop_env()
                self._env, self._task = self._suite.make_env(job.task), job.task
            result = run_episode(self._client, self._env, self._suite, job.episode, job.task)
        except Exception as e:
            log.exception("episode %d could not be started", job.episode)
            died = isinstance(e, OmniLoopError) and e.retryable and self._client is not None
            result = replace(lost(self._suite, job, Outcome.ERROR, f"{type(e).__name__}: {e}"), env_died=died)
        if result.env_died:
            self._drop_env()
        return result

    def close(self) -> None:
        self._drop_env()
        if self._client is not None:
            try:
                self._client.close()
            except OmniLoopError as e:
                log.warning("closing after the last episode: %s", e.text)

    def _drop_env(self) -> None:
        env, self._env = self._env, None
        if env is not None:
            try:
                env.close()
            except Exception as e:  # of an env that broke
                log.warning("closing the env: %s: %s", type(e).__name__, e)


def lost(suite: EvalSuite, job: Job, outcome: Outcome, reason: str) -> EpisodeResult:
    """The result of an episode of which there is nothing."""
    seed = suite.first_seed + job.episode
    nothing = np.zeros((0, 0), np.float32)
    return EpisodeResult(job.episode, seed, outcome, 0, 0.0, nothing, reason=reason, task=job.task)
