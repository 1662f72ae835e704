"""The gRPC service over the orchestrator: bytes in, checked values to the orchestrator, bytes out.

One observation: raw bytes -> :mod:`..wire.codec` -> ``Orchestrator.tick`` -> codec -> bytes. Handlers take raw
bytes, so that a message that does not parse is answered like any other bad input.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message

from ..errors import InvalidInput, OmniLoopError, Reason, ServerUnavailable, UnknownSession
from ..loop.request import KEPT, SessionInfo, SessionSummary
from ..types import SessionSpec
from ..wire import codec
from ..wire import loop_pb2 as pb
from .auth import Gate, principal, stored_name
from .refusal import Context, public, refuse
from .requests import Ask, Decoder
from .stream import Connection

if TYPE_CHECKING:
    from ..loop.orchestrator import Orchestrator

SERVICE = pb.DESCRIPTOR.services_by_name["Loop"].full_name

M = TypeVar("M", bound=Message)


@dataclass(frozen=True, slots=True)
class Call:
    """A request's size, and when its bytes came (of ``time.perf_counter``)."""

    nbytes: int
    began: float


class LoopService:
    """``omni_loop.v1.Loop``. Before :attr:`orchestrator` is set every session call is refused as not ready. ``gate``:
    whose quotas are kept; None: there are none."""

    def __init__(self, limits: codec.Limits, gate: Gate | None = None) -> None:
        self.limits = limits
        self.gate = gate or Gate()
        self.decoder = Decoder(limits)
        self.orchestrator: Orchestrator | None = None
        self.draining = False
        self.streams: set[Connection] = set()  # attached ones
        self.turnings: dict[str, set[asyncio.Task[None]]] = {}  # resets and rewinds under way on streams, by session

    def handler(self) -> grpc.GenericRpcHandler:
        """What a ``grpc.aio`` server adds."""
        table: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "GetServerInfo": self._unary(pb.GetServerInfoRequest, self._server_info),
            "OpenSession": self._unary(pb.OpenSessionRequest, self._open),
            "Infer": self._unary(pb.InferRequest, self._infer),
            "Predict": self._unary(pb.PredictRequest, self._tick),
            "Recondition": self._unary(pb.ReconditionRequest, self._tick),
            "Plan": self._unary(pb.PlanRequest, self._tick),
            "Reset": self._unary(pb.ResetRequest, self._reset),
            "Rewind": self._unary(pb.RewindRequest, self._rewind),
            "Fork": self._unary(pb.ForkRequest, self._fork),
            "Snapshot": self._unary(pb.SnapshotRequest, self._snapshot),
            "Restore": self._unary(pb.RestoreRequest, self._restore),
            "ListSessions": self._unary(pb.ListSessionsRequest, self._list_sessions),
            "Close": self._unary(pb.CloseRequest, self._close),
            "Stream": grpc.stream_stream_rpc_method_handler(self._stream),
        }
        return grpc.method_handlers_generic_handler(SERVICE, table)

    def drain(self) -> None:
        """Refuse new sessions; streams are told, and end when their ticks in flight are answered."""
        self.draining = True
        for stream in tuple(self.streams):
            stream.drain()

    async def gone(self, grace_s: float) -> None:
        """Once nothing of any stream runs: gRPC forgets a call that is cancelled before its handler has ended. Resets
        and rewinds that take longer than ``grace_s`` are the orchestrator's to end."""
        await asyncio.gather(*(stream.gone.wait() for stream in self.streams))
        if turnings := [task for tasks in self.turnings.values() for task in tasks]:
            await asyncio.wait(turnings, timeout=grace_s)

    def close(self) -> None:
        self.decoder.close()

    @property
    def core(self) -> Orchestrator:
        if self.orchestrator is None:
            raise ServerUnavailable("the server is still loading; ask again in a moment", reason=Reason.BUSY)
        return self.orchestrator

    # Shared with streams ---------------------------------------------------------------------------------

    async def info(self, ref: pb.SessionRef) -> SessionInfo:
        """The session, for the principal that opened it and holds its token: every call on one begins here. Raises
        :class:`UnknownSession`."""
        core, owner = self.core, principal.get()
        await core.recall(ref.session, ref.resume_token, owner)
        return core.session(ref.session, ref.resume_token, owner)

    def epoch(self, ref: pb.SessionRef) -> int:
        """Present epoch of the session; 0 for an unknown one."""
        try:
            return self.core.session(ref.session, ref.resume_token, principal.get()).epoch
        except OmniLoopError:
            return 0

    async def reset(self, request: pb.ResetRequest, info: SessionInfo) -> pb.ResetReply:
        prompt = request.prompt if request.HasField("prompt") else None
        if prompt is not None:
            self.limits.check_prompt(prompt)
        seed = request.seed if request.HasField("seed") else None
        return pb.ResetReply(epoch=await self.core.reset(info.id, info.token, seed, prompt))

    async def rewind(self, request: pb.RewindRequest, info: SessionInfo) -> pb.RewindReply:
        codec.check_rewind(request)
        epoch, step = await self.core.rewind(info.id, info.token, request.step)
        return pb.RewindReply(epoch=epoch, step=step)

    # Calls -----------------------------------------------------------------------------------------------

    def _unary(
        self, kind: type[M], method: Callable[[M, Call], Awaitable[Message]]
    ) -> grpc.RpcMethodHandler[bytes, bytes]:
        async def call(raw: bytes, context: Context) -> bytes:
            message: M | None = None
            received = Call(len(raw), time.perf_counter())
            try:
                message = await self.decoder.parse(kind, raw)
                reply = await method(message, received)
                return reply.SerializeToString(deterministic=True)
            except Exception as error:
                refusal = public(error, kind.DESCRIPTOR.name.removesuffix("Request"))
            ref = getattr(message, "session", None)
            await refuse(context, refusal, self.epoch(ref) if isinstance(ref, pb.SessionRef) else 0)

        return grpc.unary_unary_rpc_method_handler(call)

    async def _server_info(self, request: pb.GetServerInfoRequest, call: Call) -> pb.GetServerInfoReply:
        core = self.orchestrator
        return pb.GetServerInfoReply(
            version=_version(),
            protocol=pb.DESCRIPTOR.package,
            pipelines=[] if core is None else [codec.encode_spec(spec) for spec in core.specs.values()],
            limits=codec.encode_limits(self.limits),
            ready=core is not None and core.ready and not self.draining,
        )

    async def _open(self, request: pb.OpenSessionRequest, call: Call) -> pb.OpenSessionReply:
        self._refuse_when_draining()
        codec.check_open(request, self.limits)
        _check_digest(request, self.core.specs)
        seed = request.seed if request.HasField("seed") else None
        keys, options = tuple(request.observation_keys), dict(request.options)
        async with self._opening() as owner:
            return _opened(await self.core.open(request.pipeline, seed, request.prompt, keys, options, owner=owner))

    async def _fork(self, request: pb.ForkRequest, call: Call) -> pb.OpenSessionReply:
        self._refuse_when_draining()
        info = await self.info(request.session)
        seed = request.seed if request.HasField("seed") else None
        async with self._opening():
            return _opened(await self.core.fork(info.id, info.token, seed))

    async def _restore(self, request: pb.RestoreRequest, call: Call) -> pb.OpenSessionReply:
        self._refuse_when_draining()
        name = codec.check_snapshot_name(request.name)
        async with self._opening() as owner:
            with _shown_as(name, kept := stored_name(owner, name)):
                return _opened(await self.core.restore(kept, owner=owner))

    async def _snapshot(self, request: pb.SnapshotRequest, call: Call) -> pb.SnapshotReply:
        info = await self.info(request.session)
        name, owner = codec.check_snapshot_name(request.name), principal.get()
        with _shown_as(name, kept := stored_name(owner, name)):
            async with self.gate.keeping(owner, self.core.snapshots, kept):
                written = await self.core.snapshot(info.id, info.token, kept)
        return pb.SnapshotReply(bytes=written)

    async def _list_sessions(self, request: pb.ListSessionsRequest, call: Call) -> pb.ListSessionsReply:
        codec.check_list(request, self.limits)
        summaries = {summary.id: summary for summary in self.core.list_sessions()}
        shown = [summaries[ref.session] for ref in request.sessions if self._owns(ref) and ref.session in summaries]
        return pb.ListSessionsReply(
            counts=Counter(summary.pipeline for summary in summaries.values()),
            sessions=[_summary(summary) for summary in shown],
        )

    def _owns(self, ref: pb.SessionRef) -> bool:
        try:
            self.core.session(ref.session, ref.resume_token, principal.get())
        except UnknownSession:
            return False
        return True

    @asynccontextmanager
    async def _opening(self) -> AsyncIterator[str]:
        """The principal, which opens a session inside of its quota."""
        core, owner = self.core, principal.get()
        async with self.gate.opening(owner, lambda: core.count(owner)):
            yield owner

    def _refuse_when_draining(self) -> None:
        if self.draining:
            raise ServerUnavailable("the server is about to stop and opens no sessions", reason=Reason.DRAINING)

    async def _answer(self, info: SessionInfo, message: Ask, call: Call) -> pb.TickReply:
        request = await self.decoder.tick(info, message, call.nbytes, call.began)
        # Kept: a caller that goes away finds the answer when it asks for the seq again.
        return await self.decoder.encode(await self.core.tick(request, keep=request.op in KEPT))

    async def _infer(self, request: pb.InferRequest, call: Call) -> pb.TickReply:
        return await self._answer(await self.info(request.session), request.observation, call)

    async def _tick(
        self, request: pb.PredictRequest | pb.ReconditionRequest | pb.PlanRequest, call: Call
    ) -> pb.TickReply:
        return await self._answer(await self.info(request.session), request, call)

    async def _reset(self, request: pb.ResetRequest, call: Call) -> pb.ResetReply:
        return await self.reset(request, await self.info(request.session))

    async def _rewind(self, request: pb.RewindRequest, call: Call) -> pb.RewindReply:
        return await self.rewind(request, await self.info(request.session))

    async def _close(self, request: pb.CloseRequest, call: Call) -> pb.CloseReply:
        info = await self.info(request.session)
        await self.core.close(info.id, info.token)
        return pb.CloseReply()

    async def _stream(self, requests: AsyncIterable[bytes], context: Context) -> None:
        connection = Connection(self, context)
        try:
            await connection.run(aiter(requests))
            return
        except Exception as error:
            refusal = public(error, "Stream")
        await refuse(context, refusal, connection.epoch)


