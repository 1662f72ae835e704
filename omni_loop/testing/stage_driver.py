"""Drives one stage through a real runner and its state manager, for the contracts of worlds and policies."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..connect.local import LocalConnector
from ..errors import OmniLoopError, rebuild
from ..messages import (
    Answer,
    CloseSession,
    Command,
    Commit,
    Discard,
    Done,
    Failed,
    ForkSession,
    OpenSession,
    Part,
    PayloadKey,
    ResetSession,
    RunStage,
    Scalar,
)
from ..runner.batcher import Batcher
from ..runner.runner import Runner, RunnerSettings
from ..runner.state import Budget
from ..stage import Outputs, Payload, Stage, StageItem
from ..types import Op

NAME = "contract/stage"


@dataclass(frozen=True)
class Ask:
    """What one tick asks of the stage."""

    inputs: Mapping[str, Payload]
    op: Op = Op.INFER
    step: int = 0
    params: Mapping[str, Scalar] = field(default_factory=dict)


class Driver:
    """One stage, as a runner has it. Errors arrive as an orchestrator hears them."""

    def __init__(self, stage: Stage, max_sessions: int = 8) -> None:
        self.stage = stage
        self._connector = LocalConnector()
        budget = Budget(max_sessions=max_sessions, rewind_ticks=0)  # a session holds what it sees, and no past
        settings = RunnerSettings(budget=budget)
        self._runner = Runner([(NAME, lambda: stage, {})], self._connector, settings)
        self._batcher = Batcher(self._runner)
        self._requests = itertools.count(1)
        self._sessions: dict[str, tuple[int, str, int]] = {}  # seed, prompt, epoch

    def open(self, session: str, seed: int = 0, prompt: str = "") -> None:
        self._send(OpenSession(session, seed, prompt))
        self._sessions[session] = (seed, prompt, 0)

    def run(self, session: str, tick: int, ask: Ask) -> Outputs:
        """Run without deciding: :meth:`commit` or :meth:`discard` must follow."""
        result = self.together(tick, {session: ask})[session]
        if isinstance(result, Exception):
            raise result
        return result

    def watch(self, session: str, tick: int, ask: Ask, output: str) -> tuple[list[Payload], Outputs]:
        """As :meth:`run`, with the parts of ``output`` that the stage shows on its way."""
        parts: list[Payload] = []
        result = self.together(tick, {session: ask}, output, parts)[session]
        if isinstance(result, Exception):
            raise result
        return parts, result

    def together(
        self, tick: int, asks: Mapping[str, Ask], shown: str = "", parts: list[Payload] | None = None
    ) -> dict[str, Outputs | Exception]:
        """Run the same tick of several sessions as the batches a runner makes of them, without deciding. Parts of the
        output ``shown`` are added to ``parts``."""
        requests = {}
        for session, ask in asks.items():
            requests[request := next(self._requests)] = session
            command = replace(self._command(session, tick, ask), streams=(shown,) if shown else ())
            self._batcher.add(request, command, time.monotonic_ns())
        results: dict[str, Outputs | Exception] = {}
        for report in itertools.chain.from_iterable(self._batcher.drain()):
            if isinstance(report, Part):
                if parts is not None:
                    parts += [self._connector.get(receipt) for receipt in report.outputs.values()]
                continue
            try:
                outputs = _done(report).outputs
                results[requests[report.request]] = {n: self._connector.get(r) for n, r in outputs.items()}
            except OmniLoopError as e:
                results[requests[report.request]] = e
        for session in asks:
            self._connector.cleanup_session(session)
        return results

    def commit(self, session: str, tick: int) -> None:
        self._send(Commit(session, self._sessions[session][2], tick, (NAME,)))

    def discard(self, session: str, tick: int) -> None:
        self._send(Discard(session, self._sessions[session][2], tick, (NAME,)))

    def tick(self, session: str, tick: int, ask: Ask) -> Outputs:
        """Run and commit."""
        outputs = self.run(session, tick, ask)
        self.commit(session, tick)
        return outputs

    def reset(self, session: str) -> None:
        """A new epoch with the same seed."""
        seed, prompt, epoch = self._sessions[session]
        self._send(ResetSession(session, epoch + 1))
        self._sessions[session] = (seed, prompt, epoch + 1)

    def fork(self, session: str, child: str) -> None:
        """Open ``child`` with what is committed of ``session``, its seed, prompt and epoch."""
        self._send(ForkSession(session, child))
        self._sessions[child] = self._sessions[session]

    def batch(self, tick: int, asks: Mapping[str, Ask]) -> Sequence[Outputs | Exception]:
        """One call of the stage for several sessions; nothing of it is kept."""
        try:
            return self.stage.run(list(self.items(tick, asks).values()))
        finally:
            for session in asks:
                self._runner.state.discard(session, tick, (NAME,))

    def items(self, tick: int, asks: Mapping[str, Ask]) -> dict[str, StageItem]:
        """What the stage is given, for driving it by hand: :meth:`commit` or :meth:`discard` must follow."""
        items = {}
        for session, ask in asks.items():
            seed, prompt, epoch = self._sessions[session]
            view = self._runner.state.begin(session, NAME, tick)
            given = (session, seed, epoch, tick, ask.op, ask.step, prompt, ask.inputs, ask.params, view)
            items[session] = StageItem(*given)
        return items

    @property
    def blocks(self) -> int:
        """KV blocks that are not free, of all sessions."""
        return sum(pool.owned for pool in self._runner.state.stats().pools.values())

    def close(self) -> None:
        """Close every session; the books must balance, and nothing may be held."""
        for session in list(self._sessions):
            self._send(CloseSession(session))
        self._sessions.clear()
        self._runner.close()
        assert self.blocks == 0
        assert self._connector.health().payloads == 0

    def _command(self, session: str, tick: int, ask: Ask) -> RunStage:
        """With its inputs put."""
        epoch, receipts = self._sessions[session][2], {}
        for name, payload in ask.inputs.items():
            key = PayloadKey(f"client.{name}>stage.{name}", session, epoch, tick)
            receipts[name] = self._connector.put(key, payload)
        return RunStage(session, epoch, tick, NAME, ask.op, ask.step, receipts, ask.params)

    def _send(self, command: Command) -> Done:
        return _done(self._batcher.handle(next(self._requests), command))


def _done(report: Answer) -> Done:
    if isinstance(report, Failed):
        raise rebuild(
            report.code,
            report.reason,
            report.retryable,
            report.text,
            report.retry_after_ms,
            report.missing_bytes,
        )
    return report
