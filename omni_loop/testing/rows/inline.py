"""Runners whose books a row may read: one in a thread, as it is served; one on the event loop, where a seed decides
everything."""

from __future__ import annotations

import asyncio
import time

from ...messages import Command, Done
from ...runner.batcher import Batcher
from ...runner.handle import OnPart
from ...runner.local import LocalRunner
from ...runner.runner import build
from ...runner.state import StateManager


class ThreadRunner(LocalRunner):
    """A runner in a thread that shows its books."""

    state: StateManager

    def _serve(self, batcher: Batcher) -> None:
        self.state = batcher._runner.state
        super()._serve(batcher)


class InlineRunner(LocalRunner):
    """The same batcher driven by the event loop: what is submitted in one turn of the loop meets in one batch."""

    state: StateManager

    async def start(self) -> None:
        self._runner = build(self._entries, self.connector, self._settings)
        self._batcher = Batcher(self._runner)
        self.state, self.revisions = self._runner.state, self._runner.revisions
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.Handle | None = None
        self._open = True

    @property
    def alive(self) -> bool:
        return self._open

    @property
    def shares_fate(self) -> bool:
        return True

    async def submit(self, command: Command, on_part: OnPart | None = None) -> Done:
        request, future = self._pending.add(on_part)
        self._batcher.add(request, command, time.monotonic_ns())
        self._wake(0.0)
        return await future

    async def stop(self) -> None:
        self._open = False
        for reports in self._batcher.drain():
            self._pending.resolve_all(reports)
        if self._timer is not None:
            self._timer.cancel()
        self._runner.close()
        self.connector.close()

    def _wake(self, wait_s: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        assert self._loop is not None
        if wait_s is not None:
            self._timer = self._loop.call_later(wait_s, self._step) if wait_s else self._loop.call_soon(self._step)

    def _step(self) -> None:
        self._pending.resolve_all(self._batcher.step())
        self._wake(self._batcher.wait_s())
