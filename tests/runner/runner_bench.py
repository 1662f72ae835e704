"""A runner with one toy stage, asked command by command."""

from __future__ import annotations

from typing import Any

import numpy as np

from omni_loop.connect.local import LocalConnector
from omni_loop.messages import (
    Command,
    Commit,
    Done,
    Failed,
    PayloadKey,
    PayloadKind,
    Report,
    RunStage,
    Scalar,
)
from omni_loop.runner.batcher import Batcher
from omni_loop.runner.runner import RunnerSettings, build
from omni_loop.runner.state import Budget
from omni_loop.stage import Payload
from omni_loop.types import Op

STAGE = "p/toy"


class Bench:
    """A runner with the toy stage, and the little an orchestrator does around it."""

    def __init__(self, factory: Any, connector: LocalConnector | None = None, budget: Budget | None = None) -> None:
        self.connector = connector or LocalConnector()
        settings = RunnerSettings(budget=budget or Budget())
        self.runner = build([(STAGE, factory, {})], self.connector, settings)
        self.batcher = Batcher(self.runner)
        self.tick = 0

    def handle(self, command: Command) -> Report:
        report = self.batcher.handle(77, command)
        assert report.request == 77
        return report

    def done(self, command: Command) -> Done:
        report = self.handle(command)
        assert isinstance(report, Done), report
        return report

    def failed(self, command: Command) -> Failed:
        report = self.handle(command)
        assert isinstance(report, Failed), report
        return report

    def run(
        self, x: float = 1.0, *, tick: int | None = None, session: str = "s", epoch: int = 0, **params: Scalar
    ) -> RunStage:
        """The command to run the stage on ``x``; its input is put."""
        if tick is None:
            self.tick += 1
            tick = self.tick
        key = PayloadKey("client>toy", session, epoch, tick)
        payload = Payload(PayloadKind.OBSERVATION, {"x": np.full(4, x, np.float32)})
        receipt = self.connector.put(key, payload)
        return RunStage(session, epoch, tick, STAGE, Op.INFER, tick, {"observation": receipt}, params)

    def y(self, done: Done) -> list[float]:
        return [float(v) for v in self.connector.get(done.outputs["y"]).arrays["y"]]

    def tick_once(self, x: float, **params: Scalar) -> list[float]:
        command = self.run(x, **params)  # type: ignore[arg-type]
        done = self.done(command)
        self.done(Commit("s", command.epoch, command.tick, (STAGE,)))
        return self.y(done)
