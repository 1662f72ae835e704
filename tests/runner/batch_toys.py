"""Toy stages that say whom they ran together, and the bench that drives a batcher over them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from omni_loop.connect.local import LocalConnector
from omni_loop.errors import Exhausted
from omni_loop.messages import (
    Answer,
    Command,
    Commit,
    Done,
    Failed,
    OpenSession,
    Part,
    PayloadKey,
    PayloadKind,
    Receipt,
    Report,
    RunStage,
    Scalar,
)
from omni_loop.runner.batcher import Batcher
from omni_loop.runner.runner import RunnerSettings, build
from omni_loop.runner.state import Budget
from omni_loop.stage import Outputs, Payload, StageItem, in_steps
from omni_loop.types import Op

from .runner_toys import Toy

MS = 1_000_000


class Clock:
    """Nanoseconds that pass when they are told to."""

    def __init__(self) -> None:
        self.now = 1_000_000_000_000

    def __call__(self) -> int:
        return self.now


class Logged(Toy):
    """Logs the sessions of every pass. A pass takes ``pass_ms``."""

    def __init__(self, clock: Clock | None = None, pass_ms: float = 0.0) -> None:
        super().__init__()
        self.log: list[tuple[str, ...]] = []
        self._clock, self._pass_ms = clock, pass_ms

    def run(self, items: Sequence[StageItem]) -> Sequence[Outputs | Exception]:
        self.passed(items)
        return super().run(items)

    def passed(self, items: Sequence[StageItem]) -> None:
        self.log.append(tuple(item.session for item in items))
        if self._clock is not None:
            self._clock.now += int(self._pass_ms * MS)


class Greedy(Logged):
    """All items of a batch take their ``blocks`` one by one, in turns."""

    def run(self, items: Sequence[StageItem]) -> Sequence[Outputs | Exception]:
        self.passed(items)
        results: list[Outputs | Exception] = [{} for _ in items]
        for turn in range(max(int(item.params.get("blocks", 1)) for item in items)):
            for i, item in enumerate(items):
                if turn < int(item.params.get("blocks", 1)) and not isinstance(results[i], Exception):
                    try:
                        item.state.kv("kv").append(np.ones((2, 2, 2, 1, 4), np.float32))
                    except Exhausted as e:
                        results[i] = e
        return results


@dataclass(slots=True)
class Walk:
    """A job of ``left`` passes."""

    item: StageItem
    left: int

    @property
    def finished(self) -> bool:
        return self.left <= 0


class Stepped(Logged):
    """The toy as a stage of ``passes`` passes. ``mode`` is for its finish, ``begin`` and ``advance`` say how those
    fail: "item" the job alone, "raise" and "exit" the whole batch, "count" with a result too few."""

    def begin(self, item: StageItem) -> Walk:
        if item.params.get("begin"):
            raise ValueError("a secret at the begin")
        return Walk(item, int(item.params.get("passes", 2)))

    def advance(self, jobs: Sequence[Walk]) -> Sequence[Exception | None]:
        self.passed([job.item for job in jobs])
        modes = [str(job.item.params.get("advance", "")) for job in jobs]
        for job in jobs:
            job.left -= 1
            if job.item.params.get("early"):  # something is staged before the batch fails
                job.item.state.counter("ticks").set(1000)
        if "raise" in modes:
            raise RuntimeError("a secret of /home/somebody")
        if "exit" in modes:
            raise SystemExit(4)
        errors = [ValueError("another secret") if mode == "item" else None for mode in modes]
        return errors[1:] if "count" in modes else errors

    def finish(self, job: Walk) -> Outputs:
        outputs = self._one(job.item)
        if isinstance(outputs, Exception):
            raise outputs
        return outputs

    def run(self, items: Sequence[StageItem]) -> Sequence[Outputs | Exception]:
        return in_steps(self, items)


class Bed:
    """A runner with toy stages behind a batcher, and what an orchestrator does around it."""

    def __init__(
        self,
        stages: Mapping[str, Callable[[], object]],
        settings: RunnerSettings | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.clock = clock or Clock()
        self.connector = LocalConnector()
        entries = [(name, factory, {}) for name, factory in stages.items()]
        self.runner = build(entries, self.connector, settings or RunnerSettings(budget=Budget(max_sessions=32)))  # type: ignore[arg-type]
        self.batcher = Batcher(self.runner, self.clock)
        self.answers: dict[int, Answer] = {}
        self.parts: list[Part] = []
        self._requests = itertools.count(1)

    def open(self, *sessions: str) -> None:
        for session in sessions:
            assert isinstance(self.now(OpenSession(session, 7, "push")), Done)

    def add(self, command: Command) -> int:
        request = next(self._requests)
        self.batcher.add(request, command, self.clock())
        return request

    def step(self) -> list[int]:
        """The requests one step answered."""
        reports = self.batcher.step()
        for report in reports:
            assert report.request not in self.answers, "answered twice"
            if isinstance(report, Part):
                self.parts.append(report)
            else:
                self.answers[report.request] = report
        return [report.request for report in reports if not isinstance(report, Part)]

    def work(self) -> None:
        """Step while something is due."""
        for _ in range(10_000):
            if self.batcher.wait_s() != 0.0:
                return
            self.step()
        raise AssertionError("the batcher is busy for ever")

    def now(self, command: Command) -> Answer:
        request = self.add(command)
        self.work()
        return self.answers[request]

    def run(self, session: str, tick: int, stage: str = "p/a", x: float | None = None, **params: Scalar) -> RunStage:
        """The command to run a stage; its input is put."""
        key = PayloadKey(f"client>{stage}", session, 0, tick)
        value = tick / 10 if x is None else x
        receipt = self.connector.put(key, Payload(PayloadKind.OBSERVATION, {"x": np.full(4, value, np.float32)}))
        return RunStage(session, 0, tick, stage, Op.INFER, tick, {"observation": receipt}, params)

    def y(self, request: int) -> list[float]:
        return self.values(self.done(request).outputs["y"])

    def values(self, receipt: Receipt) -> list[float]:
        return [float(v) for v in self.connector.get(receipt).arrays["y"]]

    def done(self, request: int) -> Done:
        report = self.answers[request]
        assert isinstance(report, Done), report
        return report

    def failed(self, request: int) -> Failed:
        report = self.answers[request]
        assert isinstance(report, Failed), report
        return report

    def commit(self, session: str, tick: int, *stages: str) -> int:
        return self.add(Commit(session, 0, tick, stages or ("p/a",)))

    def close(self) -> None:
        """Nothing may be left of anything."""
        assert self.batcher.wait_s() is None
        self.runner.close()
        assert all(pool.owned == 0 for pool in self.runner.state.stats().pools.values())
        assert self.connector.health().payloads == 0
        assert not self.runner.undecided


def error_of(report: Report) -> tuple[str, str]:
    assert isinstance(report, Failed), report
    return report.code, report.reason
