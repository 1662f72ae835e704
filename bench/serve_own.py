"""What the server costs besides the models, and what it costs when nobody asks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import grpc
import numpy as np
from grpc_health.v1 import health_pb2
from numpy.typing import NDArray

from omni_loop.client import Client, connect
from omni_loop.config import load_deployment
from omni_loop.serve.background import BackgroundServer

from .process import cpu_seconds
from .rows import Bar, Bench, Measured, Settings

_WARM_UP, _STEPS_APART = 30, 8


@dataclass(frozen=True, slots=True)
class Times:
    """Milliseconds ``[n]`` of as many ticks: seen by the client, inside the server, in forward passes."""

    round_trip: NDArray[np.float64]
    total: NDArray[np.float64]
    model: NDArray[np.float64]


class Served:
    """A ``pusht`` server in a process of its own, and a client of it on loopback."""

    def __init__(self, server: BackgroundServer, client: Client, quick: bool) -> None:
        self._server, self._client, self._quick = server, client, quick

    @cached_property
    def times(self) -> Times:
        """Infer with one 96 x 96 image and the agent's position, one after the other."""
        rng, rows = np.random.default_rng(0), []
        arrays = {
            "image": rng.integers(0, 256, (96, 96, 3), np.uint8),
            "agent_pos": np.full((2, 2), 256, np.float32),
        }
        count = 10 if self._quick else 500
        with self._client.open("pusht", seed=0, keys=tuple(arrays)) as session:
            for tick in range(_WARM_UP + count):
                begin = time.perf_counter()
                result = session.infer(arrays, tick * _STEPS_APART)
                spent = (time.perf_counter() - begin) * 1e3
                rows.append((spent, result.timings.total_ms, result.timings.model_ms))
        return Times(*np.array(rows[_WARM_UP:]).T)

    @cached_property
    def empty_ms(self) -> NDArray[np.float64]:
        """Round trips of a health check, which passes through the runner and computes nothing.

        Each after a pause as long as a tick's forward passes: threads and cores that have slept wake up slowly, and
        a client that waits for its chunk sleeps as well.
        """
        count, pause = 10 if self._quick else 200, float(np.median(self.times.model)) / 1e3
        with grpc.insecure_channel(self._server.address) as channel:
            check = channel.unary_unary(
                "/grpc.health.v1.Health/Check",
                request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
                response_deserializer=health_pb2.HealthCheckResponse.FromString,
            )
            spent = []
            for _ in range(_WARM_UP + count):
                time.sleep(pause)
                begin = time.perf_counter()
                check(health_pb2.HealthCheckRequest(), timeout=30)
                spent.append((time.perf_counter() - begin) * 1e3)
        return np.array(spent[_WARM_UP:])

    def idle(self) -> float:
        """CPU per wall time of the server's process tree with one silent session, in % of a core."""
        pid, seconds = self._server.pid, 1.0 if self._quick else 20.0
        with self._client.open("pusht", seed=0):
            time.sleep(0.5)
            before, begin = cpu_seconds(pid), time.monotonic()
            time.sleep(seconds)
            return 100 * (cpu_seconds(pid) - before) / (time.monotonic() - begin)


@contextmanager
def _subject(settings: Settings) -> Iterator[Served]:
    deployment = load_deployment("pusht")
    if settings.checkpoints:
        options = {s: {"checkpoints": settings.checkpoints} for s in ("context", "act", "frames", "decode")}
        deployment = deployment.model_copy(update={"stage_options": options})
    settings.say("starting a server")
    with BackgroundServer(deployment) as server, connect(server.address) as client:
        yield Served(server, client, settings.quick)


BENCH: Bench[Served] = Bench("own", _subject)


def _at(percent: float, ours: NDArray[np.float64], baseline: NDArray[np.float64] | None = None) -> Measured:
    return Measured(
        float(np.percentile(ours, percent)), None if baseline is None else float(np.percentile(baseline, percent))
    )


@BENCH.row("ms", Bar("ours", "<=", 1.5))
def overhead_p50(served: Served) -> Measured:
    """What the server adds to an Infer's forward passes, from the bytes of the request to the answer."""
    return _at(50, served.times.total - served.times.model)


@BENCH.row("ms")
def overhead_p99(served: Served) -> Measured:
    """The same at the 99th percentile."""
    return _at(99, served.times.total - served.times.model)


@BENCH.row("ms")
def transport_p50(served: Served) -> Measured:
    """What client, gRPC and loopback add, both ways, against an empty call."""
    return _at(50, served.times.round_trip - served.times.total, served.empty_ms)


@BENCH.row("ms", Bar("ours", "<=", 1.5))
def on_loopback_p50(served: Served) -> Measured:
    """Both together: all of a round trip but the forward passes."""
    return _at(50, served.times.round_trip - served.times.model)


@BENCH.row("ms")
def round_trip_p50(served: Served) -> Measured:
    """Round trip of an Infer, against its forward passes."""
    return _at(50, served.times.round_trip, served.times.model)


@BENCH.row("% of a core", Bar("ours", "<", 0.5))
def idle_cpu(served: Served) -> Measured:
    """CPU of the server over 20 s with one silent session."""
    return Measured(served.idle())
