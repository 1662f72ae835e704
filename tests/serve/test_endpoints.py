"""Other ports of a server: all that are named, or none; known by their addresses."""

from __future__ import annotations

import sys
import urllib.request

import pytest

from omni_loop.config import Deployment, load_deployment
from omni_loop.endpoints import AdminEndpoint, Endpoints, OpenpiEndpoint
from omni_loop.errors import ConfigError
from omni_loop.serve.app import Server
from omni_loop.serve.background import BackgroundServer
from omni_loop.serve.endpoints import start_endpoints

BOTH = Endpoints(openpi=OpenpiEndpoint(pipeline="toy", port=0), admin=AdminEndpoint(port=0))


async def test_those_that_are_named_start(server: Server, deployment: Deployment) -> None:
    assert await start_endpoints(deployment, server.service, server.gate) == []
    both = deployment.model_copy(update={"endpoints": BOTH})
    started = await start_endpoints(both, server.service, server.gate)
    try:
        assert [endpoint.name for endpoint in started] == ["openpi", "admin"]
        assert len({endpoint.address for endpoint in started}) == 2
    finally:
        for endpoint in started:
            await endpoint.stop(1.0)


async def test_all_or_none(server: Server, deployment: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    from omni_loop.serve.compat.openpi import OpenpiServer

    stopped: list[str] = []
    stop = OpenpiServer.stop

    async def noted(self: OpenpiServer, grace_s: float) -> None:
        stopped.append(self.address)
        await stop(self, grace_s)

    monkeypatch.setattr(OpenpiServer, "stop", noted)
    for name in [name for name in sys.modules if name.startswith("omni_loop.serve.admin")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    both = deployment.model_copy(update={"endpoints": BOTH})
    with pytest.raises(ConfigError, match=r"endpoints.admin needs uvicorn.*omni-loop\[serve\]"):
        await start_endpoints(both, server.service, server.gate)
    assert len(stopped) == 1


def test_a_server_in_the_background_says_where_they_are() -> None:
    with BackgroundServer(load_deployment("pusht-admin")) as server:
        assert list(server.endpoints) == ["admin"]
        with urllib.request.urlopen(f"http://{server.endpoints['admin']}/health/ready", timeout=30) as reply:
            assert reply.status == 200
