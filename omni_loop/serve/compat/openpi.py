"""openpi's websocket protocol: metadata on connecting, then one observation in, one answer out.

Sources: ``openpi_client/websocket_client_policy.py`` and ``openpi/serving/websocket_policy_server.py`` of
https://github.com/Physical-Intelligence/openpi. An error is a text frame, which that client raises; the connection
stays open and the next observation is served. Inference never blocks the event loop, so that pings of the client are
answered while a first one takes its time. A connection's sessions end with it: this client never comes back.
"""

from __future__ import annotations

import asyncio
import http
import logging
import time
from typing import TYPE_CHECKING, Any

from ...errors import Code, ConfigError, InvalidInput, OmniLoopError, Reason, ServerUnavailable, nearest
from ...types import SessionSpec
from .. import tls
from ..auth import Gate
from ..ports import address, why_not
from ..refusal import public
from . import msgpack
from .dialects import DIALECTS, RESET, Asked, Openpi
from .gate import bearer, common_name
from .schema import Schema
from .seat import Seat

if TYPE_CHECKING:
    from websockets.asyncio.server import Server, ServerConnection
    from websockets.http11 import Request, Response

    from ...endpoints import OpenpiEndpoint
    from ..service import LoopService

_log = logging.getLogger(__name__)
_HEALTH = "/healthz"
_PING_S, _PONG_S = 20.0, 60.0
_GOING_AWAY, _TRY_LATER = 1001, 1013
MAX_SESSIONS = 16  # of one connection, under the client's names for them


async def start(config: OpenpiEndpoint, service: LoopService, gate: Gate | None = None) -> OpenpiServer:
    """Listen. The pipeline is loaded: whoever connects is served. ``gate`` None lets everybody in.

    Raises:
        ConfigError: no such pipeline, keys it does not have, one without actions. ServerUnavailable: the port is busy.
    """
    spec = _spec(config, service)
    server = OpenpiServer(config, service, gate or Gate(), spec)
    await server.start()
    return server


def _spec(config: OpenpiEndpoint, service: LoopService) -> SessionSpec:
    specs = service.core.specs
    if config.pipeline not in specs:
        raise ConfigError(f"openpi: no pipeline {config.pipeline!r} is served.{nearest(config.pipeline, specs)}")
    spec = specs[config.pipeline]
    if "infer" not in spec.ops:
        raise ConfigError(f"openpi: pipeline {config.pipeline!r} answers no observation with actions")
    return spec


def names_of(spec: SessionSpec, keys: dict[str, str]) -> dict[str, str]:
    """The client's name for every observation of the pipeline: as ``keys`` says, else with ``/`` for ``.``."""
    given = {ours: theirs for theirs, ours in keys.items()}
    return {s.name: s.name.replace(".", "/") for s in spec.observations} | given


class OpenpiServer:
    """One port for one pipeline."""

    name = "openpi"

    def __init__(self, config: OpenpiEndpoint, service: LoopService, gate: Gate, spec: SessionSpec) -> None:
        self.config, self.service, self.gate, self.spec = config, service, gate, spec
        self.dialect = DIALECTS[config.dialect]
        self.schema = Schema(spec, names_of(spec, dict(config.keys)))
        self.metadata = msgpack.pack(self.dialect.metadata(spec, config.metadata))
        self.steps = config.steps_per_infer or spec.execution_horizon
        self.address = ""
        self.draining = False
        self._server: Server | None = None
        self._visits: set[Visit] = set()

    async def start(self) -> None:
        from websockets.asyncio.server import serve

        access = self.gate.access

        try:
            self._server = await serve(
                self._visit,
                self.config.host,
                self.config.port,
                process_request=self._admit,
                compression=None,
                max_size=self.service.limits.max_message_bytes,
                ping_interval=_PING_S,
                ping_timeout=_PONG_S,
                server_header=None,
                ssl=None if access.tls is None else tls.context(access.tls),
            )
        except OSError as error:
            raise why_not(error, self.config.host, self.config.port, self.name) from error
        self.address = address(self._server.sockets[0])

    async def stop(self, grace_s: float) -> None:
        """Take nobody new; what is computed is still answered within ``grace_s``."""
        self.draining = True
        if self._server is None:
            return
        self._server.close(close_connections=False)
        visits = tuple(self._visits)
        for visit in visits:
            visit.drain()
        if visits:
            _, late = await asyncio.wait([visit.task for visit in visits], timeout=grace_s)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        await self._server.wait_closed()

    def _admit(self, connection: ServerConnection, request: Request) -> Response | None:
        """Health, and who may come in; None: they may."""
        if request.path.partition("?")[0] == _HEALTH:
            ready = self.service.core.ready and not self.draining
            return connection.respond(*((http.HTTPStatus.OK, "OK\n") if ready else (_DOWN, "not ready\n")))
        if self.draining:
            return connection.respond(_DOWN, "the server is about to stop\n")
        try:
            self._principal(connection, request)
        except OmniLoopError as error:
            status = http.HTTPStatus.UNAUTHORIZED if error.code is Code.UNAUTHENTICATED else _DOWN
            return connection.respond(status, f"{error.text}\n")
        return None

    def _principal(self, connection: ServerConnection, request: Request) -> str:
        certificate = common_name(connection.transport.get_extra_info("peercert"))
        return self.gate.authenticate(bearer(request.headers.get("Authorization")), certificate)

    async def _visit(self, connection: ServerConnection) -> None:
        from websockets.exceptions import ConnectionClosed

        assert connection.request is not None
        try:
            principal = self._principal(connection, connection.request)
            with self.gate.stream(principal):
                visit = Visit(self, connection, principal)
                self._visits.add(visit)
                try:
                    await visit.run()
                finally:
                    self._visits.discard(visit)
        except ConnectionClosed:
            return
        except OmniLoopError as error:
            await connection.close(_TRY_LATER, error.text[:120])  # a reason has 123 bytes


