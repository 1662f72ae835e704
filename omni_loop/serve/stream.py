"""One bidirectional stream of one session.

Requests are read, decoded and handed to the orchestrator in the order they came; each is answered exactly
once (``tick``, ``skipped`` or ``error``), and an error ends nothing but its own request. A request keeps its
place among the ``IN_FLIGHT`` until its last answer is written, so a client that does not read is not read from.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, cast

from ..errors import Code, InvalidInput, OmniLoopError, Reason, StateError
from ..loop.request import TickRequest
from ..types import FramePrediction, TickResult
from ..wire import codec
from ..wire import loop_pb2 as pb
from .refusal import Context, public
from .requests import Ask

if TYPE_CHECKING:
    from ..loop.flight import OnPart
    from .service import LoopService

IN_FLIGHT = 4
# Reasons of a skip; see Skipped in loop.proto.
EXPIRED, DUPLICATE = "expired", "duplicate_in_flight"


class Connection:
    """:meth:`attach` first, then :meth:`serve` to the end."""

    def __init__(self, service: LoopService, context: Context) -> None:
        self._service = service
        self._context = context
        self._ref = pb.SessionRef()
        self._outbox: asyncio.Queue[tuple[pb.ServerMessage, bool] | None] = asyncio.Queue()
        self._room = asyncio.Semaphore(IN_FLIGHT)
        self._running: dict[int, asyncio.Task[None]] = {}  # by seq
        self._turnings: set[asyncio.Task[None]] = set()  # resets and rewinds
        self._ended = asyncio.Event()
        self._fenced = False
        self._between = False  # the reader waits for a message, so it holds none

    @property
    def epoch(self) -> int:
        return self._service.epoch(self._ref)

    def drain(self) -> None:
        """Tell the client that the server stops, and read nothing more."""
        self._put(pb.ServerMessage(draining="the server is about to stop; attach again later"))
        self._ended.set()

    def fence(self) -> None:
        """A newer stream has attached to the session: this one ends as aborted."""
        self._fenced = True
        self._ended.set()

    async def attach(self, requests: AsyncIterator[bytes]) -> pb.SessionRef:
        """Reads the first message. Raises :class:`InvalidInput` when it is no attach, :class:`UnknownSession`."""
        raw = await anext(requests, None)
        message = pb.ClientMessage() if raw is None else await self._service.decoder.parse(pb.ClientMessage, raw)
        if message.WhichOneof("kind") != "attach":
            raise InvalidInput("the first message of a stream must be attach")
        info = self._service.info(message.attach.session)
        self._ref = message.attach.session
        last = self._service.core.last_seq(info.id, info.token)
        self._put(pb.ServerMessage(attached=pb.Attached(epoch=info.epoch, last_seq=last)))
        return self._ref

    async def serve(self, requests: AsyncIterator[bytes]) -> None:
        """Until the client has no more requests and all are answered, or the stream is drained or fenced.
        Raises :class:`StateError` (aborted) when fenced."""
        reader = asyncio.create_task(self._read(requests))
        writer = asyncio.create_task(self._write())
        ended = asyncio.create_task(self._ended.wait())
        try:
            await asyncio.wait((reader, writer, ended), return_when=asyncio.FIRST_COMPLETED)
            if self._fenced:
                raise StateError(
                    "a newer stream has attached to this session", code=Code.ABORTED, reason=Reason.STALE_EPOCH
                )
            if self._between:
                reader.cancel()
            else:  # a message already read is answered like the others
                await reader
            await asyncio.gather(*self._running.values(), *self._turnings)
            self._outbox.put_nowait(None)
            await writer
        finally:
            # The ticks themselves go on in the orchestrator; only their waiters end with the connection.
            for task in (reader, writer, ended, *self._running.values(), *self._turnings):
                task.cancel()

    async def _read(self, requests: AsyncIterator[bytes]) -> None:
        while not self._ended.is_set():
            self._between = True
            raw = await anext(requests, None)
            self._between = False
            if raw is None:
                return
            began = time.perf_counter()
            await self._room.acquire()
            seq = 0
            try:
                message = await self._service.decoder.parse(pb.ClientMessage, raw)
                kind = message.WhichOneof("kind")
                if kind in ("reset", "rewind"):
                    self._turn_back(getattr(message, kind))
                    continue
                request_message = _request_of(message, kind)
                seq = request_message.seq
                if seq in self._running:
                    self._put(pb.ServerMessage(skipped=pb.Skipped(seq=seq, reason=DUPLICATE)), last=True)
                    continue
                info = self._service.info(self._ref)
                self._start(await self._service.decoder.tick(info, request_message, len(raw), began))
            except Exception as error:
                self._put_error(public(error, "Stream"), seq)

    def _start(self, request: TickRequest) -> None:
        """Without a wait in between, so that requests reach the orchestrator in the order they came."""
        parts: list[TickResult] = []

        def on_part(part: TickResult | FramePrediction) -> None:
            if isinstance(part, FramePrediction):
                self._put(pb.ServerMessage(frames=codec.encode_frames(part)))
                return
            parts.append(part)
            self._put(pb.ServerMessage(tick=codec.encode_result(part)))

        listener = on_part if request.frames or request.previews else None
        # Tasks begin in the order they were made.
        self._running[request.seq] = asyncio.create_task(self._answer(request, listener, parts))

    async def _answer(self, request: TickRequest, on_part: OnPart | None, parts: list[TickResult]) -> None:
        try:
            # Kept: a client that comes back finds the answer when it asks for the seq again.
            result = await self._service.core.tick(request, on_part, keep=True)
            if parts:
                self._put(pb.ServerMessage(frames=_frames_of(result)), last=True)
            else:
                self._put(pb.ServerMessage(tick=await self._service.decoder.encode(result)), last=True)
        except Exception as error:
            refusal = public(error, "Stream")
            if parts:  # answered already: only what was asked besides is lost
                lost = codec.encode_frames_error(refusal, request.seq, self.epoch)
                self._put(pb.ServerMessage(frames=lost), last=True)
            elif refusal.reason is Reason.EXPIRED:
                self._put(pb.ServerMessage(skipped=pb.Skipped(seq=request.seq, reason=EXPIRED)), last=True)
            else:
                self._put_error(refusal, request.seq)
        finally:
            del self._running[request.seq]

    def _turn_back(self, message: pb.ResetRequest | pb.RewindRequest) -> None:
        task = asyncio.create_task(self._answer_turning(message))
        self._turnings.add(task)
        task.add_done_callback(self._turnings.discard)

    async def _answer_turning(self, message: pb.ResetRequest | pb.RewindRequest) -> None:
        service = self._service
        try:
            info = service.info(self._ref)
            if isinstance(message, pb.ResetRequest):
                reply = pb.ServerMessage(reset=await service.reset(message, info))
            else:
                reply = pb.ServerMessage(rewind=await service.rewind(message, info))
            self._put(reply, last=True)
        except Exception as error:
            self._put_error(public(error, message.DESCRIPTOR.name.removesuffix("Request")), 0)

    def _put_error(self, error: OmniLoopError, seq: int) -> None:
        self._put(pb.ServerMessage(error=codec.encode_error(error, seq, self.epoch)), last=True)

    def _put(self, message: pb.ServerMessage, last: bool = False) -> None:
        """``last``: with this message the request is answered and gives up its place."""
        self._outbox.put_nowait((message, last))

    async def _write(self) -> None:
        while (item := await self._outbox.get()) is not None:
            message, last = item
            await self._context.write(message.SerializeToString())
            if last:
                self._room.release()


def _request_of(message: pb.ClientMessage, kind: str | None) -> Ask:
    if kind == "attach":
        raise InvalidInput("the stream is attached already")
    if kind is None:
        raise InvalidInput("a message must hold an observation, predict, recondition, plan, reset or rewind")
    return cast(Ask, getattr(message, kind))


def _frames_of(result: TickResult) -> pb.FramePrediction:
    if result.frames is not None:
        return codec.encode_frames(result.frames)
    error = result.frames_error or StateError("the pipeline gave no frames", reason=Reason.UNSUPPORTED)
    return codec.encode_frames_error(error, result.seq, result.epoch)
