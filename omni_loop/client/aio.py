"""The asyncio client. The same calls as :mod:`.sync`, awaited, and the bidirectional stream."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message
from numpy.typing import ArrayLike

from ..errors import OmniLoopError, ServerUnavailable
from ..types import SessionSpec, TickResult
from ..wire import loop_pb2 as pb
from . import arguments, book, channel, watch
from .credentials import Tls, open_channel_async
from .resume import ResumingStream
from .stream import SessionStream
from .watch import OnPart

log = logging.getLogger(__name__)

R = TypeVar("R", bound=Message)


class AsyncClient:
    """See :class:`~omni_loop.client.sync.Client`. Belongs to the event loop it was made in."""

    def __init__(
        self, address: str, timeout_s: float = channel.TIMEOUT_S, token: str | None = None, tls: Tls | None = None
    ) -> None:
        self.address = arguments.address("address", address)
        self._timeout_s = arguments.seconds("timeout_s", timeout_s)
        self.channel = open_channel_async(self.address, token, tls)
        self._calls: dict[str, Any] = {}

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends the connection; sessions stay on the server until closed or expired."""
        await self.channel.close()

    async def info(self) -> book.ServerInfo:
        """What the server serves, and its limits."""
        return book.read_info(await self.call("GetServerInfo", pb.GetServerInfoRequest(), pb.GetServerInfoReply))

    async def open(
        self,
        pipeline: str,
        *,
        prompt: str = "",
        seed: int | None = None,
        keys: Sequence[str] = (),
        options: Mapping[str, Any] | None = None,
        spec_digest: str = "",
        image_encoding: str = "raw",
    ) -> AsyncSession:
        """See :meth:`Client.open <omni_loop.client.sync.Client.open>`."""
        request = book.open_request(pipeline, prompt, seed, keys, options or {}, spec_digest, image_encoding)
        reply = await self.call("OpenSession", request, pb.OpenSessionReply)
        return AsyncSession(self, book.Book(reply, image_encoding))

    async def restore(self, name: str, *, image_encoding: str = "raw") -> AsyncSession:
        """See :meth:`Client.restore <omni_loop.client.sync.Client.restore>`."""
        request = book.restore_request(name, image_encoding)
        return AsyncSession(self, book.Book(await self.call("Restore", request, pb.OpenSessionReply), image_encoding))

    async def sessions(self, *mine: AsyncSession) -> book.SessionList:
        """How many sessions are open, and details of those of ``mine`` that are."""
        request = book.list_request(session._book for session in mine)
        return book.read_list(await self.call("ListSessions", request, pb.ListSessionsReply))

    async def call(self, name: str, request: Message, reply: type[R]) -> R:
        """One unary call, with the server's typed errors."""
        call = self._calls.get(name)
        if call is None:
            call = self._calls[name] = self.channel.unary_unary(
                channel.method(name),
                request_serializer=type(request).SerializeToString,
                response_deserializer=reply.FromString,
            )
        try:
            answer: R | None = await call(request, timeout=self._timeout_s)
        except grpc.RpcError as error:
            raise channel.typed(error, self.address) from None
        if answer is None:  # what grpc.aio makes of bytes that do not parse: a bad network spoilt them
            raise ServerUnavailable(f"what {self.address} answered is no {reply.DESCRIPTOR.full_name}")
        return answer

    async def watch(self, watched: watch.Watch) -> TickResult:
        """One request on a stream of its own, with the server's typed errors."""
        call: Any = self.channel.stream_stream(
            channel.method("Stream"),
            request_serializer=pb.ClientMessage.SerializeToString,
            response_deserializer=pb.ServerMessage.FromString,
        )(timeout=self._timeout_s)
        try:
            for sent in watched.messages:
                await call.write(sent)
            await call.done_writing()
            while isinstance(message := await call.read(), pb.ServerMessage):
                if (answer := watched.hear(message)) is not None:
                    return answer
        except grpc.RpcError as error:
            raise channel.typed(error, self.address) from None
        finally:
            call.cancel()
        raise watched.ended(self.address)


