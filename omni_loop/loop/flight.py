"""A seq under way: who waits for it, what it has answered, and how it ends early."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace

from ..errors import DeadlineExceeded, OmniLoopError, Reason, StateError
from ..types import FramePrediction, TickResult
from .graph import CompiledPlan
from .request import TickRequest

OnPart = Callable[[TickResult | FramePrediction], None]  # the early answer, and parts of frames
Leave = Callable[["Flight", OmniLoopError], None]
_log = logging.getLogger(__name__)


class Flight:
    """Callers share one result. ``part`` is the committed answer while something still runs besides it."""

    def __init__(self, request: TickRequest, plan: CompiledPlan, arrived: float) -> None:
        loop = asyncio.get_running_loop()
        self.request, self.plan = request, plan
        self.arrived = self.began = arrived  # seconds on the server's clock
        self.stop: asyncio.Future[OmniLoopError] = loop.create_future()  # ends the run at its next wait
        self.sealed = False  # the commit was sent: from here on the tick cannot be undone
        self.part: TickResult | None = None
        self.deadline: asyncio.TimerHandle | None = None
        self._outcome: TickResult | OmniLoopError | None = None
        self._waiters: list[asyncio.Future[TickResult]] = []
        self._listeners: list[OnPart] = []
        self._shown = 0  # parts of the frames

    def arm(self, leave: Leave) -> None:
        """Let the request's deadline end the flight."""
        ms = self.request.deadline_ms
        if ms > 0:
            error = DeadlineExceeded(f"the deadline of {ms:g} ms has passed")
            self.deadline = asyncio.get_running_loop().call_later(ms / 1e3, leave, self, error)

    @property
    def over(self) -> bool:
        return self._outcome is not None

    async def wait(self, on_part: OnPart | None, leave: Leave | None) -> TickResult:
        """The result. The last caller to be cancelled ends the flight through ``leave``; one without lets it go on."""
        if on_part is not None:
            self._listeners.append(on_part)
            if self.part is not None:
                self._tell(on_part, self.part)
        # One future per caller: its cancellation takes nothing from the others, and the answer reaches it at once.
        waiter: asyncio.Future[TickResult] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        if self._outcome is not None:
            _tell_outcome(waiter, self._outcome)
        try:
            return await waiter
        except asyncio.CancelledError:
            if leave is not None and len(self._waiters) == 1:
                leave(self, StateError("the caller went away", reason=Reason.CANCELLED, retryable=True))
            raise
        finally:
            self._waiters.remove(waiter)
            if on_part is not None:
                self._listeners.remove(on_part)

    def answer(self, part: TickResult, last: bool) -> None:
        """The committed answer; ``last`` when nothing follows besides it."""
        self.part = part
        if last:
            self.finish(part)
        elif not self.over:
            for listener in tuple(self._listeners):
                self._tell(listener, part)

    def show(self, frames: FramePrediction) -> None:
        """Frames on their way; none after the end, and none twice although a tick was begun anew."""
        if self.over or frames.part <= self._shown:
            return
        self._shown = frames.part
        for listener in tuple(self._listeners):
            self._tell(listener, frames)

    def finish(self, result: TickResult) -> None:
        self._quiet()
        self._end(result)

    def fail(self, error: OmniLoopError) -> None:
        """End with ``error``; a committed answer stands, and only what was asked besides is lost."""
        self._quiet()
        if not self.stop.done():
            self.stop.set_result(error)
        self._end(error if self.part is None else replace(self.part, frames_error=error))

    def _end(self, outcome: TickResult | OmniLoopError) -> None:
        if self.over:
            return
        self._outcome = outcome
        for waiter in self._waiters:
            _tell_outcome(waiter, outcome)

    def _quiet(self) -> None:
        if self.deadline is not None:
            self.deadline.cancel()
            self.deadline = None

    def _tell(self, listener: OnPart, part: TickResult | FramePrediction) -> None:
        try:
            listener(part)
        except Exception:
            # The listener is the server's; its fault must not end the tick for the other callers.
            _log.exception("a listener of early answers failed")


def _tell_outcome(waiter: asyncio.Future[TickResult], outcome: TickResult | OmniLoopError) -> None:
    if waiter.done():  # cancelled
        return
    if isinstance(outcome, OmniLoopError):
        waiter.set_exception(outcome)
    else:
        waiter.set_result(outcome)
