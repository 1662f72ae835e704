"""What an orchestrator holds of a runner, wherever it runs: commands in, reports or typed errors out."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterable
from typing import Protocol

from ..connect.base import Connector
from ..errors import ServerUnavailable, rebuild
from ..messages import Command, Done, Failed, PayloadKey, Report

log = logging.getLogger(__name__)


class RunnerHandle(Protocol):
    """All methods belong to one event loop."""

    @property
    def name(self) -> str: ...

    @property
    def stages(self) -> frozenset[str]:
        """Full names, ``pipeline/stage``."""

    @property
    def connector(self) -> Connector:
        """Where inputs for this runner are put and its outputs are got."""

    @property
    def alive(self) -> bool:
        """Started, not stopped, not died."""

    @property
    def shares_fate(self) -> bool:
        """Whether it cannot be lost without the server itself: what it was sent in order, it does."""

    async def start(self) -> None:
        """Build the stages and warm them up. Raises what that raises, as a typed error."""

    async def submit(self, command: Command) -> Done:
        """Execute ``command`` after all submitted before for the same session. If the caller is cancelled meanwhile,
        the command still runs, and the payloads it put are released.

        Raises:
            OmniLoopError: rebuilt from the runner's report.
            ServerUnavailable: the runner is gone (RUNNER_GONE), also when it dies meanwhile.
        """

    async def ping(self) -> None:
        """Pass through the runner's work loop: at most one forward pass is waited for."""

    async def stop(self) -> None:
        """End the runner after the commands submitted so far, within a bound; then nothing is left of it.

        Raises:
            ServerUnavailable: it did not end by itself.
        """


class Pending:
    """Requests that wait for their report, answered on the event loop."""

    def __init__(self, runner: str, release: Callable[[tuple[PayloadKey, ...]], None]) -> None:
        self._runner = runner
        self._release = release  # of payloads nobody waits for any more
        self._next = itertools.count(1)
        self._futures: dict[int, asyncio.Future[Done]] = {}

    def __len__(self) -> int:
        return len(self._futures)

    def add(self) -> tuple[int, asyncio.Future[Done]]:
        request = next(self._next)
        future: asyncio.Future[Done] = asyncio.get_running_loop().create_future()
        self._futures[request] = future
        return request, future

    def drop(self, request: int) -> None:
        """It was never sent."""
        del self._futures[request]

    def resolve(self, report: Report) -> None:
        future = self._futures.pop(report.request, None)
        if isinstance(report, Failed) and report.detail:
            log.error("runner %r: %s\n%s", self._runner, report.text, report.detail)
        if future is None or future.done():
            if isinstance(report, Done) and report.outputs:
                self._release(tuple(receipt.key for receipt in report.outputs.values()))
        elif isinstance(report, Done):
            future.set_result(report)
        else:
            future.set_exception(
                rebuild(
                    report.code,
                    report.reason,
                    report.retryable,
                    report.text,
                    report.retry_after_ms,
                    report.missing_bytes,
                )
            )

    def resolve_all(self, reports: Iterable[Report]) -> None:
        left = iter(reports)
        for report in left:
            try:
                self.resolve(report)
            except BaseException:
                self.resolve_all(left)  # whatever one met, nobody else is left without an answer
                raise

    def fail_all(self, text: str) -> None:
        for future in self._futures.values():
            if not future.done():
                future.set_exception(ServerUnavailable(text))
        self._futures.clear()
