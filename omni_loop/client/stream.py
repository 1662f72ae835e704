"""The main road: requests and answers of one session on one bidirectional stream.

Requests may be sent before earlier ones are answered. Each is answered by exactly one :class:`TickResult`,
:class:`Skipped` or :class:`Refused` with its ``seq``; frames asked for besides a chunk come later as
:class:`~omni_loop.types.FramePrediction`, or as :class:`FramesLost`. Where ``previews`` were asked for, frames with a
``part`` come before the end of their request, which makes them void.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, Union

import grpc
import grpc.aio
from numpy.typing import ArrayLike

from ..errors import InvalidInput, OmniLoopError, Reason, ServerUnavailable
from ..types import MAX_COUNT, FramePrediction, TickResult
from ..wire import codec
from ..wire import loop_pb2 as pb
from . import channel
from .arguments import whole
from .book import ANSWERS, Book

STATUS_S, STATUS_TRIES = 0.005, 40  # between looks at how a call ended


@dataclass(frozen=True, slots=True)
class Skipped:
    """Nothing is answered: ``superseded`` by a newer one, ``expired``, ``cancelled`` or ``duplicate_in_flight``."""

    seq: int
    reason: str


@dataclass(frozen=True, slots=True)
class Refused:
    """The request failed with ``error``; the session and the stream go on. ``seq`` 0: not about a tick."""

    seq: int
    error: OmniLoopError


@dataclass(frozen=True, slots=True)
class FramesLost:
    """Frames asked for besides failed with ``error``; the chunk that came before stands."""

    seq: int
    error: OmniLoopError


@dataclass(frozen=True, slots=True)
class WasReset:
    """A new epoch has begun."""

    epoch: int


@dataclass(frozen=True, slots=True)
class WasRewound:
    """A new epoch has begun, at a step the session stood at before."""

    epoch: int
    step: int


@dataclass(frozen=True, slots=True)
class Draining:
    """The server is about to stop; it reads no more requests."""

    text: str


Event = Union[TickResult, FramePrediction, FramesLost, Skipped, Refused, WasReset, WasRewound, Draining]  # noqa: UP007  3.10


@dataclass(frozen=True, slots=True)
class Attached:
    """What the server says to an attach; see loop.proto. ``answered`` and ``accepted``: the highest such seq. So many
    answers as ``replayed`` follow again; those up to ``forgotten`` (0: none) are lost, and their state stands."""

    number: int
    epoch: int
    answered: int
    accepted: int
    pending: tuple[int, ...]
    replayed: int
    forgotten: int


class Requests(ABC):
    """What can be asked on a stream, and what comes back, whatever carries it."""

    def __init__(self, address: str, book: Book) -> None:
        self._address = address
        self._book = book

    @abstractmethod
    async def _send(self, message: pb.ClientMessage) -> None:
        """Hand ``message`` to the server."""

    @abstractmethod
    async def _receive(self) -> pb.ServerMessage | None:
        """The next message; None: the stream has ended."""

    async def infer(
        self,
        arrays: Mapping[str, ArrayLike],
        step: int,
        *,
        executed: ArrayLike | None = None,
        frames: int = 0,
        deadline_ms: float = 0.0,
        captured_ns: int = 0,
        previews: bool = False,
        supersede: bool = False,
        executed_through: int | None = None,
    ) -> int:
        """Send an observation; its ``seq``. ``previews``: parts of the frames are wanted as they are made.
        ``supersede``: observations that wait and have not begun are replaced by it, each answered by
        :class:`Skipped`. ``executed_through``: as for :meth:`Session.infer <omni_loop.client.sync.Session.infer>`."""
        observation = self._book.infer(
            arrays, step, executed, frames, deadline_ms, captured_ns, supersede, executed_through
        )
        observation.previews = previews
        await self._send(pb.ClientMessage(observation=observation))
        return observation.seq

    async def predict(
        self,
        actions: ArrayLike | None = None,
        *,
        steps: int = 0,
        deadline_ms: float = 0.0,
        previews: bool = False,
    ) -> int:
        """Ask for frames of ``actions float32[n, action_dim]``, or of ``steps`` imagined ones; the ``seq``.
        ``previews``: parts of them are wanted as they are made."""
        request = self._book.predict(actions, steps, deadline_ms)
        request.previews = previews
        await self._send(pb.ClientMessage(predict=request))
        return request.seq

    async def recondition(
        self,
        arrays: Mapping[str, ArrayLike],
        *,
        executed: ArrayLike | None = None,
        first_step: int = 0,
        deadline_ms: float = 0.0,
    ) -> int:
        """Send a run of real steps; the ``seq``."""
        request = self._book.recondition(arrays, executed, first_step, deadline_ms)
        await self._send(pb.ClientMessage(recondition=request))
        return request.seq

    async def plan(
        self,
        *,
        horizon: int | None = None,
        candidates: int | None = None,
        iterations: int | None = None,
        method: str = "cem",
        budget_ms: float = 0.0,
        goal: ArrayLike | None = None,
        init: ArrayLike | None = None,
        deadline_ms: float = 0.0,
    ) -> int:
        """Ask for a plan, as :meth:`Session.plan <omni_loop.client.sync.Session.plan>` does; the ``seq``."""
        request = self._book.plan(horizon, candidates, iterations, method, budget_ms, goal, init, deadline_ms)
        await self._send(pb.ClientMessage(plan=request))
        return request.seq

    async def rewind(self, step: int) -> None:
        """Go back to ``step`` after the requests sent so far; answered by :class:`WasRewound`, or :class:`Refused`
        with seq 0."""
        await self._send(pb.ClientMessage(rewind=self._book.rewind(step)))

    async def reset(self, *, seed: int | None = None, prompt: str | None = None) -> None:
        """Begin a new episode after the requests sent so far; answered by :class:`WasReset`. As for
        :meth:`Session.reset <omni_loop.client.sync.Session.reset>`, a seed does not repeat an earlier epoch."""
        await self._send(pb.ClientMessage(reset=self._book.reset(seed, prompt)))

    async def send(self, message: pb.ClientMessage) -> None:
        """A message as it is, such as a request sent again under its own ``seq``."""
        await self._send(message)

    async def cancel_request(self, seq: int) -> None:
        """End a request that waits or runs: it is answered ``Skipped(seq, "cancelled")``, unless its answer is
        committed already. Nothing happens for one that is answered."""
        await self._send(pb.ClientMessage(cancel=pb.Cancel(seq=whole("seq", seq, MAX_COUNT))))

    def __aiter__(self) -> AsyncIterator[Event]:
        return self._events()

    async def _events(self) -> AsyncIterator[Event]:
        while (message := await self._receive()) is not None:
            yield self._event(message)

    def _event(self, message: pb.ServerMessage) -> Event:
        kind = message.WhichOneof("kind")
        if kind == "tick":
            return self._book.read(message.tick)
        if kind == "frames":
            if message.frames.HasField("error"):
                return FramesLost(message.frames.seq, codec.decode_error(message.frames.error))
            return codec.decode_frames(message.frames, self._book.spec, ANSWERS)
        if kind == "skipped":
            return Skipped(message.skipped.seq, message.skipped.reason)
        if kind == "error":
            return Refused(message.error.seq, codec.decode_error(message.error))
        if kind == "reset":
            return WasReset(self._book.read_reset(message.reset))
        if kind == "rewind":
            epoch = self._book.read_rewind(message.rewind)
            return WasRewound(epoch, message.rewind.step)
        if kind == "draining":
            return Draining(message.draining)
        raise InvalidInput(f"the server sent a message this version does not know: {kind}")


class SessionStream(Requests):
    """``async for event in stream`` beside ``await stream.infer(...)``, which returns the ``seq`` it used. It lives as
    long as its connection; :class:`~omni_loop.client.resume.ResumingStream` outlives it."""

    def __init__(self, channel_: grpc.aio.Channel, address: str, book: Book) -> None:
        super().__init__(address, book)
        call = channel_.stream_stream(
            channel.method("Stream"),
            request_serializer=pb.ClientMessage.SerializeToString,
            response_deserializer=pb.ServerMessage.FromString,
        )
        self._call: Any = call()
        self._fenced: OmniLoopError | None = None  # told in-band
        self.last_seq = 0  # highest seq the server had answered when the stream attached

    async def attach(self, last_received_seq: int | None = None) -> Attached:
        """The first exchange. With ``last_received_seq`` the answers after it come again, and those under way come on
        this stream. Raises what the server refuses it with."""
        await self._send(
            pb.ClientMessage(attach=pb.Attach(session=self._book.ref, last_received_seq=last_received_seq))
        )
        message = await self._receive()
        if message is None or message.WhichOneof("kind") != "attached":
            raise ServerUnavailable(f"{self._address} did not attach the session", reason=Reason.CLOSED)
        said = message.attached
        self._book.epoch = said.epoch
        self.last_seq = said.last_seq
        return Attached(
            said.attachment,
            said.epoch,
            said.last_seq,
            said.accepted,
            tuple(said.pending),
            said.replayed,
            said.forgotten,
        )

    async def done(self) -> None:
        """No more requests; the events end when all are answered."""
        await self._call.done_writing()

    def cancel(self) -> None:
        """End the stream now. Ticks under way are still committed, and answered when their seq is repeated."""
        self._call.cancel()

    async def _send(self, message: pb.ClientMessage) -> None:
        try:
            await self._call.write(message)
        except (grpc.RpcError, asyncio.InvalidStateError):  # the latter: the call was over before
            raise await self._why_over() from None

    async def _receive(self) -> pb.ServerMessage | None:
        try:
            message = await self._call.read()
        except grpc.RpcError:
            raise await self._why_over() from None
        if not isinstance(message, pb.ServerMessage):  # EOF
            return None
        if message.error.reason == Reason.FENCED and not message.error.seq:
            self._fenced = codec.decode_error(message.error)
            self._call.cancel()
            raise self._fenced
        return message

    async def _why_over(self) -> OmniLoopError:
        """What the call ended with. gRPC says INTERNAL of a write that met the end, until the status has come that the
        server ended it with: taken for a lost connection, that would have a fenced client fence the newer one."""
        if self._fenced is not None:
            return self._fenced
        call = self._call
        for _ in range(STATUS_TRIES):
            code, trailers = await call.code(), await call.trailing_metadata()
            if code is not grpc.StatusCode.INTERNAL or any(key == codec.ERROR_KEY for key, _ in trailers or ()):
                break
            await asyncio.sleep(STATUS_S)
        if code is grpc.StatusCode.OK:
            return ServerUnavailable(f"{self._address} has ended the stream", reason=Reason.CLOSED)
        ended = grpc.aio.AioRpcError(code, await call.initial_metadata(), trailers, await call.details())
        return channel.typed(ended, self._address)
