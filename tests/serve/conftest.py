"""A server of the toy core on a free loopback port, in the test's own event loop."""

from collections.abc import AsyncIterator, Callable

import pytest

from omni_loop.client import AsyncClient, connect_async
from omni_loop.config import Deployment, Limits, Listen
from omni_loop.serve.app import Server
from omni_loop.testing.toy_core import ToyCore


@pytest.fixture
def deployment() -> Deployment:
    return Deployment(pipelines=("toy",), listen=Listen(port=0), limits=Limits(max_message_bytes=1 << 20))


@pytest.fixture
def core() -> ToyCore:
    return ToyCore()


@pytest.fixture
async def server(deployment: Deployment, core: ToyCore) -> AsyncIterator[Server]:
    async def start(_: Deployment) -> ToyCore:
        return core

    server = Server(deployment, start)  # type: ignore[arg-type]
    await server.start()
    yield server
    core.gate.set()
    await server.stop(1.0)
    assert core.stopped
    assert not server.service.streams


@pytest.fixture
async def client(server: Server) -> AsyncIterator[AsyncClient]:
    async with connect_async(server.address, timeout_s=20) as client:
        yield client


@pytest.fixture
def raw_call(client: AsyncClient) -> Callable[[str], Callable[..., object]]:
    """Calls a method with bytes and answers bytes: what a client that is not ours could send."""
    return lambda name: client.channel.unary_unary(f"/omni_loop.v1.Loop/{name}")
