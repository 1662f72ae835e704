"""Who calls, and how much of the server they may take: one gate for every port, and its gRPC interceptor.

A call without a right to be here ends before its handler is looked up and before a byte of its request is read. All
refusals of a token look alike: a missing one, a malformed one and a wrong one.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from hashlib import blake2b
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import Message

from ..clock import Clock, SystemClock
from ..endpoints import AccessConfig, QuotaConfig
from ..errors import Code, Exhausted, InvalidInput, OmniLoopError, Reason
from ..telemetry import metrics
from . import tls
from .refusal import Context, refuse
from .tokens import Tokens, read_tokens

#: Of the call that is being served; "" where anyone may call.
principal: ContextVar[str] = ContextVar("principal", default="")

HEADER = "authorization"
RETRY_MS = 1000.0  # after which a place that others hold may be free
_MAX_NAME = 100  # characters of a snapshot's name in the store

_refused = metrics.counter("omni_loop_calls_refused", "Calls refused before they were served", ("why",))


class Gate:
    """Tokens and quotas of one server; its methods belong to one event loop. Without tokens and certificates
    all callers are the principal ""."""

    def __init__(self, access: AccessConfig | None = None, clock: Clock | None = None) -> None:
        """Raises :class:`~omni_loop.errors.ConfigError` for a token file that cannot be used."""
        self.access = access or AccessConfig()
        self._tokens: Tokens | None = None if self.access.tokens is None else read_tokens(self.access.tokens)
        self._clock = clock or SystemClock()
        self._streams: dict[str, int] = {}
        self._buckets: dict[str, _Bucket] = {}
        self._turns: dict[str, asyncio.Lock] = {}

    @property
    def open(self) -> bool:
        """Whether there is nothing to check: no token, no certificate, no quota."""
        access = self.access
        named = self._tokens is not None or (access.tls is not None and access.tls.client_ca is not None)
        return not named and access.quota == QuotaConfig() and not access.quotas

    def credentials(self) -> grpc.ServerCredentials | None:
        """For gRPC ports; None: plaintext. Raises :class:`~omni_loop.errors.ConfigError`."""
        return None if self.access.tls is None else tls.credentials(self.access.tls)

    def authenticate(self, header: str | None, certificate: str = "") -> str:
        """The principal of an ``authorization`` header; where no tokens are set, that of the client's certificate
        (its common name, ``certificate``), or "".

        Raises:
            OmniLoopError: (UNAUTHENTICATED) tokens are set and the header holds none of them.
        """
        if self._tokens is None:
            return certificate
        found = self._tokens.whose(header)
        if found is None:
            _refused.inc(why="token")
            raise OmniLoopError(
                "no valid token: every call needs the header 'authorization: Bearer <token>'",
                code=Code.UNAUTHENTICATED,
                reason=Reason.BAD_TOKEN,
            )
        return found

    def quota(self, name: str) -> QuotaConfig:
        return self.access.quotas.get(name, self.access.quota)

    def charge(self, name: str, nbytes: int) -> None:
        """Count ``nbytes`` of a request. Raises :class:`~omni_loop.errors.Exhausted` (QUOTA), with the time after which
        one more is taken; what is refused is not counted."""
        rate = self.quota(name).bytes_per_s
        if rate is None:
            return
        bucket = self._buckets.get(name)
        if bucket is None:
            bucket = self._buckets[name] = _Bucket(rate, self._clock.now())
        wait_s = bucket.take(nbytes, self._clock.now())
        if wait_s > 0:
            raise self._over(name, "bytes", f"{rate} bytes a second", max(1e3 * wait_s, 1.0))

    @contextmanager
    def stream(self, name: str) -> Iterator[None]:
        """A stream is open inside. Raises :class:`~omni_loop.errors.Exhausted` (QUOTA) when it is one too many."""
        most, held = self.quota(name).streams, self._streams.get(name, 0)
        if most is not None and held >= most:
            raise self._over(name, "streams", f"{most} streams at a time")
        self._streams[name] = held + 1
        try:
            yield
        finally:
            left = self._streams[name] - 1
            if left:
                self._streams[name] = left
            else:
                del self._streams[name]

    @asynccontextmanager
    async def opening(self, name: str, count: Callable[[], int]) -> AsyncIterator[None]:
        """A session is being opened inside; ``count`` says how many the principal has. Its openings take turns, so
        that none is counted too late. Raises :class:`~omni_loop.errors.Exhausted` (QUOTA)."""
        most = self.quota(name).sessions
        if most is None:
            yield
            return
        async with self._turns.setdefault(name, asyncio.Lock()):
            if count() >= most:
                raise self._over(name, "sessions", f"{most} sessions at a time; close one")
            yield

    @asynccontextmanager
    async def keeping(self, name: str, kept: Callable[[], Awaitable[list[str]]], new: str) -> AsyncIterator[None]:
        """The snapshot stored as ``new`` is being written inside, beside those ``kept`` by everybody. One that is there
        may always be replaced. Raises :class:`~omni_loop.errors.Exhausted` (QUOTA)."""
        most = self.quota(name).snapshots
        if most is None:
            yield
            return
        async with self._turns.setdefault(name, asyncio.Lock()):
            mine = {one for one in await kept() if _is_of(name, one)} - {new}
            if len(mine) >= most:
                raise self._over(name, "snapshots", f"{most} snapshots; write over one of them")
            yield

    def _over(self, name: str, what: str, most: str, retry_after_ms: float = RETRY_MS) -> Exhausted:
        _refused.inc(why=what)
        who = f"{name!r}" if name else "a client"
        text = f"{who} may have {most}"
        return Exhausted(text, reason=Reason.QUOTA, retry_after_ms=0.0 if what == "snapshots" else retry_after_ms)


class _Bucket:
    """Fills with ``rate`` a second, up to one second's worth. What is larger than that is taken when it is full,
    and paid for afterwards."""

    def __init__(self, rate: int, now: float) -> None:
        self._rate, self._level, self._at = float(rate), float(rate), now

    def take(self, amount: int, now: float) -> float:
        """0: taken. Else seconds until it can be."""
        self._level = min(self._rate, self._level + (now - self._at) * self._rate)
        self._at = now
        short = min(float(amount), self._rate) - self._level
        if short > 0:
            return short / self._rate
        self._level -= amount
        return 0.0


def shelf(name: str) -> str:
    """What names of a principal's snapshots begin with in the store; nobody reaches another's."""
    return f"p{blake2b(name.encode('utf-8', 'surrogatepass'), digest_size=8).hexdigest()}." if name else ""


def _is_of(name: str, stored: str) -> bool:
    """Whether a snapshot is one that the principal named. The server's own copies of sessions are nobody's."""
    return stored.startswith(shelf(name)) and not stored.startswith("session-")


def stored_name(name: str, snapshot: str) -> str:
    """What a principal's ``snapshot`` is called in the store. Raises :class:`~omni_loop.errors.InvalidInput`."""
    before = shelf(name)
    if len(before) + len(snapshot) > _MAX_NAME:
        raise InvalidInput(
            f"the snapshot's name has {len(snapshot)} characters; at most {_MAX_NAME - len(before)} here"
        )
    return before + snapshot


