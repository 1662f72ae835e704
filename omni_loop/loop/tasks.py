"""Tasks of the loop: started at once, run to their end even when nobody waits any more, and never lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from ..errors import Exhausted, OmniLoopError, Reason, StageFailed
from .tick import eager

T = TypeVar("T")
_log = logging.getLogger(__name__)
_CROWDED_MS = 500.0  # by then the ticks that crowd a session out are over


class Tasks:
    """The tasks under way."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self._running)

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = eager(work)
        self._running.add(task)
        task.add_done_callback(self._ended)
        return task

    async def to_the_end(
        self, work: Coroutine[Any, Any, T], undo: Callable[[asyncio.Task[T]], Coroutine[Any, Any, None]] | None = None
    ) -> T:
        """Run ``work`` to its end even when the caller is cancelled; then ``undo`` follows."""
        task = self.spawn(work)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if undo is not None:
                self.spawn(undo(task))
            raise

    async def wait(self, timeout_s: float | None = None) -> None:
        """Until none is left, also of those that start meanwhile; or for ``timeout_s``, only those there are."""
        if timeout_s is not None:
            if self._running:
                await asyncio.wait(self._running, timeout=timeout_s)
            return
        while self._running:
            await asyncio.wait(self._running)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            public(error)  # logs what is no answer of ours; the caller, if any, gets the error itself


def public(error: BaseException) -> OmniLoopError:
    """``error`` as it may be shown; anything that is not ours is logged and shown as internal."""
    if isinstance(error, OmniLoopError):
        if error.reason is Reason.EVICTED:  # among ourselves; a client can only wait until there is room
            text = "there is no room to keep the session's state while it runs; try again later"
            return Exhausted(text, retry_after_ms=_CROWDED_MS)
        return error
    _log.error("internal error", exc_info=error)
    return StageFailed("the server met an internal error; its log says which")
