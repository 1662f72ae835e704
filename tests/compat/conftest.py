"""Endpoints of other protocols over the toy core, in the test's own event loop, and openpi's client to drive them."""

import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from omni_loop.config import Deployment, Limits, Listen
from omni_loop.endpoints import OpenpiEndpoint
from omni_loop.serve.app import Endpoint, Server
from omni_loop.serve.auth import Gate
from omni_loop.serve.compat import openpi
from omni_loop.testing.toy_core import SPEC, ToyCore

OPENPI = ("openpi-client==0.1.2", "typing_extensions", "websockets", "msgpack", "numpy", "pillow")


@pytest.fixture
def core() -> ToyCore:
    return ToyCore(SPEC)


@pytest.fixture
async def server(core: ToyCore) -> AsyncIterator[Server]:
    async def start(_: Deployment) -> ToyCore:
        return core

    deployment = Deployment(pipelines=("toy",), listen=Listen(port=0), limits=Limits(max_message_bytes=1 << 20))
    server = Server(deployment, start)  # type: ignore[arg-type]
    await server.start()
    yield server
    core.gate.set()
    for endpoint in server.endpoints:
        await endpoint.stop(1.0)
    server.endpoints.clear()
    assert not core.live, "a session outlived its connection"
    await server.stop(1.0)


Start = Callable[..., Awaitable[Any]]


@pytest.fixture
def listen(server: Server) -> Start:
    """Start the openpi endpoint with the given settings; it is stopped with the server."""

    async def start(gate: Gate | None = None, **settings: Any) -> Endpoint:
        endpoint = await openpi.start(
            OpenpiEndpoint(**{"port": 0, "pipeline": "toy", **settings}), server.service, gate
        )
        server.endpoints.append(endpoint)
        return endpoint

    return start


@pytest.fixture(scope="session")
def openpi_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with openpi's client as it is published, and little else: it pins numpy below 2
    and does not declare all it imports, so its dependencies are named here."""
    uv = _uv()
    if uv is None:
        pytest.skip("uv is not installed")
    folder = tmp_path_factory.mktemp("openpi") / "env"
    python = folder / "bin/python"
    subprocess.run([*uv, "venv", "--quiet", "--python", sys.executable, str(folder)], check=True)
    subprocess.run([*uv, "pip", "install", "--quiet", "--no-deps", "--python", str(python), *OPENPI], check=True)
    return python


def _uv() -> list[str] | None:
    named = [[os.environ["UV"]]] if "UV" in os.environ else []  # `uv run` says where it is
    for command in (*named, [sys.executable, "-m", "uv"], ["python3", "-m", "uv"], ["uv"]):
        if shutil.which(command[0]) and subprocess.run([*command, "--version"], capture_output=True).returncode == 0:
            return command
    return None
