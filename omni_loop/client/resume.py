"""A stream that outlives its connections: it attaches again, and every request still has exactly one answer.

What was sent and not answered is kept. On a new connection the server first says again what the old one lost, then what
it never got is sent again under its own seq. Answers are bit for bit those of a stream that was never cut: each seq is
computed once, on the server.

Nothing runs besides the caller but the sending again: reading the events is what notices a loss and connects.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque

import grpc.aio

from ..errors import Code, Exhausted, OmniLoopError, Reason, ServerUnavailable, StateError, UnknownSession
from ..wire import loop_pb2 as pb
from .arguments import seconds
from .asked import Asked, Ledger
from .book import Book
from .stream import Attached, Requests, SessionStream

ATTACH_S = 10.0  # of one attempt
FIRST_WAIT_S, LONGEST_WAIT_S = 0.02, 1.0  # between attempts
MAX_UNANSWERED = 256


class ResumingStream(Requests):
    """As :class:`~omni_loop.client.stream.SessionStream`; what is sent while there is no connection goes with the next.

    ``give_up_s`` bounds how long it tries to attach again. ``stall_s``: with requests unanswered and nothing heard for
    so long the connection is taken for dead, sooner than keepalive does; None: it is not. ``window``: requests that are
    with the server and not answered; no more than answers it keeps (``Limits.replies``), so that none is lost. What is
    asked beyond it waits here.

    Reading the events raises, and the stream is over, with:
        StateError: (fenced) a newer stream has attached; (session lost) the server has it no more, or not up to here.
        ServerUnavailable: no server could be reached for ``give_up_s``.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        address: str,
        book: Book,
        *,
        give_up_s: float = 60.0,
        stall_s: float | None = None,
        window: int = 8,
    ) -> None:
        super().__init__(address, book)
        self._channel = channel
        self._give_up_s = seconds("give_up_s", give_up_s)
        self._stall_s = None if stall_s is None else seconds("stall_s", stall_s)
        self._window = window
        self.attachments = 0
        self.attached: Attached | None = None  # the last time
        self.resumed_s = 0.0  # the longest that attaching again took, from when a loss was noticed
        self._ledger = Ledger()
        self._ready: deque[pb.ServerMessage] = deque()  # heard while attaching, or told by what the server said then
        self._inner: SessionStream | None = None
        self._sending = asyncio.Lock()
        self._resending: asyncio.Task[None] | None = None
        self._finished = False
        self._over: OmniLoopError | None = None

    @property
    def unanswered(self) -> tuple[int, ...]:
        """The seqs whose last answer has not come yet."""
        return tuple(asked.seq for asked in self._ledger if asked.seq)

    async def attach(self) -> None:
        """Connect, or connect anew. Raises as reading the events does."""
        await self._leave()
        await self._connect()

    async def done(self) -> None:
        """No more requests; the events end when all are answered."""
        self._finished = True
        await self._push()

    async def close(self) -> None:
        """End the stream now. Ticks under way are still committed."""
        self._finished = True
        await self._leave()

    # What carries requests and answers ---------------------------------------------------------------------

    async def _send(self, message: pb.ClientMessage) -> None:
        if self._over is not None:
            raise self._over
        if message.WhichOneof("kind") == "cancel":
            self._ready.extend(self._ledger.cancel(message.cancel.seq))
        elif len(self._ledger) >= MAX_UNANSWERED:
            raise Exhausted(f"{MAX_UNANSWERED} requests of this stream have no answer yet", reason=Reason.BUSY)
        else:
            self._ready.extend(self._ledger.add(message))
        await self._push()

    async def _receive(self) -> pb.ServerMessage | None:
        while True:
            if self._over is not None:
                raise self._over
            if self._ready:
                return self._ready.popleft()
            if self._finished and not len(self._ledger):
                await self._leave()
                return None
            if self._inner is None:
                await self._connect()
                continue
            try:
                message = await self._read(self._inner)
            except OmniLoopError as error:
                await self._leave()
                self._judge(error)
                continue
            if message is None:  # drained
                await self._leave()
            else:
                self._ready.extend(self._ledger.hear(message))
                await self._push()

    async def _read(self, inner: SessionStream) -> pb.ServerMessage | None:
        if self._stall_s is None or not len(self._ledger):
            return await inner._receive()
        try:
            return await asyncio.wait_for(inner._receive(), self._stall_s)
        except asyncio.TimeoutError:
            raise ServerUnavailable(f"{self._address} said nothing for {self._stall_s:g} s") from None

    async def _push(self) -> None:
        """Write what was not written on this connection. A failure is the reader's to see: the call ends with it."""
        if self._sending.locked():
            return  # whoever holds it takes what was added
        async with self._sending:
            failed: SessionStream | None = None
            while (inner := self._inner) is not None and inner is not failed:
                asked = self._ledger.next(inner, self._window)
                try:
                    if asked is not None:
                        await self._write(inner, asked)
                    elif self._finished and not self._ledger.unsent(inner):
                        await inner.done()
                        return
                    else:
                        return
                except OmniLoopError:
                    failed = inner
                    inner.cancel()

    async def _write(self, inner: SessionStream, asked: Asked) -> None:
        if asked.on is not inner:
            asked.on = inner
            await inner._send(asked.message)
        elif asked.cancelled:
            asked.cancelled = False
            await inner._send(pb.ClientMessage(cancel=pb.Cancel(seq=asked.seq)))

    # Connections -------------------------------------------------------------------------------------------

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        began, wait_s = loop.time(), FIRST_WAIT_S
        while True:
            inner = SessionStream(self._channel, self._address, self._book)
            try:
                await asyncio.wait_for(self._catch_up(inner), ATTACH_S)
                break
            except asyncio.TimeoutError:
                error: OmniLoopError = ServerUnavailable(f"{self._address} did not attach within {ATTACH_S:g} s")
            except OmniLoopError as refusal:
                error = refusal
            except BaseException:
                inner.cancel()
                raise
            inner.cancel()
            if loop.time() + wait_s > began + self._give_up_s:
                error.retryable = False
                self._over = error
            self._judge(error)
            if self._over is not None:
                raise self._over
            await asyncio.sleep(wait_s * random.uniform(0.5, 1.0))
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)
        if self.attachments:
            self.resumed_s = max(self.resumed_s, loop.time() - began)
        self.attachments += 1
        self._inner = inner
        self._resending = asyncio.create_task(self._push())

    async def _catch_up(self, inner: SessionStream) -> None:
        """Attach, hear the answers that the last connection lost, and know what the server does not have."""
        known = self._book.epoch
        attached = await inner.attach(self._ledger.received(self._book.seq))
        if self._over is not None:
            raise self._over
        self.attached = attached
        self._ready.extend(self._ledger.settle(attached, known, inner))
        again = 0
        while again < attached.replayed:
            message = await inner._receive()
            if message is None:
                raise ServerUnavailable(f"{self._address} ended the stream while it attached", reason=Reason.CLOSED)
            again += message.WhichOneof("kind") in ("tick", "skipped")
            self._ready.extend(self._ledger.hear(message))

    async def _leave(self) -> None:
        inner, self._inner = self._inner, None
        if inner is not None:
            inner.cancel()
        if self._resending is not None:
            self._resending.cancel()
            await asyncio.gather(self._resending, return_exceptions=True)
            self._resending = None

    def _judge(self, error: OmniLoopError) -> None:
        """Another connection may help, or the stream is over."""
        if isinstance(error, UnknownSession) and self.attachments:
            self._over = StateError(
                f"the session is gone ({error.text}); answers up to seq {self._ledger.received(self._book.seq)} came",
                reason=Reason.SESSION_LOST,
            )
        elif error.code is Code.ABORTED or not error.retryable:
            self._over = error
