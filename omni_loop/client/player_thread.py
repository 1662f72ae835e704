"""The player's other side: a thread with an event loop of its own that talks to the server.

What both threads touch is :attr:`PlayerThread.playback` and a few fields beside it, under one lock that nobody holds
across IO, so that the control thread never waits.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import InvalidInput, OmniLoopError, Reason, ServerUnavailable, StageFailed
from ..types import Array, SessionSpec, TickResult
from ..wire import loop_pb2 as pb
from . import arguments
from .aio import AsyncClient, AsyncSession
from .playback import Playback, Sending
from .resume import ResumingStream
from .stream import Event, Refused, Skipped, WasReset

log = logging.getLogger(__name__)
_PAUSE_S = 0.5  # before a session is opened again where none was to be had
_FOREVER_S = arguments.YEAR_S  # the server's grace decides how long a session is there to come back to
_STALL_S = 5.0  # a connection that says nothing for so long is dead, although it may not look so
_CLOSE_S = 2.0
# Refusals of one request that say the session is over.
_OVER = (Reason.UNKNOWN_SESSION, Reason.SESSION_LOST, Reason.CLOSED, Reason.FENCED, Reason.BAD_TOKEN)

Fit = Callable[[Mapping[str, Array]], dict[str, Array]]


@dataclass(frozen=True, slots=True)
class _Unanswered:
    sending: Sending
    at: float  # time.monotonic


@dataclass(slots=True, eq=False)
class _Turning:
    """A reset the server has not answered."""

    seed: int | None
    prompt: str | None
    sent: bool = False


class PlayerThread:
    """One session of the player's, and the connection to it. ``opening``: keywords of :meth:`AsyncClient.open`."""

    def __init__(
        self,
        connect: Callable[[], AsyncClient],
        pipeline: str,
        opening: Mapping[str, Any],
        made: Callable[[SessionSpec], Playback],
        deadline_ms: float,
    ) -> None:
        self._connect, self._pipeline, self._opening = connect, pipeline, dict(opening)
        self._made, self._deadline_ms = made, deadline_ms
        self.lock = threading.Lock()
        self.ready = threading.Event()  # an action is there, or none will be
        self.playback: Playback
        self.session: AsyncSession
        self.fit: Fit = dict
        self.error: OmniLoopError | None = None  # why the session is lost
        self.refusal: OmniLoopError | None = None
        self.bad: OmniLoopError | None = None  # what is wrong with an observation that was handed in
        self._stream: ResumingStream | None = None
        self._turning: _Turning | None = None
        self._unanswered: dict[int, _Unanswered] = {}
        self._opened = threading.Event()
        self._loop: asyncio.AbstractEventLoop
        self._wake: asyncio.Event
        self._stop: asyncio.Event
        self._thread = threading.Thread(target=self._main, name="player", daemon=True)

    @property
    def reconnects(self) -> int:
        """Of this session."""
        return 0 if self._stream is None else max(0, self._stream.attachments - 1)

    def start(self) -> None:
        """Returns when the session is open; raises what opening it raises."""
        self._thread.start()
        self._opened.wait()
        if self.error is not None:
            self._thread.join()
            raise self.error

    def wake(self) -> None:
        """There is something to look at: an observation, or a reset."""
        self._call(lambda: self._wake.set())

    def reset(self, seed: int | None, prompt: str | None) -> None:
        """From the control thread. Raises InvalidInput."""
        self.session._book.reset(seed, prompt)  # checks
        with self.lock:
            self.playback.reset()
            self.ready.clear()
            self.bad = None
            self._turning = _Turning(seed, prompt)
        self.wake()

    def close(self) -> None:
        self._call(lambda: self._stop.set())
        self._thread.join()

    def _call(self, work: Callable[[], None]) -> None:
        if self._thread.is_alive():
            try:
                self._loop.call_soon_threadsafe(work)
            except RuntimeError:  # the loop has ended since
                if self._thread.is_alive() and not self._loop.is_closed():
                    raise

    # In the player's thread.

    def _main(self) -> None:
        try:
            asyncio.run(self._play())
        except OmniLoopError as error:
            self._lost(error)
        except BaseException as error:
            log.exception("the player's thread ended")
            self._lost(StageFailed(f"the player's thread ended: {type(error).__name__}: {error}"))
        finally:
            self._opened.set()

    async def _play(self) -> None:
        self._loop, self._wake, self._stop = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
        async with self._connect() as client:
            self.session = await client.open(self._pipeline, **self._opening)
            self.playback = self._made(self.session.spec)
            self._opened.set()
            while not self._stop.is_set():
                await self._once(client)
            await self._close_session()

    async def _once(self, client: AsyncClient) -> None:
        """One session, as long as there is one to come back to."""
        try:
            if self.error is not None:
                await self._open_again(client)
            else:
                await self._attached()
        except OmniLoopError as error:
            self._lost(error)
            if error.retryable:
                await self._unless_stopped(asyncio.sleep(_PAUSE_S))

    async def _attached(self) -> None:
        """Raises what ended it for good."""
        async with self.session.resuming(give_up_s=_FOREVER_S, stall_s=_STALL_S) as stream:
            self._stream = stream
            tasks = [asyncio.create_task(work) for work in (self._hear(stream), self._send(stream), self._stop.wait())]
            try:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            for task in done:
                task.result()

    async def _send(self, stream: ResumingStream) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            with self.lock:
                turning = self._turning
                sending = self.playback.due() if turning is None else None  # observations wait for the new epoch
            if turning is not None and not turning.sent:
                turning.sent = True
                self._forget()
                await stream.reset(seed=turning.seed, prompt=turning.prompt)
            elif sending is not None and (message := self._message(sending)) is not None:
                self._unanswered[message.seq] = _Unanswered(sending, time.monotonic())
                await stream.send(pb.ClientMessage(observation=message))

    def _message(self, sending: Sending) -> pb.Observation | None:
        seen = sending.seen
        try:
            return self.session._book.infer(
                self.fit(seen.arrays),
                seen.step,
                sending.executed,
                deadline_ms=self._deadline_ms,
                captured_ns=seen.captured_ns,
                supersede=sending.supersede,
                executed_through=sending.executed_through,
            )
        except InvalidInput as error:
            with self.lock:
                self.playback.failed(sending, skipped=False)
                self.bad = error  # the next observe() raises it
            return None

    async def _hear(self, stream: ResumingStream) -> None:
        async for event in stream:
            self._take(event)
        raise ServerUnavailable("the server ended the stream", reason=Reason.CLOSED)

    def _take(self, event: Event) -> None:
        if isinstance(event, WasReset):
            self._was_reset()
            return
        if isinstance(event, Refused) and (event.seq == 0 or event.error.reason in _OVER):
            raise event.error
        if not isinstance(event, (TickResult, Skipped, Refused)):
            return  # frames, and Draining, after which the stream ends
        asked = self._unanswered.pop(event.seq, None)
        if asked is None:
            return  # of an episode that is over
        with self.lock:
            if isinstance(event, TickResult) and event.chunk is not None:
                self.playback.answered(asked.sending, event.chunk, time.monotonic() - asked.at)
            elif isinstance(event, Refused):
                self.refusal = event.error
                self.playback.failed(asked.sending, skipped=False, unsure=isinstance(event.error, InvalidInput))
            else:
                self.playback.failed(asked.sending, skipped=True)
            dry = self.playback.dry
            if not dry:
                self.ready.set()
        if dry:
            self._wake.set()  # what was seen meanwhile cannot wait for the next observation

    def _was_reset(self) -> None:
        """The server has begun an episode: the one that is played, unless another reset was asked for since."""
        with self.lock:
            if self._turning is not None and self._turning.sent:
                self._turning = None
        self._wake.set()

    def _forget(self) -> None:
        """Nobody waits for what was asked before the reset."""
        self.playback.counts.stale += len(self._unanswered)
        self._unanswered.clear()

    def _lost(self, error: OmniLoopError) -> None:
        with self.lock:
            self.error = error
            self._unanswered.clear()
            if self._turning is not None:
                self._turning.sent = False  # it begins in another session
            self.ready.set()

    async def _open_again(self, client: AsyncClient) -> None:
        """Wait for a reset, which begins in a new session: of the old one nothing is left."""
        while (turning := self._turning) is None:
            self._wake.clear()
            if not await self._unless_stopped(self._wake.wait()):
                return
        opening = dict(self._opening, spec_digest=self.session.spec.digest)
        opening |= {} if turning.seed is None else {"seed": turning.seed}
        opening |= {} if turning.prompt is None else {"prompt": turning.prompt}
        self.session = await client.open(self._pipeline, **opening)
        with self.lock:
            self.error = None
            if self._turning is turning:
                self._turning = None

    async def _unless_stopped(self, work: Any) -> bool:
        """Whether ``work`` ended before the player is to stop."""
        tasks = [asyncio.ensure_future(work), asyncio.ensure_future(self._stop.wait())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
        return not self._stop.is_set()

    async def _close_session(self) -> None:
        if self.error is not None:
            return
        try:
            await asyncio.wait_for(self.session.close(), _CLOSE_S)
        except (OmniLoopError, asyncio.TimeoutError) as error:
            log.warning("closing session %s: %s; the server frees it when it has been silent", self.session.id, error)
