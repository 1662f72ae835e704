"""One bidirectional stream of one session, from its attach to its end.

Requests are read, decoded and handed to the orchestrator in the order they came; each is answered exactly once
(``tick``, ``skipped`` or ``error``), and an error ends nothing but its own request. The newest attachment owns the
stream: nothing that an older one reads after it was fenced reaches the orchestrator, and nothing more is written to its
client.

Waits end with the connection (keepalive ends a dead one), with a newer attachment, or with the server's grace.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Coroutine
from typing import TYPE_CHECKING, Any, NoReturn, cast

from ..errors import Code, DeadlineExceeded, InvalidInput, OmniLoopError, Reason, ServerUnavailable, StateError
from ..loop.request import KEPT, Attachment, SessionInfo, TickRequest
from ..loop.tick import eager
from ..telemetry import metrics
from ..types import FramePrediction, TickResult
from ..wire import codec
from ..wire import loop_pb2 as pb
from .auth import principal
from .outbox import Kind, Outbox, kind_of
from .refusal import Context, public
from .requests import Ask, early

if TYPE_CHECKING:
    from ..loop.flight import OnPart
    from .service import LoopService

ATTACH_S = 10.0  # a stream whose first message takes longer ends
TURNED_S = 5.0  # an attach waits so long for resets and rewinds of the stream before, so that its epoch holds
# A fenced client is told in-band and then has so long to end its stream. Ended at once, a client that is writing would
# hear of a broken connection, attach again, and fence the newer one.
FAREWELL_S = 5.0
# Errors that are a skip's reason; see Skipped in loop.proto.
_SKIPS = {Reason.SUPERSEDED: "superseded", Reason.CANCELLED: "cancelled", Reason.EXPIRED: "expired"}
DUPLICATE = "duplicate_in_flight"

_open = metrics.gauge("omni_loop_streams", "Streams that are attached to a session")
_ended = metrics.counter("omni_loop_streams_ended", "Streams that ended", ("how",))


class Connection:
    """:meth:`run` is all of a stream's life. :meth:`fence` and :meth:`drain` act at once, on the event loop."""

    def __init__(self, service: LoopService, context: Context) -> None:
        self._service = service
        self._context = context
        self._ref = pb.SessionRef()
        self._info: SessionInfo
        self.outbox = Outbox(service.limits.outbox_bytes)
        self._running: dict[int, asyncio.Task[None]] = {}  # by seq
        self._turnings: set[asyncio.Task[None]] = set()  # resets and rewinds; they go on when the stream ends
        self._writer: asyncio.Task[None] | None = None
        self._room = asyncio.Event()  # an answer or a message left
        self._drained = asyncio.Event()
        self.gone = asyncio.Event()  # nothing of the stream runs any more
        self._over = asyncio.Event()  # fenced, or the connection is gone
        self._fenced = False
        self._broken: Exception | None = None  # what writing ended with
        self._between = False  # the reader waits for a message, so it holds none

    @property
    def epoch(self) -> int:
        return self._service.epoch(self._ref)

    @property
    def unanswered(self) -> int:
        """Requests that are with the orchestrator."""
        return len(self._running) + len(self._turnings)

    def drain(self) -> None:
        """Tell the client that the server stops, and read nothing more."""
        if not self._drained.is_set():
            self._put(Kind.ANSWER, pb.ServerMessage(draining="the server is about to stop; attach again later"))
            self._drained.set()

    def fence(self) -> None:
        """A newer stream has attached to the session: this one ends as aborted."""
        self._fenced = True
        self._over.set()
        self._room.set()

    async def run(self, requests: AsyncIterator[bytes]) -> None:
        """Until the client has no more requests and all are answered, or the stream is drained.

        Raises:
            InvalidInput: the first message is no attach. DeadlineExceeded: none came. UnknownSession.
            StateError: aborted (fenced) by a newer stream, or the session's state was lost.
        """
        attach = await self._first(requests)
        core = self._service.core
        self._ref = attach.session
        self._info = info = await self._service.info(attach.session)
        last = attach.last_received_seq if attach.HasField("last_received_seq") else None
        await self._take_over()
        attached = core.attach(info.id, info.token, self.fence, last)
        self._service.streams.add(self)
        _open.set(len(self._service.streams))
        how = "lost"
        try:
            self._welcome(attached, last is not None)
            if self._service.draining:
                self.drain()
            await self._serve(requests)
            how = "drained" if self._drained.is_set() else "whole"
        except StateError as error:
            how = str(error.reason)
            raise
        finally:
            _ended.inc(how=how)
            self._over.set()
            core.detach(info.id, attached.number)
            try:
                await _end(self._writer, *self._running.values())
            finally:
                self._service.streams.discard(self)
                _open.set(len(self._service.streams))
                self.gone.set()

    async def _first(self, requests: AsyncIterator[bytes]) -> pb.Attach:
        try:
            async with asyncio.timeout(ATTACH_S):
                raw = await anext(requests, None)
        except TimeoutError:
            raise DeadlineExceeded(
                f"a stream's first message must be attach, and none came for {ATTACH_S:g} s"
            ) from None
        message = pb.ClientMessage() if raw is None else await self._service.decoder.parse(pb.ClientMessage, raw)
        if message.WhichOneof("kind") != "attach":
            raise InvalidInput("the first message of a stream must be attach")
        return message.attach

    async def _take_over(self) -> None:
        """Older streams of the session read nothing more, and their resets and rewinds are done. Without a wait where
        there are none: then what is pending goes over to this stream."""
        for stream in self._service.streams:
            if stream._ref.session == self._ref.session:
                stream.fence()
        if turnings := self._service.turnings.get(self._ref.session):
            await asyncio.wait(turnings, timeout=TURNED_S)

    def _welcome(self, attached: Attachment, resumed: bool) -> None:
        """Without a wait: what is pending is joined before the fenced stream's waiters go, and replies come first."""
        message = pb.Attached(
            epoch=attached.epoch,
            last_seq=attached.last_seq,
            attachment=attached.number,
            accepted=attached.accepted,
            pending=attached.pending,
            replayed=len(attached.replies),
            forgotten=attached.forgotten,
        )
        self._put(Kind.ANSWER, pb.ServerMessage(attached=message))
        for reply in attached.replies:
            self._put_result(reply, codec.encode_result(early(reply) or reply))
        if resumed:
            core, info = self._service.core, self._info
            for seq in attached.pending:
                said = _Said()
                self._answer_by(core.wait(info.id, info.token, seq, self._listener(said)), seq, said)

    async def _serve(self, requests: AsyncIterator[bytes]) -> None:
        reader = asyncio.create_task(self._read(requests))
        work = asyncio.create_task(self._work(reader))
        over = asyncio.create_task(self._over.wait())
        try:
            await asyncio.wait((work, over), return_when=asyncio.FIRST_COMPLETED)
            if self._fenced:
                await self._bid_farewell(reader)
            if self._broken is not None:
                raise ServerUnavailable(
                    "the connection ended while an answer was written", reason=Reason.CLOSED
                ) from self._broken
            await work
        finally:
            await _end(reader, work, over)

    async def _work(self, reader: asyncio.Task[None]) -> None:
        """Read to the end or to the drain, and see everything answered and written."""
        drained = asyncio.create_task(self._drained.wait())
        try:
            await asyncio.wait((reader, drained), return_when=asyncio.FIRST_COMPLETED)
            if reader.done() or not self._between:  # a message already read is answered like the others
                await reader
        finally:
            await _end(drained)
        while tasks := [*self._running.values(), *self._turnings]:
            await asyncio.wait(tasks)
        if self._writer is not None:
            await self._writer

    async def _bid_farewell(self, reader: asyncio.Task[None]) -> NoReturn:
        error = StateError("a newer stream has attached to this session", code=Code.ABORTED, reason=Reason.FENCED)
        message = pb.ServerMessage(error=codec.encode_error(error, epoch=self.epoch))
        farewell = asyncio.create_task(self._say(message))
        drained = asyncio.create_task(self._drained.wait())
        try:
            await asyncio.wait((reader, drained), timeout=FAREWELL_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _end(farewell, drained)
        raise error

    async def _say(self, message: pb.ServerMessage) -> None:
        """The last words, after the one that is on its way."""
        if self._writer is not None:
            await asyncio.wait((self._writer,))
        await self._context.write(message.SerializeToString())

    # Requests ---------------------------------------------------------------------------------------------

    async def _read(self, requests: AsyncIterator[bytes]) -> None:
        while not self._drained.is_set():
            self._between = True
            raw = await anext(requests, None)
            self._between = False
            if raw is None:
                return
            if not self._fenced:
                await self._hear(raw, time.perf_counter())

    async def _hear(self, raw: bytes, began: float) -> None:
        """One message. Waits while too many requests are unanswered, but a cancel, which may be what they wait for."""
        seq = 0
        try:
            message = await self._service.decoder.parse(pb.ClientMessage, raw)
            kind = message.WhichOneof("kind")
            if kind == "cancel":
                self._cancel(message.cancel.seq)
                return
            while not self._fenced and (self.unanswered >= self._service.limits.max_in_flight or self.outbox.full):
                self._room.clear()
                await self._room.wait()
            seq = getattr(getattr(message, kind or "", None), "seq", 0)
            self._service.gate.charge(principal.get(), len(raw))
            if kind in ("reset", "rewind"):
                self._turn_back(getattr(message, kind))
                return
            request = _request_of(message, kind)
            if seq in self._running:
                skipped = pb.Skipped(seq=seq, reason=DUPLICATE, epoch=self.epoch)
                self._put(Kind.ANSWER, pb.ServerMessage(skipped=skipped))
                return
            info = await self._service.info(self._ref)
            self._start(await self._service.decoder.tick(info, request, len(raw), began))
        except Exception as error:
            self._put_error(public(error, "Stream"), seq)

    def _cancel(self, seq: int) -> None:
        if not self._fenced:
            self._service.core.cancel(self._info.id, self._info.token, seq)

    def _start(self, request: TickRequest) -> None:
        """Without a wait after the look at the fence, and in the order the requests came."""
        if self._fenced:
            return
        said = _Said()
        listener = self._listener(said) if request.frames or request.previews else None
        tick = self._service.core.tick(request, listener, keep=request.op in KEPT)
        self._answer_by(tick, request.seq, said)

    def _turn_back(self, message: pb.ResetRequest | pb.RewindRequest) -> None:
        if self._fenced:
            return
        session, everybodys = self._ref.session, self._service.turnings
        task = eager(self._answer_turning(message))
        self._turnings.add(task)
        everybodys.setdefault(session, set()).add(task)

        def done(task: asyncio.Task[None]) -> None:
            self._turnings.discard(task)
            everybodys[session].discard(task)
            if not everybodys[session]:
                del everybodys[session]
            self._room.set()

        task.add_done_callback(done)

    # Answers ----------------------------------------------------------------------------------------------

    def _listener(self, said: _Said) -> OnPart:
        def on_part(part: TickResult | FramePrediction) -> None:
            if isinstance(part, FramePrediction):
                frames = pb.ServerMessage(frames=codec.encode_frames(part))
                self._put(Kind.PART, frames, part.seq, part.epoch)
            else:
                said.answer = True
                tick = pb.ServerMessage(tick=codec.encode_result(part))
                self._put(Kind.CHUNK, tick, part.seq, part.epoch, more=True)

        return on_part

    def _answer_by(self, tick: Coroutine[Any, Any, TickResult], seq: int, said: _Said) -> None:
        task = eager(self._answer(tick, seq, said))
        if not task.done():
            self._running[seq] = task
            task.add_done_callback(lambda _: self._answered(seq, task))

    def _answered(self, seq: int, task: asyncio.Task[None]) -> None:
        if self._running.get(seq) is task:
            del self._running[seq]
        self._room.set()

    async def _answer(self, tick: Awaitable[TickResult], seq: int, said: _Said) -> None:
        try:
            result = await tick
            first = early(result)
            self._put_result(result, await self._service.decoder.encode(first or result), said.answer)
        except Exception as error:
            refusal = public(error, "Stream")
            reason = _skip_of(refusal)
            if said.answer:  # answered already: only what was asked besides is lost
                lost = codec.encode_frames_error(refusal, seq, self.epoch)
                self._put(Kind.FRAMES, pb.ServerMessage(frames=lost), seq, lost.epoch)
            elif reason is not None:
                skipped = pb.Skipped(seq=seq, reason=reason, epoch=self.epoch)
                self._put(Kind.ANSWER, pb.ServerMessage(skipped=skipped))
            else:
                self._put_error(refusal, seq)

    async def _answer_turning(self, message: pb.ResetRequest | pb.RewindRequest) -> None:
        service = self._service
        try:
            if isinstance(message, pb.ResetRequest):
                reply = pb.ServerMessage(reset=await service.reset(message, self._info))
            else:
                reply = pb.ServerMessage(rewind=await service.rewind(message, self._info))
            self._put(Kind.ANSWER, reply)
        except Exception as error:
            self._put_error(public(error, message.DESCRIPTOR.name.removesuffix("Request")), 0)

    def _put_result(self, result: TickResult, answer: pb.TickReply, answered: bool = False) -> None:
        """``answer``: encoded, without the frames that come besides it; ``answered``: it left early."""
        seq, epoch, besides = result.seq, result.epoch, answered or result.early is not None
        if not answered:
            self._put(kind_of(result), pb.ServerMessage(tick=answer), seq, epoch, more=besides)
        if besides:
            self._put(Kind.FRAMES, pb.ServerMessage(frames=_frames_of(result)), seq, epoch)

    def _put_error(self, error: OmniLoopError, seq: int) -> None:
        self._put(Kind.ANSWER, pb.ServerMessage(error=codec.encode_error(error, seq, self.epoch)))

    def _put(self, kind: Kind, message: pb.ServerMessage, seq: int = 0, epoch: int = 0, *, more: bool = False) -> None:
        if self._over.is_set():
            return  # nobody hears it here; a newer stream has joined what is under way
        self.outbox.put(kind, message, seq, epoch, more=more)
        if self._writer is None or self._writer.done():
            self._writer = eager(self._write())  # at once, and not when the loop comes round to it

    async def _write(self) -> None:
        try:
            while not self._fenced and (data := self.outbox.take()) is not None:
                self._room.set()
                await self._context.write(data)
        except Exception as error:
            self._broken = error
            self._over.set()


class _Said:
    """Whether the answer of a request left before its frames."""

    answer = False


async def _end(*tasks: asyncio.Task[Any] | None) -> None:
    """Cancel what still runs, and see it end. What it ends with was raised before, or is the cancellation."""
    left = [task for task in tasks if task is not None]
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)


def _skip_of(error: OmniLoopError) -> str | None:
    """The reason of the skip that ``error`` is; None: it is none."""
    if error.reason is Reason.EXPIRED and error.code is not Code.DEADLINE_EXCEEDED:
        return None  # the session's lease
    return _SKIPS.get(error.reason)


def _request_of(message: pb.ClientMessage, kind: str | None) -> Ask:
    if kind == "attach":
        raise InvalidInput("the stream is attached already")
    if kind is None:
        raise InvalidInput("a message must hold an observation, predict, recondition, plan, reset, rewind or cancel")
    return cast(Ask, getattr(message, kind))


def _frames_of(result: TickResult) -> pb.FramePrediction:
    if result.frames is not None:
        return codec.encode_frames(result.frames)
    error = result.frames_error or StateError("the pipeline gave no frames", reason=Reason.UNSUPPORTED)
    return codec.encode_frames_error(error, result.seq, result.epoch)
