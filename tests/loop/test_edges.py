"""Edges as a deployment and a pipeline say them: their connectors, what they carry, and what a server says of both."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import grpc.aio
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from omni_loop import registry
from omni_loop.config import Deployment, Listen, RunnerConfig
from omni_loop.connect.router import Router
from omni_loop.connect.schema import ArrayType, Schema
from omni_loop.connect.shm import ShmConnector
from omni_loop.errors import ConfigError, PayloadError, Reason, StageFailed
from omni_loop.loop.edges import choose, routes_of
from omni_loop.loop.graph import compile_pipeline
from omni_loop.loop.orchestrator import Orchestrator
from omni_loop.loop.pipeline import Edge, Pipeline
from omni_loop.messages import PayloadKey, PayloadKind, Receipt, RunStage
from omni_loop.serve.app import Server
from omni_loop.stage import Payload
from omni_loop.types import Op

from .studio import STUDIO, Watched, infer, predict, studio

LATENTS, ACTIONS = "studio/draw.latents>develop.latents", "studio/client.actions>draw.actions"
GRAPH = compile_pipeline(STUDIO)
DEVELOP_APART = (RunnerConfig(name="main"), RunnerConfig(name="apart", stages=("studio/develop",)))


def deployment(runners: tuple[RunnerConfig, ...] = (RunnerConfig(name="main"),), **edges: str) -> Deployment:
    return Deployment(pipelines=("studio",), runners=runners, listen=Listen(port=0), edges=edges)


@asynccontextmanager
async def served(deployment: Deployment, pipeline: Pipeline = STUDIO) -> AsyncIterator[Orchestrator]:
    with registry.registered(registry.PIPELINES, "studio", pipeline):
        core = await Orchestrator.start(deployment)
        try:
            yield core
        finally:
            await core.stop(grace_s=0.0)


async def told(core: Orchestrator) -> list[int]:
    info = await core.open("studio", seed=3)
    await core.tick(infer(info, 1, frames=0, previews=False))
    whole = await core.tick(predict(info, 2), Watched())
    assert whole.frames is not None
    return whole.frames.frames[:, 0, 0, 0].tolist()


# Which connector ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("edges", "chosen"),
    [
        ({}, {}),
        ({LATENTS: "shm"}, {LATENTS: "shm"}),
        ({"studio/draw*": "shm", "*": "local"}, {LATENTS: "shm", ACTIONS: "local"}),
        ({"*": "shm", LATENTS: "local"}, {LATENTS: "local", ACTIONS: "shm"}),
        ({"studio/client.*": "shm", "studio/*": "local"}, {LATENTS: "local", ACTIONS: "shm"}),
    ],
)
def test_names_come_before_patterns_and_long_ones_before_short(edges: dict[str, str], chosen: dict[str, str]) -> None:
    got = choose(deployment(**edges), [GRAPH])
    assert {name: connector for name, connector in got.items() if name in (LATENTS, ACTIONS)} == chosen


def test_an_output_goes_where_its_edge_does() -> None:
    routes = routes_of({LATENTS: "shm"}, [GRAPH])
    assert routes == {LATENTS: "shm", "studio/draw.latents": "shm"}


@pytest.mark.parametrize(
    ("edges", "text"),
    [
        ({"studio/draw.latent>develop.latents": "shm"}, f"no edge is called .*Did you mean '{LATENTS}'"),
        ({"other/*": "shm"}, "no edge is called 'other/[*]'"),
    ],
)
def test_an_edge_that_is_not_there_is_refused_with_the_nearest(edges: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        choose(deployment(**edges), [GRAPH])


@pytest.mark.parametrize("edge", [LATENTS, "*"])
async def test_what_does_not_reach_is_refused_at_the_start(edge: str) -> None:
    apart = RunnerConfig(name="apart", stages=("studio/develop",), placement="process")
    with pytest.raises(ConfigError, match=f"'{LATENTS}' cannot go by 'local', since runner 'apart' is a process"):
        async with served(deployment((RunnerConfig(name="main"), apart), **{edge: "local"})):
            pass


@pytest.mark.parametrize("runners", [(RunnerConfig(name="main"),), DEVELOP_APART], ids=["one runner", "two runners"])
@pytest.mark.parametrize("edges", [{LATENTS: "shm"}, {"*": "shm"}, {ACTIONS: "shm"}], ids=["latents", "all", "client"])
async def test_an_edge_goes_by_its_connector_and_the_answers_are_the_same(
    runners: tuple[RunnerConfig, ...], edges: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    put: list[str] = []
    plain = ShmConnector.put

    def noted(self: ShmConnector, key: PayloadKey, payload: Payload) -> Receipt:
        put.append(key.edge)
        return plain(self, key, payload)

    monkeypatch.setattr(ShmConnector, "put", noted)
    async with served(deployment()) as core:
        expected = await told(core)
    assert put == []
    async with served(deployment(runners, **edges)) as core:
        assert await told(core) == expected
        await core._tasks.wait()
        await core.ping()
    assert ("studio/draw.latents" in put) == (ACTIONS not in edges)
    assert (ACTIONS in put) == (LATENTS not in edges)
    assert all("develop" not in edge or "draw" in edge or edge == "studio/develop.frames" for edge in put)


# What they carry ------------------------------------------------------------------------------------------


def narrowed(edge: str, schema: Schema) -> Pipeline:
    return replace(STUDIO, edges=tuple(replace(e, schema=schema) if e.name == edge else e for e in STUDIO.edges))


async def test_what_does_not_fit_its_edge_fails_the_tick_and_is_named() -> None:
    schema = Schema(PayloadKind.LATENTS, (ArrayType("latents", "float32", ("n", 2)),))
    async with served(deployment(), narrowed("draw.latents>develop.latents", schema)) as core:
        info = await core.open("studio", seed=3)
        await core.tick(infer(info, 1, frames=0, previews=False))
        with pytest.raises(StageFailed) as caught:
            await core.tick(predict(info, 2, previews=False))
        assert caught.value.reason is Reason.BAD_OUTPUT
        text = f"edge {LATENTS}: array 'latents' is float32[4, 1], wanted float32[n, 2] with n = 4"
        assert caught.value.text == text
        with pytest.raises(StageFailed, match=r"array 'latents' is float32\[1, 1\]"):  # a part of it, too
            await core.tick(predict(info, 2), Watched())


async def test_what_a_client_sends_must_fit_its_edge() -> None:
    schema = Schema(PayloadKind.ACTIONS, (ArrayType("actions", "float32", (2, 1)),))
    async with served(deployment(), narrowed("client.actions>draw.actions", schema)) as core:
        info = await core.open("studio", seed=3)
        await core.tick(infer(info, 1, frames=0, previews=False))
        with pytest.raises(Exception, match=r"array 'actions' is float32\[4, 1\], wanted float32\[2, 1\]") as caught:
            await core.tick(predict(info, 2))
        assert caught.value.reason is Reason.BAD_TENSOR
        await core.tick(predict(info, 2, n=2))


async def test_a_payload_of_another_version_is_not_read() -> None:
    async with studio() as s:
        info = await s.open()
        key = PayloadKey("draw.latents>develop.latents", info.id, 0, 0)
        old = Payload(PayloadKind.LATENTS, {"latents": np.zeros((1, 1), np.float32)}, schema=7)
        receipt = s.runners[0].connector.put(key, old)
        run = RunStage(info.id, 0, 0, "studio/develop", Op.PREDICT, 0, {"latents": receipt})
        with pytest.raises(
            StageFailed, match="carries latents version 7, its reader takes latents version 1"
        ) as caught:
            await s.runners[0].submit(run)
        assert caught.value.reason is Reason.BAD_SPEC
        s.runners[0].connector.cleanup(key)


@pytest.mark.parametrize(
    ("edge", "text"),
    [
        (Edge("draw", "x", "act", "x", PayloadKind.LATENTS, streams=True), "'act' needs 'observation' too"),
        (Edge("draw", "x", "act", "x", PayloadKind.LATENTS, streams=True, feedback=True), "only what a stage makes"),
        (Edge("draw", "x", "act", "x", "lidar"), "a kind of your own needs a schema"),
    ],
)
def test_edges_that_cannot_be_are_refused(edge: Edge, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        compile_pipeline(replace(STUDIO, edges=(*STUDIO.edges, edge)))


# Health ---------------------------------------------------------------------------------------------------


class Flipping(ShmConnector):
    """Shared memory on a bad day: what is put is not what was given."""

    def put(self, key: PayloadKey, payload: Payload) -> Receipt:
        receipt = super().put(key, payload)
        path = Path("/dev/shm") / receipt.location.removeprefix("/").split(":")[0]
        whole = path.read_bytes()
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        return receipt


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="shared memory has no directory here")
@pytest.mark.parametrize("how", ["corrupt", "closed", "unlinked"])
async def test_a_broken_connector_is_not_serving(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with registry.registered(registry.PIPELINES, "studio", STUDIO):
        server = Server(deployment(**{LATENTS: "shm"}))
        await server.start()
        try:
            assert await _health(server) == "SERVING"
            core = server.service.orchestrator
            assert core is not None
            router = core._pool._handles[0].connector
            assert isinstance(router, Router)
            shm = router._connectors["shm"]
            if how == "corrupt":
                router._connectors["shm"] = Flipping()
            elif how == "closed":
                shm.close()
            else:
                monkeypatch.setattr("omni_loop.connect.segments._posixshmem.shm_open", _nothing_there)
            with pytest.raises(PayloadError):
                await core.ping()
            assert await _health(server) == "NOT_SERVING"
            monkeypatch.undo()
            router._connectors["shm"] = shm if how != "closed" else ShmConnector()
            assert await _health(server) == "SERVING"
        finally:
            await server.stop(0.0)


def _nothing_there(*args: object, **kwargs: object) -> int:
    raise PermissionError(13, "Permission denied")


async def _health(server: Server) -> str:
    async with grpc.aio.insecure_channel(server.address) as channel:
        reply = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status))