@contextmanager
def _shown_as(name: str, kept: str) -> Iterator[None]:
    """Errors about the snapshot ``kept`` name it as its owner does."""
    try:
        yield
    except OmniLoopError as error:
        error.text = error.text.replace(kept, name)
        raise


def _check_digest(request: pb.OpenSessionRequest, specs: Mapping[str, SessionSpec]) -> None:
    spec = specs.get(request.pipeline)  # an unknown one is the orchestrator's to refuse
    if spec is not None and request.spec_digest not in ("", spec.digest):
        raise InvalidInput(
            f"pipeline {spec.pipeline!r} has another spec here (digest {spec.digest[:12]}...) than the client expects",
            reason=Reason.BAD_SPEC,
        )


def _opened(info: SessionInfo) -> pb.OpenSessionReply:
    return pb.OpenSessionReply(
        session=info.id,
        resume_token=info.token,
        epoch=info.epoch,
        seed=info.seed,
        spec=codec.encode_spec(info.spec),
        observation_keys=info.observation_keys,
        last_seq=info.last_seq,
        step=info.step,
    )


def _summary(summary: SessionSummary) -> pb.SessionSummary:
    return pb.SessionSummary(
        session=summary.id,
        pipeline=summary.pipeline,
        phase=summary.phase,
        epoch=summary.epoch,
        step=summary.step,
        last_seq=summary.last_seq,
    )


def _version() -> str:
    try:
        return metadata.version("omni-loop")
    except metadata.PackageNotFoundError:
        return "unknown"
