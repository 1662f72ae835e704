"""``omni-loop bench tick``: a session of 1,000 ticks of ``pusht-imagine``, stage by stage in CPU time.

The runner is driven in this thread, tick by tick as the orchestrator would, so that a stage's CPU time can be read
from the thread: it holds forward passes, state and its commit, and no other process's share of the machine.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from statistics import median

import numpy as np

from omni_loop import registry
from omni_loop.connect.local import LocalConnector
from omni_loop.errors import rebuild
from omni_loop.loop.pipeline import CLIENT, Pipeline
from omni_loop.messages import (
    CloseSession,
    Command,
    Commit,
    Done,
    Failed,
    OpenSession,
    PayloadKey,
    PayloadKind,
    Receipt,
    ReleasePayloads,
    RunStage,
)
from omni_loop.runner.batcher import Batcher
from omni_loop.runner.runner import Runner
from omni_loop.stage import Payload
from omni_loop.types import Op

from .rows import Bar, Bench, Measured, Settings
from .sessions import one_thread

STAGES = ("context", "act", "frames")  # decode keeps no state
_FRAMES = 2  # imagined per tick: the context looks at two
_SESSION = "bench"


class Walk:
    """One session's ticks through ``pipeline`` on one runner."""

    def __init__(self, pipeline: Pipeline, runner: Runner) -> None:
        self._pipeline, self.runner, self._batcher = pipeline, runner, Batcher(runner)
        self._fed: dict[str, Receipt] = {}  # by the edge that feeds the next tick
        self._old: tuple[PayloadKey, ...] = ()  # payloads this tick is the last to read
        self._do(OpenSession(_SESSION, 0, "push the T onto the goal"))

    def tick(self, number: int) -> dict[str, float]:
        """Run and commit one tick; CPU milliseconds by stage."""
        made: dict[str, Mapping[str, Receipt]] = {CLIENT: {} if number else self._observation()}
        spent: dict[str, float] = {}
        op = Op.PREDICT if number else Op.INFER
        for stage in STAGES:
            full = f"{self._pipeline.name}/{stage}"
            params = {"frames": _FRAMES, "steps": _FRAMES}
            command = RunStage(_SESSION, 0, number, full, op, number * _FRAMES, self._inputs(stage, made), params)
            begin = time.thread_time()
            made[stage] = self._do(command).outputs
            spent[stage] = (time.thread_time() - begin) * 1e3
        for stage in STAGES:
            begin = time.thread_time()
            self._do(Commit(_SESSION, 0, number, (f"{self._pipeline.name}/{stage}",)))
            spent[stage] += (time.thread_time() - begin) * 1e3
        self._pass_on(made)
        return spent

    def close(self) -> None:
        """Raises PoolCorrupt when blocks were lost."""
        self._do(CloseSession(_SESSION))
        self.runner.close()

    def blocks(self) -> int:
        """KV blocks the session owns, of all pools."""
        return sum(pool.owned for pool in self.runner.state.stats().pools.values())

    def _observation(self) -> dict[str, Receipt]:
        arrays = {
            "image": np.full((96, 96, 3), 255, np.uint8),
            "agent_pos": np.full((2, 2), 256, np.float32),
            "executed": np.zeros((0, 2), np.float32),
        }
        key = PayloadKey("client.observation", _SESSION, 0, 0)
        return {"observation": self.runner.connector.put(key, Payload(PayloadKind.OBSERVATION, arrays))}

    def _inputs(self, stage: str, made: Mapping[str, Mapping[str, Receipt]]) -> dict[str, Receipt]:
        found: dict[str, Receipt] = {}
        for edge in self._pipeline.inputs_of(stage):
            receipt = self._fed.get(edge.name) if edge.feedback else made[edge.source].get(edge.output)
            if receipt is not None:
                found[edge.input] = receipt
        return found

    def _pass_on(self, made: Mapping[str, Mapping[str, Receipt]]) -> None:
        self._fed = {e.name: made[e.source][e.output] for e in self._pipeline.edges if e.feedback}
        kept = {receipt.key for receipt in self._fed.values()}
        done = tuple(r.key for outputs in made.values() for r in outputs.values() if r.key not in kept)
        self._do(ReleasePayloads((*self._old, *done)))
        self._old = tuple(kept)

    def _do(self, command: Command) -> Done:
        report = self._batcher.handle(0, command)
        if isinstance(report, Failed):
            raise rebuild(report.code, report.reason, report.retryable, report.text)
        return report


class Session:
    """A whole session: CPU milliseconds by stage, and KV blocks owned, after every tick."""

    def __init__(self, walk: Walk, ticks: int) -> None:
        self._walk, self._ticks = walk, ticks
        self.early = slice(ticks // 20, 3 * ticks // 20)  # of 1,000: 50 to 150
        self.late = slice(9 * ticks // 10, ticks)

    @cached_property
    def _run(self) -> tuple[dict[str, list[float]], list[int]]:
        spent: dict[str, list[float]] = {stage: [] for stage in STAGES}
        blocks = []
        for number in range(self._ticks):
            for stage, ms in self._walk.tick(number).items():
                spent[stage].append(ms)
            blocks.append(self._walk.blocks())
        return spent, blocks

    def growth(self, stage: str) -> Measured:
        values = self._run[0][stage]
        return Measured(median(values[self.late]), median(values[self.early]))

    def blocks(self) -> Measured:
        values = self._run[1]
        return Measured(max(values[self.late]), max(values[self.early]))


@contextmanager
def _subject(settings: Settings) -> Iterator[Session]:
    pipeline: Pipeline = registry.load(registry.PIPELINES, "pusht-imagine")
    given = {"checkpoints": settings.checkpoints} if settings.checkpoints else {}
    stages = [
        (f"{pipeline.name}/{s.name}", s.factory, {**s.options, **given}) for s in pipeline.stages if s.name in STAGES
    ]
    with one_thread():
        runner = Runner(stages, LocalConnector())
        runner.warm_up()
        walk = Walk(pipeline, runner)
        yield Session(walk, 200 if settings.quick else 1000)
        walk.close()


BENCH: Bench[Session] = Bench("tick", _subject)


@BENCH.row("CPU ms", Bar("ratio", "<=", 1.05))
def context(session: Session) -> Measured:
    """The context stage in ticks 900 to 1,000 of a session, against in ticks 50 to 150; medians."""
    return session.growth("context")


@BENCH.row("CPU ms", Bar("ratio", "<=", 1.05))
def frames(session: Session) -> Measured:
    """The frames stage in ticks 900 to 1,000 of a session, against in ticks 50 to 150; medians."""
    return session.growth("frames")


@BENCH.row("blocks", Bar("ratio", "<=", 1))
def kv_blocks(session: Session) -> Measured:
    """KV blocks the session owns in ticks 900 to 1,000, against in ticks 50 to 150."""
    return session.blocks()
