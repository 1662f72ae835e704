"""Many sessions of one stage on one runner, driven in this thread through its batcher, as an orchestrator would."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from omni_loop.connect.local import LocalConnector
from omni_loop.errors import rebuild
from omni_loop.messages import (
    Command,
    Commit,
    Done,
    Failed,
    ForkSession,
    OpenSession,
    PayloadKey,
    Receipt,
    ReleasePayloads,
    RunStage,
    Scalar,
)
from omni_loop.runner.batcher import Batcher
from omni_loop.runner.runner import Runner, RunnerSettings
from omni_loop.runner.state import Budget, StateManager
from omni_loop.stage import Outputs, Payload, Stage
from omni_loop.types import Op

STAGE = "bench/stage"


class Sessions:
    """``n`` sessions, named by their numbers, which are also their seeds, and ``idle`` ones behind them."""

    def __init__(self, stage: Stage, n: int, idle: int = 0, budget: Budget | None = None) -> None:
        self.n = n
        settings = RunnerSettings(budget=budget or Budget(max_sessions=n + idle))
        self._connector = LocalConnector()
        self._runner = Runner([(STAGE, lambda: stage, {})], self._connector, settings)
        self._batcher = Batcher(self._runner)
        self._do(OpenSession(str(i), i, "push the T onto the goal") for i in range(n + idle))

    @property
    def state(self) -> StateManager:
        return self._runner.state

    def tick(
        self,
        tick: int,
        op: Op,
        inputs: Sequence[Mapping[str, Payload]],
        sessions: Sequence[int] | None = None,
        step: int = 0,
        params: Mapping[str, Scalar] = {},
    ) -> list[Outputs]:
        """Run and commit one tick of ``sessions`` (None: the first ``n``), which meet in batches; outputs in order.
        Raises what an item met."""
        names = [str(i) for i in (range(self.n) if sessions is None else sessions)]
        given = [
            {name: self._put(session, tick, name, payload) for name, payload in payloads.items()}
            for session, payloads in zip(names, inputs, strict=True)
        ]
        commands = (
            RunStage(session, 0, tick, STAGE, op, step, receipts, params)
            for session, receipts in zip(names, given, strict=True)
        )
        made = [report.outputs for report in self._do(commands)]
        self._do(Commit(session, 0, tick, (STAGE,)) for session in names)
        outputs: list[Outputs] = [{n: self._connector.get(r) for n, r in receipts.items()} for receipts in made]
        self._do([ReleasePayloads(tuple(r.key for receipts in (*given, *made) for r in receipts.values()))])
        return outputs

    def fork(self, session: int, children: Iterable[int]) -> None:
        """Fork through the runner."""
        self._do(ForkSession(str(session), str(child), child) for child in children)

    def blocks(self) -> int:
        """KV blocks owned, of all pools."""
        return sum(pool.owned for pool in self.state.stats().pools.values())

    def _put(self, session: str, tick: int, name: str, payload: Payload) -> Receipt:
        return self._connector.put(PayloadKey(f"bench.{name}", session, 0, tick), payload)

    def _do(self, commands: Iterable[Command]) -> list[Done]:
        now, count = time.monotonic_ns(), 0
        for count, command in enumerate(commands, 1):
            self._batcher.add(count - 1, command, now)
        done: dict[int, Done] = {}
        for reports in self._batcher.drain():
            for report in reports:
                if isinstance(report, Failed):
                    raise rebuild(report.code, report.reason, report.retryable, report.text)
                if isinstance(report, Done):
                    done[report.request] = report
        return [done[request] for request in range(count)]


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch on the calling thread alone, whose CPU time then is all there is."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