class Interceptor(grpc.aio.ServerInterceptor):
    """The gate before every method of a gRPC server, health and reflection too. ``charged``: full names of streaming
    methods that charge their own requests, since they can answer each of them."""

    def __init__(self, gate: Gate, charged: frozenset[str] = frozenset()) -> None:
        self._gate = gate
        self._charged = charged
        self._by_certificate = gate.access.tokens is None

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        given = [value for key, value in handler_call_details.invocation_metadata or () if key == HEADER]
        header = given[0] if len(given) == 1 and isinstance(given[0], str) else None
        try:
            name = self._gate.authenticate(header)
        except OmniLoopError as error:
            return _refusal(error.with_traceback(None))  # whose frames hold the call, which would hold them
        handler = await continuation(handler_call_details)
        if handler is None:
            return None  # gRPC says that there is no such method
        return self._guarded(handler, name, handler_call_details.method in self._charged)

    def _guarded(self, handler: Any, name: str, charges: bool) -> grpc.RpcMethodHandler[Any, Any]:
        streams = handler.request_streaming or handler.response_streaming
        kind = f"{'stream' if handler.request_streaming else 'unary'}_"
        kind += "stream" if handler.response_streaming else "unary"
        behaviour = getattr(handler, kind)

        @asynccontextmanager
        async def entered(request: Any, context: Context) -> AsyncIterator[Any]:
            who = _common_name(context) if self._by_certificate else name
            principal.set(who)  # of this call's own task
            if not handler.request_streaming:
                self._gate.charge(who, _nbytes(request))
                counted = request
            else:
                counted = request if charges else self._counted(request, who)
            if not streams:
                yield counted
                return
            with self._gate.stream(who):
                yield counted

        guarded: grpc.RpcMethodHandler[Any, Any] = handler._replace(**{kind: _guard(behaviour, entered)})
        return guarded

    async def _counted(self, requests: AsyncIterator[Any], who: str) -> AsyncIterator[Any]:
        async for request in requests:
            self._gate.charge(who, _nbytes(request))
            yield request


def _guard(behaviour: Callable[..., Any], entered: Callable[..., Any]) -> Callable[..., Any]:
    """``behaviour`` inside of ``entered``, of the same kind: gRPC calls a coroutine otherwise than a generator."""
    if inspect.isasyncgenfunction(behaviour):

        async def replies(request: Any, context: Context) -> AsyncIterator[Any]:
            try:
                async with entered(request, context) as counted:
                    async for reply in behaviour(counted, context):
                        yield reply
                return
            except OmniLoopError as error:
                refusal = error
            await refuse(context, refusal)

        return replies

    async def reply(request: Any, context: Context) -> Any:
        try:
            async with entered(request, context) as counted:
                return await behaviour(counted, context)
        except OmniLoopError as error:
            refusal = error
        await refuse(context, refusal)

    return reply


def _refusal(error: OmniLoopError) -> grpc.RpcMethodHandler[Any, Any]:
    """Ends any call, whatever its method's kind, without reading from it."""

    async def end(requests: object, context: Context) -> None:
        await refuse(context, error)

    return grpc.stream_stream_rpc_method_handler(end)


def _nbytes(request: Message | bytes) -> int:
    return len(request) if isinstance(request, bytes) else request.ByteSize()


def _common_name(context: Context) -> str:
    """Of the client's certificate, which the handshake has checked; "" without one."""
    names = context.auth_context().get("x509_common_name") or ()
    return next((bytes(name).decode("utf-8", "replace") for name in names), "")