_DOWN = http.HTTPStatus.SERVICE_UNAVAILABLE


class Visit:
    """One connection and its sessions."""

    def __init__(self, server: OpenpiServer, connection: ServerConnection, principal: str) -> None:
        self._server, self._connection, self._principal = server, connection, principal
        self._dialect: Openpi = server.dialect
        self._seats: dict[str, Place] = {}
        self._busy = False
        self._previous_ms: float | None = None
        task = asyncio.current_task()
        assert task is not None
        self.task: asyncio.Task[Any] = task

    def drain(self) -> None:
        """End now, or with the answer that is being made."""
        if not self._busy:
            self.task.cancel()

    async def run(self) -> None:
        connection = self._connection
        gone = asyncio.create_task(connection.wait_closed())
        # Nobody hears an answer that is still being made: the tick ends within a denoising step.
        gone.add_done_callback(lambda _: self.task.cancel())
        try:
            await connection.send(self._server.metadata)
            while not self._server.draining:
                message = await connection.recv()
                self._busy = True
                await connection.send(await self._answer(message, time.perf_counter()))
                self._busy = False
            await connection.close(_GOING_AWAY)
        except asyncio.CancelledError:
            if not (gone.done() or self._server.draining):
                raise
            if not gone.done():
                await connection.close(_GOING_AWAY)
        finally:
            gone.cancel()
            for place in tuple(self._seats.values()):
                await place.seat.close()

    async def _answer(self, message: str | bytes, began: float) -> str | bytes:
        """The frame to send: an error is text."""
        try:
            return await self._act(self._read(message), began)
        except Exception as error:
            return public(error, "Infer").text

    def _read(self, message: str | bytes) -> Asked:
        self._server.gate.charge(self._principal, len(message))
        if isinstance(message, str):
            raise InvalidInput("an observation comes as a binary frame of msgpack, not as text")
        return self._dialect.read(msgpack.unpack(message, self._server.service.limits))

    async def _act(self, asked: Asked, began: float) -> str | bytes:
        if asked.endpoint == RESET:
            if (known := self._seats.get(asked.session)) is not None:
                await known.seat.reset(asked.seed, asked.prompt or None)
                known.step = 0
            return self._dialect.was_reset()
        place = self._place(asked.session)
        await self._prepare(place, asked)
        arrays = self._server.schema.arrays(asked.observation, place.seat.keys or ())
        result = await place.seat.infer(arrays, place.step, 1e3 * (time.perf_counter() - began))
        place.step += self._server.steps
        if result.chunk is None:
            raise ServerUnavailable("the pipeline gave no actions", reason=Reason.BAD_OUTPUT, retryable=False)
        total = 1e3 * (time.perf_counter() - began)
        timing = {"infer_ms": total}
        if self._previous_ms is not None:
            timing["prev_total_ms"] = self._previous_ms
        self._previous_ms = total
        return self._dialect.answer(result, timing)

    def _place(self, name: str) -> Place:
        """The connection's own session of that name: another's, of the same name, is another."""
        if name not in self._seats:
            if len(self._seats) >= MAX_SESSIONS:
                raise InvalidInput(f"one connection has at most {MAX_SESSIONS} sessions; connect again for more")
            self._seats[name] = Place(
                Seat(self._server.service, self._server.config.pipeline, self._principal, self._server.gate)
            )
        return self._seats[name]

    async def _prepare(self, place: Place, asked: Asked) -> None:
        """A session that is open, and follows the instruction: another one begins anew, as an episode does."""
        seat = place.seat
        if seat.keys is None:
            keys = self._server.schema.keys(asked.observation.keys())
            self._server.schema.arrays(asked.observation, keys)
            prompt = asked.prompt if self._server.spec.prompt else ""
            place.step = 0
            await seat.open(keys, prompt, asked.seed, asked.options)
        elif not seat.follows(asked.prompt):
            await seat.reset(asked.seed, asked.prompt)
            place.step = 0


class Place:
    """A seat, and the control step of its next observation."""

    def __init__(self, seat: Seat) -> None:
        self.seat, self.step = seat, 0
