"""The admin port: what it says is what the server does, to whom it may be said, at no cost while nobody looks."""

from __future__ import annotations

import asyncio
import io
import os
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import numpy as np
import pytest
from PIL import Image

from omni_loop.client import connect_async
from omni_loop.endpoints import AccessConfig, AdminEndpoint
from omni_loop.errors import ServerUnavailable
from omni_loop.serve.admin import start
from omni_loop.serve.admin.live import LiveView
from omni_loop.serve.service import LoopService
from omni_loop.wire.codec import Limits

from .conftest import Running, Start, arrays

TOKEN = "a" * 40


def live_view(running: Running) -> LiveView:
    (endpoint,) = running.server.endpoints
    view = endpoint.live  # type: ignore[attr-defined]
    assert isinstance(view, LiveView)
    return view


async def test_liveness_and_readiness(running: Start) -> None:
    async with running() as up, httpx.AsyncClient(base_url=up.url) as http:
        assert (await http.get("/health/live")).json() == {"live": True}
        ready = await http.get("/health/ready")
        assert (ready.status_code, ready.json()) == (200, {"ready": True, "why": ""})
        up.server.service.draining = True
        ready = await http.get("/health/ready")
        assert ready.status_code == 503
        assert "stop" in ready.json()["why"]


async def test_readiness_passes_through_the_work_loop(running: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running() as up, httpx.AsyncClient(base_url=up.url) as http:
        pool = up.server.service.core._pool
        (runner,) = pool._handles
        probes = 0
        submit = runner.submit

        async def counted(command: object, on_part: object = None) -> object:
            nonlocal probes
            probes += type(command).__name__ == "Probe"
            return await submit(command, on_part)  # type: ignore[arg-type]

        monkeypatch.setattr(runner, "submit", counted)
        replies = await asyncio.gather(*(http.get("/health/ready") for _ in range(8)))
        assert {reply.status_code for reply in replies} == {200}
        assert 1 <= probes <= 8
        await runner.stop()
        ready = await http.get("/health/ready")
        assert ready.status_code == 503
        assert "gone" in ready.json()["why"]


async def test_no_memory_on_the_device_is_not_ready(running: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    from omni_loop.runner.state import StateManager

    def full(self: StateManager, array: object) -> object:
        raise RuntimeError("out of memory")

    async with running() as up, httpx.AsyncClient(base_url=up.url) as http:
        monkeypatch.setattr(StateManager, "through_device", full)
        assert (await http.get("/health/ready")).status_code == 503
        monkeypatch.undo()
        assert (await http.get("/health/ready")).status_code == 200


async def test_metrics_count_what_happened(running: Start) -> None:
    async with running() as up, httpx.AsyncClient(base_url=up.url) as http, connect_async(up.server.address) as client:
        async with await client.open("toy", seed=1) as session:
            await session.infer(arrays(), 0)
            text = (await http.get("/metrics")).text
        for line in (
            'omni_loop_stage_seconds_count{stage="toy/act"}',
            'omni_loop_stage_queue_seconds_count{stage="toy/act"}',
            'omni_loop_batch_size_sum{stage="toy/act"}',
            'omni_loop_state_bytes{device="cpu",process="server"}',
            "omni_loop_turn_wait_seconds_count",
        ):
            assert line in text
        phases = [line.split()[-1] for line in text.splitlines() if line.startswith("omni_loop_sessions{")]
        assert sum(map(float, phases)) == 1
        assert session.id not in text


async def test_frames_of_who_looks(running: Start) -> None:
    async with running() as up, httpx.AsyncClient(base_url=up.url) as http, connect_async(up.server.address) as client:
        async with await client.open("toy", seed=1) as session:
            await session.infer(arrays(5), 0, frames=3)
            assert not live_view(up).watching
            (listed,) = (await http.get("/sessions")).json()
            assert (listed["session"], listed["p50_ms"], listed["observed_step"]) == (session.id, None, None)
            assert not live_view(up).watching
            (listed,) = (await http.get("/live")).json()
            assert listed["observed_step"] is None
            await session.infer(arrays(7), 2, frames=3)  # frames for 3, 4, 5
            await session.infer(arrays(9), 4)
            (listed,) = (await http.get("/live")).json()
            assert (listed["observed_step"], listed["predicted_step"]) == (4, 4)
            assert listed["p50_ms"] > 0
            for which, grey in (("observed", 9), ("predicted", 10 * 4)):
                reply = await http.get(f"/live/{session.id}/{which}.png")
                assert reply.headers["content-type"] == "image/png"
                assert np.unique(np.asarray(Image.open(io.BytesIO(reply.content)))) == [grey]
        assert (await http.get("/live")).json() == []
        assert (await http.get(f"/live/{session.id}/observed.png")).status_code == 404
        live_view(up).close()
        assert not live_view(up).watching


async def test_principals_see_their_own(running: Start, tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text(f"ann {TOKEN}\nbob {'b' * 40}\n")
    os.chmod(file, 0o600)
    access = AccessConfig(tokens=str(file))
    async with running(access) as up, httpx.AsyncClient(base_url=up.url) as http:
        assert (await http.get("/health/live")).status_code == 200
        for path in ("/", "/live", "/sessions", "/metrics", "/health/ready", "/live/x/observed.png"):
            reply = await http.get(path)
            assert reply.status_code == 401
            assert reply.headers["www-authenticate"].startswith("Basic")
        async with connect_async(up.server.address, token=TOKEN) as client, await client.open("toy") as session:
            ann = (await http.get("/live", headers={"authorization": f"Bearer {TOKEN}"})).json()
            assert [s["session"] for s in ann] == [session.id]
            await session.infer(arrays(), 0)
            assert (await http.get("/live", auth=("bob", "b" * 40))).json() == []
            picture = f"/live/{session.id}/observed.png"
            assert (await http.get(picture, auth=("bob", "b" * 40))).status_code == 404
            assert (await http.get(picture, auth=("ann", TOKEN))).status_code == 200


async def test_other_hosts_are_refused(running: Start) -> None:
    async with running() as up, httpx.AsyncClient(base_url=up.url) as http:
        reply = await http.get("/live", headers={"host": "rebound.example"})
        assert reply.status_code == 400
        assert (await http.get("/live", headers={"host": "localhost:1"})).status_code == 200


async def test_a_busy_port_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ServerUnavailable, match=f"admin: port {port}"):
            await start(AdminEndpoint(port=port), LoopService(Limits()))


def test_fastapi_is_not_imported_without_it() -> None:
    code = "import sys, omni_loop.serve.app, omni_loop.serve.endpoints; sys.exit('fastapi' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
