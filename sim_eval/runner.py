"""Runs a suite's episodes on shards and watches over them: what breaks is run again, what hangs is given up."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from omni_loop.env import Env
from omni_loop.errors import ServerUnavailable
from omni_loop.types import SessionSpec

from . import shards
from .api import Connect, LoopSession, attach
from .episodes import prompt_of
from .jobs import Job, Jobs
from .match import check_match
from .results import EpisodeResult, Outcome
from .shards import Died, Ready, Shard
from .store import Store, load, spec_to_json
from .suite import EvalSuite
from .versions import env_version, simulator
from .worker import lost

BROKEN = (Outcome.ERROR, Outcome.TIMEOUT)  # no result of the policy: run again when a run is resumed
GRACE_S = 10.0  # an episode checks its own time limit; one that cannot (a call hangs) is given up after this


@dataclass
class Run:
    """All episodes of a suite, by task in the suite's order."""

    suite: EvalSuite
    results: list[EpisodeResult]
    spec: SessionSpec
    score: str | None = None  # what the env calls its score
    wall_s: float = 0.0  # over all parts of a run that was interrupted
    resumed: int = 0  # episodes that an earlier part had finished

    @property
    def successes(self) -> int:
        return sum(r.success for r in self.results)


@dataclass(frozen=True, slots=True)
class Found:
    """What a preflight learnt: the pipeline's spec, what the env calls its score, and the revisions of both.
    ``policy`` is None where nobody asked; ``simulators``: versions of the packages that the tasks' envs name."""

    spec: SessionSpec
    score: str | None
    env: str
    policy: str | None = None
    simulators: Mapping[str, str] = field(default_factory=dict)


def preflight(suite: EvalSuite, connect: Connect, ask_revision: bool = False) -> Found:
    """Open and close a session for every task, so that whatever is wrong with all episodes is said once, at the start.

    ``ask_revision``: also infer once, to learn the policy's revision.

    Raises:
        OmniLoopError: unknown pipeline or key, no server, a pipeline that does not fit the env, ...
    """
    client = connect()
    found: Found | None = None
    simulators: dict[str, str] = {}
    try:
        for task in suite.task_names:
            env = suite.make_env(task)
            try:
                attach(client, env)
                session = client.open(
                    suite.pipeline,
                    prompt=prompt_of(env, suite, suite.first_seed, task),
                    seed=suite.first_seed,
                    keys=suite.keys,
                    options=suite.options,
                )
                try:
                    check_match(suite, env, session.spec)
                    simulators |= simulator(env)
                    if found is None:
                        policy = _revision(suite, env, session) if ask_revision else None
                        found = Found(session.spec, env.score, env_version(env), policy)
                finally:
                    session.close()
            finally:
                env.close()
    finally:
        client.close()
    assert found is not None  # there is always a task
    return replace(found, simulators=simulators)


def _revision(suite: EvalSuite, env: Env, session: LoopSession) -> str | None:
    chunk = session.infer(env.reset(suite.first_seed, suite.keys), step=0).chunk
    return None if chunk is None else chunk.policy_revision


def run_suite(
    suite: EvalSuite,
    connect: Connect,
    on_result: Callable[[EpisodeResult], None] | None = None,
    grace_s: float = GRACE_S,
    *,
    store: Store | None = None,
    on_resumed: Callable[[Sequence[EpisodeResult]], None] | None = None,
) -> Run:
    """Run every episode. Episodes that fail are results; what stops the run is only a failed preflight.

    Args:
        connect: an :class:`.api.Server` or a bound: episodes are sharded over ``suite.workers`` processes; any other
            callable: over as many threads.
        on_result: hears of every result as it comes.
        store: the run's folder; each result is written to its journal at once. What the journal holds is not run again,
            unless it broke. It is closed when this returns.
        on_resumed: hears, before the first result, of those that were there.

    Raises:
        OtherRun: ``store`` holds episodes of another suite, policy or env.
        ServerUnavailable: processes that should run episodes end while they start.
    """
    try:
        return _run(suite, connect, on_result, grace_s, store, on_resumed)
    finally:
        if store is not None:
            store.close()


def _run(
    suite: EvalSuite,
    connect: Connect,
    on_result: Callable[[EpisodeResult], None] | None,
    grace_s: float,
    store: Store | None,
    on_resumed: Callable[[Sequence[EpisodeResult]], None] | None,
) -> Run:
    done: dict[tuple[str, int], EpisodeResult] = {}
    found = preflight(suite, connect, ask_revision=store is not None and store.holds_results)
    if store is not None:
        serves = getattr(connect, "serves", "") or None
        versions = {"spec": found.spec.digest, "env": found.env, "policy": found.policy, "deployment": serves}
        versions |= found.simulators
        head = {"suite": suite.model_dump(mode="json"), "spec": spec_to_json(found.spec), "score": found.score}
        store.begin(suite, versions, head)
        wanted = {(task, i) for task in suite.task_names for i in range(suite.episodes)}
        done = {key: r for key, r in store.results.items() if key in wanted and r.outcome not in BROKEN}
    run = Run(suite, list(done.values()), found.spec, found.score, resumed=len(done))
    if on_resumed:
        on_resumed(run.results)
    before, began = 0.0 if store is None else store.ended_s, time.monotonic()
    for result in _Watch(suite, connect, grace_s, Jobs(suite, done)).results():
        result = replace(result, ended_s=round(before + time.monotonic() - began, 3))
        if store is not None:
            store.append(result)
        run.results.append(result)
        if on_result:
            on_result(result)
    order = {task: i for i, task in enumerate(suite.task_names)}
    run.results.sort(key=lambda r: (order[r.task], r.episode))
    run.wall_s = round(before + time.monotonic() - began, 3)
    return run


