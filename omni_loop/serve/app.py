"""A server from start to drain: bind, load, serve, and end without losing a tick in flight."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Protocol

import grpc.aio
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from ..endpoints import is_loopback
from ..errors import ConfigError
from ..loop.tick import all_of
from ..wire.codec import Limits
from . import ports
from .auth import Gate, Interceptor
from .endpoints import start_endpoints
from .health import Health
from .service import SERVICE, LoopService
from .tls import HANDSHAKE_MS

if TYPE_CHECKING:
    from ..config import Deployment
    from ..loop.orchestrator import Orchestrator

log = logging.getLogger(__name__)
# A server of gRPC's that is freed before it was stopped gives itself to a debug message (1.85): a handler that keeps
# the record then holds freed memory.
logging.getLogger("grpc._cython.cygrpc").setLevel(logging.INFO)
GRACE_S = 5.0
MIN_PING_MS = 10_000  # clients may ping this often; ours do half as often

Start = Callable[["Deployment"], Awaitable["Orchestrator"]]


class Endpoint(Protocol):
    """Another port of the server, for clients of other protocols or for people."""

    name: str  # of its section in the deployment's ``endpoints``
    address: str  # host:port, as bound

    async def stop(self, grace_s: float) -> None:
        """Take nothing new, let what is under way finish within ``grace_s``, and free the port."""


async def run(
    deployment: Deployment,
    on_ready: Callable[[str], None] | None = None,
    *,
    start: Start | None = None,
    on_endpoints: Callable[[Mapping[str, str]], None] | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT, then drain. ``on_ready`` hears the address once every stage has run, and before it
    ``on_endpoints`` those of the other ports, by name.

    Raises:
        ServerUnavailable: (port busy) the port is taken.
        ConfigError: a bind that others can reach, without a token or TLS.
        OmniLoopError: a stage could not be built or warmed up.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    signals = (signal.SIGTERM, signal.SIGINT)
    for number in signals:
        loop.add_signal_handler(number, stop.set)
    try:
        await serve_until(stop, deployment, on_ready, start=start, on_endpoints=on_endpoints)
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


async def serve_until(
    stop: asyncio.Event,
    deployment: Deployment,
    on_ready: Callable[[str], None] | None = None,
    *,
    start: Start | None = None,
    on_endpoints: Callable[[Mapping[str, str]], None] | None = None,
) -> None:
    """As :func:`run`, until ``stop`` is set, which also ends a start that is under way. ``on_endpoints`` hears the
    addresses of the other ports, by name, before ``on_ready``."""
    server = Server(deployment, start)
    starting = asyncio.create_task(server.start())
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            address = starting.result()
            if on_endpoints is not None:
                on_endpoints({endpoint.name: endpoint.address for endpoint in server.endpoints})
            if on_ready is not None:
                on_ready(address)
            await stopping
    finally:
        starting.cancel()
        stopping.cancel()
        await asyncio.gather(starting, stopping, return_exceptions=True)  # raised above, or cancelled here
        await server.stop()


class Server:
    """One deployment on one port. ``start`` builds the orchestrator (default: ``Orchestrator.start``)."""

    def __init__(self, deployment: Deployment, start: Start | None = None) -> None:
        self.deployment = deployment
        self.address = ""
        self.gate = Gate(deployment.access)
        self.service = LoopService(_limits(deployment), self.gate)
        # Who may call. Credentials None: plaintext.
        self.interceptors: list[grpc.aio.ServerInterceptor] = []
        if not self.gate.open:
            self.interceptors.append(Interceptor(self.gate, charged=frozenset({f"/{SERVICE}/Stream"})))
        self.credentials = self.gate.credentials()
        self.endpoints: list[Endpoint] = []
        self._start = start or _start_orchestrator
        self._health = Health(self.service)
        self._server: grpc.aio.Server | None = None

    async def start(self) -> str:
        """The address, once every stage has run. The port is taken first, so that a busy one is known before
        anything is loaded; meanwhile health says NOT_SERVING. Raises as :func:`run` does."""
        self._server, self.address = self._made()
        await self._server.start()
        log.info("listening on %s, loading", self.address)
        self.service.orchestrator = await self._start(self.deployment)
        self.endpoints = await start_endpoints(self.deployment, self.service, self.gate)
        await self._health.refresh()
        # What loading left lives as long as the server: the collector need not go through it during a tick.
        gc.collect()
        gc.freeze()
        log.info("serving on %s", self.address)
        return self.address

    async def stop(self, grace_s: float = GRACE_S) -> None:
        """Refuse new sessions, tell the streams, let ticks in flight finish within ``grace_s``, end everything."""
        await self._health.enter_graceful_shutdown()
        self.service.drain()
        stopping = [endpoint.stop(grace_s) for endpoint in self.endpoints]
        if self._server is not None:
            stopping.append(self._server.stop(grace_s))
        await all_of(stopping)
        await self.service.gone(grace_s)
        if self.service.orchestrator is not None:
            await self.service.orchestrator.stop(grace_s)
        self.service.close()

    def _made(self) -> tuple[grpc.aio.Server, str]:
        """A server of all services, bound to its port, and its address."""
        host, port = self.deployment.listen.host, self.deployment.listen.port
        if not is_loopback(host) and not self.deployment.access.protected:
            raise ConfigError(f"refusing to listen on {host!r} without a token or TLS; take 127.0.0.1")
        server, at = ports.bound(self._make, self.credentials, host, port)
        server.add_generic_rpc_handlers((self.service.handler(),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
        return server, at

    def _make(self) -> grpc.aio.Server:
        return grpc.aio.server(interceptors=self.interceptors, options=_options(self.service.limits))


async def _start_orchestrator(deployment: Deployment) -> Orchestrator:
    from ..loop.orchestrator import Orchestrator

    return await Orchestrator.start(deployment)


def _limits(deployment: Deployment) -> Limits:
    of_both = {**deployment.session.model_dump(), **deployment.limits.model_dump(), "min_ping_s": MIN_PING_MS / 1e3}
    return Limits(**{name: of_both[name] for name in Limits.__slots__})


def _options(limits: Limits) -> list[tuple[str, int]]:
    return [
        ("grpc.so_reuseport", 0),  # else a second server shares the port and nobody notices
        ("grpc.max_receive_message_length", limits.max_message_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.http2.ping_timeout_ms", 10_000),  # else the core waits a minute for a peer that went silent
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_MS),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
    ]
