"""LeRobot's AsyncInference over gRPC, for its own unmodified ``RobotClient``.

Source: ``lerobot/async_inference/robot_client.py`` and ``lerobot/transport/services.proto`` of
https://github.com/huggingface/lerobot (0.6.1). The protocol knows no sessions: a robot is its connection, and what it
was told ends with it. Unlike LeRobot's own server this one neither unpickles (:mod:`.pickles`) nor loads what a client
names, computes every newest observation (also one that is like the last), and answers a failed one with its error.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

from ...errors import ConfigError, InvalidInput, Reason, ServerUnavailable, StateError, nearest
from ...types import SessionSpec
from ..auth import Gate, Interceptor, principal
from ..ports import bound
from ..refusal import Context, public, refuse
from . import lerobot_pb2 as pb
from .robots import Robot, Setup, choose
from .schema import Schema
from .seat import Seat

if TYPE_CHECKING:
    from ...endpoints import LerobotEndpoint
    from ..service import LoopService

SERVICE = "transport.AsyncInference"
WAIT_S = 2.0  # of GetActions; an empty answer makes the client ask again at once
_UNKNOWN_WAIT_S = 0.5  # before a stranger's GetActions is refused: its client asks again at once, too
_PIECE = 4 << 20  # LeRobot's client sends pieces of 2 MiB and takes no message above 4
_PREFIX = "observation."

M = TypeVar("M", bound=Message)


async def start(config: LerobotEndpoint, service: LoopService, gate: Gate | None = None) -> LerobotServer:
    """Listen. The pipelines are loaded. ``gate`` None lets everybody in.

    Raises:
        ConfigError: the list names a pipeline that is not served, or one without actions; keys that none has.
        ServerUnavailable: the port is busy.
    """
    server = LerobotServer(config, service, gate or Gate())
    await server.start()
    return server


class LerobotServer:
    """One port. Robots by peer: their connection, of which their calls carry the address."""

    name = "lerobot"

    def __init__(self, config: LerobotEndpoint, service: LoopService, gate: Gate) -> None:
        self._config, self._service, self._gate = config, service, gate
        self._schemas = {model: _schema(config, service, model) for model in config.models}
        known = {s.name for schema in self._schemas.values() for s in schema.spec.observations}
        for name in config.keys.values():
            if name not in known:
                raise ConfigError(f"lerobot.keys: no pipeline takes an observation {name!r}.{nearest(name, known)}")
        self._robots: dict[str, Robot] = {}
        self._leases: dict[str, asyncio.TimerHandle] = {}
        self._calls: dict[str, int] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._draining = False
        self._server: grpc.aio.Server | None = None
        self.address = ""

    async def start(self) -> None:
        options = [
            ("grpc.so_reuseport", 0),
            ("grpc.max_receive_message_length", _PIECE),
            ("grpc.max_send_message_length", _PIECE),
        ]
        interceptors = [] if self._gate.open else [Interceptor(self._gate)]

        def make() -> grpc.aio.Server:
            return grpc.aio.server(interceptors=interceptors, options=options)

        host, port = self._config.host, self._config.port
        self._server, self.address = bound(make, self._gate.credentials(), host, port, self.name)
        self._server.add_generic_rpc_handlers((self._handler(),))
        await self._server.start()

    async def stop(self, grace_s: float) -> None:
        """Take nothing new; what is computed is still fetched within ``grace_s``."""
        self._draining = True
        for lease in self._leases.values():
            lease.cancel()
        if self._server is not None:
            await self._server.stop(grace_s)
        robots = [*self._robots.values()]
        self._robots.clear()
        await asyncio.gather(*(robot.close() for robot in robots), *self._closing)

    # Calls ------------------------------------------------------------------------------------------------

    def _handler(self) -> grpc.GenericRpcHandler:
        table: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Ready": self._unary(self._ready),
            "SendPolicyInstructions": self._unary(self._instructions),
            "GetActions": self._unary(self._actions),
            "SendObservations": grpc.stream_unary_rpc_method_handler(self._observations),
        }
        return grpc.method_handlers_generic_handler(SERVICE, table)

    def _unary(self, method: Callable[[bytes, str], Awaitable[Message]]) -> grpc.RpcMethodHandler[bytes, bytes]:
        async def call(raw: bytes, context: Context) -> bytes:
            return await self._guarded(context, method(raw, context.peer()))

        return grpc.unary_unary_rpc_method_handler(call)

    async def _observations(self, pieces: AsyncIterator[bytes], context: Context) -> bytes:
        return await self._guarded(context, self._observe(pieces, context.peer()))

    async def _guarded(self, context: Context, work: Awaitable[Message]) -> bytes:
        """A call of a robot; its lease runs while there is none."""
        peer = context.peer()
        self._hold(peer)
        try:
            return (await work).SerializeToString()
        except Exception as error:
            refusal = public(error, "AsyncInference")
        finally:
            self._release(peer)
        await refuse(context, refusal)

    async def _ready(self, raw: bytes, peer: str) -> Message:
        """A robot begins: nothing of what its connection did before is left."""
        if self._draining:
            raise ServerUnavailable("the server is about to stop", reason=Reason.DRAINING)
        await self._forget(peer)
        return pb.Empty()

    async def _instructions(self, raw: bytes, peer: str) -> Message:
        """What the robot will send is checked against the pipeline, and its session opened, before it moves."""
        setup = Setup.read(_parsed(pb.PolicySetup, raw).data, self._service)
        pipeline = choose(self._config.models, setup.model)
        schema = self._schemas[setup.model]
        keys = schema.keys(setup.names)
        owner = principal.get()
        seat = Seat(self._service, pipeline, owner, self._gate)
        await seat.open(keys)
        await self._forget(peer)
        self._robots[peer] = Robot(self._service, setup, schema, seat)
        return pb.Empty()

    async def _observe(self, pieces: AsyncIterator[bytes], peer: str) -> Message:
        robot = self._robot(peer)
        robot.observe(await self._joined(pieces))
        return pb.Empty()

    async def _actions(self, raw: bytes, peer: str) -> Message:
        if peer not in self._robots:
            await asyncio.sleep(_UNKNOWN_WAIT_S)
        return pb.Actions(data=await self._robot(peer).answer(WAIT_S))

    async def _joined(self, pieces: AsyncIterator[bytes]) -> bytes:
        """One observation's bytes. Raises :class:`InvalidInput` for pieces in another order, or too many bytes."""
        parts: list[bytes] = []
        size, state = 0, pb.TRANSFER_UNKNOWN
        async for raw in pieces:
            piece = _parsed(pb.Observation, raw)
            begun = state in (pb.TRANSFER_BEGIN, pb.TRANSFER_MIDDLE)
            if piece.transfer_state not in (_NEXT if begun else _FIRST) or state == pb.TRANSFER_END:
                raise InvalidInput("an observation comes as one END, or as BEGIN, MIDDLE... and END")
            state = piece.transfer_state
            size += len(piece.data)
            self._service.limits.check_message(size)
            parts.append(piece.data)
        if state != pb.TRANSFER_END:
            raise InvalidInput("the observation ends before its last piece")
        return parts[0] if len(parts) == 1 else b"".join(parts)

    # Robots -----------------------------------------------------------------------------------------------

    def _robot(self, peer: str) -> Robot:
        if peer not in self._robots:
            raise StateError(
                "this connection has no session: call Ready and SendPolicyInstructions first, also after a lost "
                "connection, with which what the session knew is gone",
                reason=Reason.SESSION_LOST,
            )
        return self._robots[peer]

    async def _forget(self, peer: str) -> None:
        robot = self._robots.pop(peer, None)
        if robot is not None:
            await robot.close()

    def _hold(self, peer: str) -> None:
        self._calls[peer] = self._calls.get(peer, 0) + 1
        lease = self._leases.pop(peer, None)
        if lease is not None:
            lease.cancel()

    def _release(self, peer: str) -> None:
        """With the last call of a robot that is gone its lease begins: a client asks for actions all the time."""
        self._calls[peer] -= 1
        if self._calls[peer]:
            return
        del self._calls[peer]
        if peer in self._robots and not self._draining:
            loop = asyncio.get_running_loop()
            self._leases[peer] = loop.call_later(self._service.limits.grace_s, self._expire, peer)

    def _expire(self, peer: str) -> None:
        self._leases.pop(peer, None)
        task = asyncio.create_task(self._forget(peer))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


_FIRST = (pb.TRANSFER_BEGIN, pb.TRANSFER_END)
_NEXT = (pb.TRANSFER_MIDDLE, pb.TRANSFER_END)


def _parsed(kind: type[M], raw: bytes) -> M:
    try:
        return kind.FromString(raw)
    except DecodeError:
        raise InvalidInput(f"the bytes are no {kind.DESCRIPTOR.name}") from None


def _schema(config: LerobotEndpoint, service: LoopService, model: str) -> Schema:
    spec = _spec(config.models[model], model, service)
    known = [s.name for s in spec.observations]
    given = {ours: theirs for theirs, ours in config.keys.items() if ours in known}
    return Schema(spec, {name: _PREFIX + name for name in known} | given, reshape=True)


def _spec(pipeline: str, model: str, service: LoopService) -> SessionSpec:
    specs = service.core.specs
    if pipeline not in specs:
        text = f"lerobot.models: {model!r} is to be {pipeline!r}, which is not served."
        raise ConfigError(text + nearest(pipeline, specs))
    spec = specs[pipeline]
    if "infer" not in spec.ops:
        raise ConfigError(f"lerobot.models: pipeline {pipeline!r} answers no observation with actions")
    return spec
