"""Start, readiness, ports and the end of a server."""

import asyncio
import contextlib
import signal
import socket
from collections.abc import Iterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from omni_loop.client import AsyncClient, connect_async
from omni_loop.config import Deployment, Listen
from omni_loop.errors import CheckpointError, ConfigError, Reason, ServerUnavailable
from omni_loop.serve.app import Server, run, serve_until
from omni_loop.testing.bad_inputs import good_arrays
from omni_loop.testing.toy_core import ToyCore

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
ARRAYS = {name: good_arrays()[name] for name in ("image", "agent_pos")}


async def health(address: str, service: str = "") -> int:
    async with grpc.aio.insecure_channel(address) as channel:
        reply = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service))
        return int(reply.status)


@pytest.fixture
def busy() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        yield taken.getsockname()[1]


def on(deployment: Deployment, **listen: object) -> Deployment:
    return deployment.model_copy(
        update={"listen": Listen.model_construct(**{"host": "127.0.0.1", "port": 0, **listen})}
    )


async def test_a_busy_port_is_named(deployment: Deployment, busy: int) -> None:
    with pytest.raises(ServerUnavailable, match=rf"port {busy} on 127.0.0.1 is busy") as refusal:
        await run(on(deployment, port=busy))
    assert refusal.value.reason is Reason.PORT_BUSY


async def test_a_second_server_on_the_port_is_refused(deployment: Deployment, server: Server) -> None:
    port = int(server.address.rpartition(":")[2])
    second = Server(on(deployment, port=port))
    with pytest.raises(ServerUnavailable, match=f"port {port}"):
        await second.start()
    await second.stop()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.com", ""])
async def test_only_loopback_without_a_token(deployment: Deployment, host: str) -> None:
    with pytest.raises(ConfigError, match="without a token or TLS"):
        await run(on(deployment, host=host))


async def test_health_waits_for_the_stages_and_follows_the_runners(deployment: Deployment, core: ToyCore) -> None:
    loaded, loading = asyncio.Event(), asyncio.Event()

    async def start(_: Deployment) -> ToyCore:
        loading.set()
        await loaded.wait()
        return core

    server = Server(deployment, start)  # type: ignore[arg-type]
    starting = asyncio.create_task(server.start())
    await loading.wait()
    async with connect_async(server.address) as client:
        assert await health(server.address) == NOT_SERVING
        assert not (await client.info()).ready
        with pytest.raises(ServerUnavailable, match="still loading") as refusal:
            await client.open("toy")
        assert refusal.value.retryable
        loaded.set()
        await starting
        assert await health(server.address) == SERVING
        assert await health(server.address, "omni_loop.v1.Loop") == SERVING
        await client.open("toy")

        async def gone() -> None:
            raise ServerUnavailable("runner 'main' is gone")

        core.ping = gone  # type: ignore[method-assign]
        assert await health(server.address) == NOT_SERVING
    await server.stop(0)


async def test_reflection_lists_the_service(server: Server) -> None:
    async with grpc.aio.insecure_channel(server.address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        (reply,) = [reply async for reply in call]
    names = {service.name for service in reply.list_services_response.service}
    assert {"omni_loop.v1.Loop", "grpc.health.v1.Health"} <= names


async def test_sigterm_drains(deployment: Deployment, core: ToyCore) -> None:
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def start(_: Deployment) -> ToyCore:
        return core

    running = asyncio.create_task(run(on(deployment), ready.set_result, start=start))  # type: ignore[arg-type]
    address = await ready
    async with connect_async(address) as client:
        session = await client.open("toy")
        core.gate.clear()
        tick = asyncio.create_task(session.infer(ARRAYS, 0))
        await core.entered.wait()
        signal.raise_signal(signal.SIGTERM)
        await until_refused(client)
        core.gate.set()
        assert (await tick).chunk is not None
    await running
    assert core.stopped


async def until_refused(client: AsyncClient) -> None:
    with pytest.raises(ServerUnavailable):  # noqa: PT012  the signal is heard some turns of the loop later
        while True:
            await client.open("toy")


async def test_a_stop_while_loading_ends_the_start(deployment: Deployment) -> None:
    loading = asyncio.Event()

    async def start(_: Deployment) -> ToyCore:
        loading.set()
        await asyncio.Event().wait()
        raise AssertionError

    stop = asyncio.Event()
    running = asyncio.create_task(serve_until(stop, on(deployment), start=start))  # type: ignore[arg-type]
    await loading.wait()
    stop.set()
    await running


async def test_a_start_that_fails_frees_the_port(deployment: Deployment) -> None:
    addresses = []

    async def start(_: Deployment) -> ToyCore:
        addresses.append(server.address)
        raise CheckpointError("act: model.safetensors is corrupt")

    server = Server(on(deployment), start)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="corrupt"):
        await server.start()
    await server.stop()
    host, _, port = addresses[0].rpartition(":")
    with contextlib.closing(socket.socket()) as probe:
        assert probe.connect_ex((host, int(port))) != 0