class _Watch:
    """Starts shards, yields their results, and replaces a shard that died or whose episode hangs."""

    def __init__(self, suite: EvalSuite, connect: Connect, grace_s: float, jobs: Jobs) -> None:
        self._suite, self._connect, self._limit, self._jobs = suite, connect, suite.time_limit_s + grace_s, jobs
        self._heard: shards.Heard = queue.SimpleQueue()
        self._shards: list[Shard] = []
        self._stillborn = 0  # shards in a row that died without an episode

    def results(self) -> Iterator[EpisodeResult]:
        try:
            for _ in range(min(self._suite.workers, self._jobs.left)):
                self._start()
            while self._jobs.left:
                try:
                    shard, said = self._heard.get(timeout=self._patience())
                except queue.Empty:
                    yield from self._give_up_on_the_overdue()
                    continue
                if shard in self._shards:  # not one that was given up
                    yield from self._hear(shard, said)
            self._end()
        finally:  # also when whoever reads the results wants no more of them
            for shard in self._shards:
                shard.drop()

    def _start(self) -> None:
        self._shards.append(shards.start(self._suite, self._connect, self._heard))

    def _end(self) -> None:
        """Sessions, connections and envs are closed before a report is written."""
        idle = [shard for shard in self._shards if shard.ready]
        for shard in idle:
            shard.end()
        for shard in idle:
            shard.wait(GRACE_S)
            self._shards.remove(shard)

    def _hear(self, shard: Shard, said: shards.Said) -> Iterator[EpisodeResult]:
        job, shard.job = shard.job, None
        if isinstance(said, Ready):
            shard.ready, self._stillborn = True, 0
        elif isinstance(said, Died):
            self._shards.remove(shard)
            if job is None:
                self._stillborn += 1
            else:
                yield from self._broke(job, lost(self._suite, job, Outcome.ERROR, said.why))
            if self._stillborn > self._suite.retries and not self._shards:
                raise ServerUnavailable(f"a process for episodes does not start: {said.why}", retryable=False)
        elif job is not None and said.env_died:
            if shard.fresh:  # whatever the broken library left behind in it
                self._shards.remove(shard)
                shard.drop()
            yield from self._broke(job, said)
        elif job is not None:
            self._jobs.finished(job)
            yield _with_past(said, job)
        self._keep_busy()

    def _broke(self, job: Job, result: EpisodeResult) -> Iterator[EpisodeResult]:
        """Run ``job`` again, or let ``result`` be its end."""
        if len(job.failed) < self._suite.retries:
            self._jobs.again(job, result.reason)
        else:
            self._jobs.finished(job)
            yield _with_past(result, job)

    def _keep_busy(self) -> None:
        for shard in self._shards:
            if shard.ready and shard.job is None and (job := self._jobs.take(shard.task)) is not None:
                shard.give(job)
        for _ in range(min(self._jobs.waiting, self._suite.workers - len(self._shards))):
            self._start()

    def _until(self, shard: Shard) -> float:
        """When it is overdue, by time.monotonic()."""
        if not shard.ready:
            return shard.since + shards.START_S
        return shard.since + self._limit + shard.starts * shards.START_S if shard.job else float("inf")

    def _patience(self) -> float:
        soonest = min((self._until(shard) for shard in self._shards), default=float("inf"))
        return min(max(0.01, soonest - time.monotonic()), self._limit)

    def _give_up_on_the_overdue(self) -> Iterator[EpisodeResult]:
        now = time.monotonic()
        for shard in [s for s in self._shards if self._until(s) <= now]:
            self._shards.remove(shard)
            shard.drop()
            if shard.job is None:
                raise ServerUnavailable(f"a process for episodes was not ready within {shards.START_S:g} s")
            self._jobs.finished(shard.job)
            reason = f"no answer within {self._limit:g} s; given up"
            yield _with_past(lost(self._suite, shard.job, Outcome.TIMEOUT, reason), shard.job)
        self._keep_busy()


def _with_past(result: EpisodeResult, job: Job) -> EpisodeResult:
    """``result`` with what its attempts before ended with."""
    past = [f"run again, because {why}" for why in job.failed]
    return replace(result, reason="; ".join([*past, *([result.reason] if result.reason else [])]))


def load_run(folder: Path, **changes: Any) -> Run:
    """The run that lies in ``folder``, as far as it went; raises as :func:`.store.load`. ``changes``: of its suite's
    fields that no result depends on."""
    suite, spec, score, results = load(folder)
    suite = suite.changed(**changes)
    order = {task: i for i, task in enumerate(suite.task_names)}
    results = sorted((r for r in results if r.task in order), key=lambda r: (order[r.task], r.episode))
    return Run(suite, results, spec, score, max((r.ended_s for r in results), default=0.0), len(results))