class AsyncSession:
    """See :class:`~omni_loop.client.sync.Session`, which documents every call."""

    def __init__(self, client: AsyncClient, book_: book.Book) -> None:
        self._client = client
        self._book = book_
        self._closed = False

    async def __aenter__(self) -> AsyncSession:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None
    ) -> None:
        try:
            await self.close()
        except OmniLoopError as error:
            if kind is None:
                raise
            # The error under way is the one to see; the server frees the session when it has been silent.
            log.warning("closing session %s: %s", self.id, error.text)

    @property
    def id(self) -> str:
        return self._book.ref.session

    @property
    def spec(self) -> SessionSpec:
        return self._book.spec

    @property
    def keys(self) -> tuple[str, ...]:
        return self._book.keys

    @property
    def epoch(self) -> int:
        return self._book.epoch

    @property
    def seed(self) -> int:
        return self._book.seed

    @property
    def start_step(self) -> int:
        return self._book.start_step

    async def infer(
        self,
        arrays: Mapping[str, ArrayLike],
        step: int,
        *,
        executed: ArrayLike | None = None,
        frames: int = 0,
        deadline_ms: float = 0.0,
        captured_ns: int = 0,
        supersede: bool = False,
        executed_through: int | None = None,
        on_part: OnPart | None = None,
    ) -> TickResult:
        observation = self._book.infer(
            arrays, step, executed, frames, deadline_ms, captured_ns, supersede, executed_through
        )
        if on_part is not None:
            return await self._client.watch(watch.Watch(self._book, observation, on_part))
        request = pb.InferRequest(session=self._book.ref, observation=observation)
        return self._book.read(await self._client.call("Infer", request, pb.TickReply))

    async def predict(
        self,
        actions: ArrayLike | None = None,
        *,
        steps: int = 0,
        deadline_ms: float = 0.0,
        on_part: OnPart | None = None,
    ) -> TickResult:
        request = self._book.predict(actions, steps, deadline_ms)
        if on_part is not None:
            return await self._client.watch(watch.Watch(self._book, request, on_part))
        return self._book.read(await self._client.call("Predict", request, pb.TickReply))

    async def recondition(
        self,
        arrays: Mapping[str, ArrayLike],
        *,
        executed: ArrayLike | None = None,
        first_step: int = 0,
        deadline_ms: float = 0.0,
    ) -> TickResult:
        request = self._book.recondition(arrays, executed, first_step, deadline_ms)
        return self._book.read(await self._client.call("Recondition", request, pb.TickReply))

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
    ) -> TickResult:
        request = self._book.plan(horizon, candidates, iterations, method, budget_ms, goal, init, deadline_ms)
        return self._book.read(await self._client.call("Plan", request, pb.TickReply))

    async def fork(self, *, seed: int | None = None) -> AsyncSession:
        reply = await self._client.call("Fork", self._book.fork(seed), pb.OpenSessionReply)
        return AsyncSession(self._client, self._book.forked(reply))

    async def rewind(self, step: int) -> int:
        return self._book.read_rewind(await self._client.call("Rewind", self._book.rewind(step), pb.RewindReply))

    async def snapshot(self, name: str) -> int:
        return (await self._client.call("Snapshot", self._book.snapshot(name), pb.SnapshotReply)).bytes

    async def reset(self, *, seed: int | None = None, prompt: str | None = None) -> int:
        reply = await self._client.call("Reset", self._book.reset(seed, prompt), pb.ResetReply)
        return self._book.read_reset(reply)

    async def close(self) -> None:
        if not self._closed:
            await self._client.call("Close", pb.CloseRequest(session=self._book.ref), pb.CloseReply)
            self._closed = True

    @asynccontextmanager
    async def stream(self) -> AsyncIterator[SessionStream]:
        """Attach a :class:`~omni_loop.client.stream.SessionStream` to the session; a newer one fences it."""
        stream = SessionStream(self._client.channel, self._client.address, self._book)
        await stream.attach()
        try:
            yield stream
        finally:
            stream.cancel()

    @asynccontextmanager
    async def resuming(self, *, give_up_s: float = 60.0, stall_s: float | None = None) -> AsyncIterator[ResumingStream]:
        """Attach a :class:`~omni_loop.client.resume.ResumingStream`, which outlives its connections."""
        client, kept = self._client, (await self._client.info()).limits.replies
        stream = ResumingStream(
            client.channel, client.address, self._book, give_up_s=give_up_s, stall_s=stall_s, window=max(kept, 1)
        )
        try:
            await stream.attach()
            yield stream
        finally:
            await stream.close()
