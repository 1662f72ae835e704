"""Rows of ``omni-loop bench adapters``: what carrying payloads between stages costs, what previews gain and cost."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from multiprocessing.shared_memory import SharedMemory

import numpy as np
from numpy.typing import NDArray

from omni_loop.client import Session, connect
from omni_loop.config import Deployment, RunnerConfig
from omni_loop.connect.local import LocalConnector
from omni_loop.connect.schema import SCHEMAS
from omni_loop.connect.shm import ShmConnector
from omni_loop.messages import PayloadKey, PayloadKind
from omni_loop.serve.background import BackgroundServer
from omni_loop.stage import Payload

from .rows import Bar, Bench, Measured, Settings

MIB, FRAMES = 1 << 20, 8
PIPELINE = "pusht-world"


@dataclass(frozen=True, slots=True)
class Previews:
    """Medians in ms of predictions of 8 frames: to the first preview, to the whole with previews and without; and of
    how many parts came before the whole."""

    first: float
    watched: float
    plain: float
    parts: float


class Edges:
    """Payloads of random bytes, and servers of the world pipeline."""

    def __init__(self, settings: Settings, stack: ExitStack) -> None:
        self._quick, self._stack = settings.quick, stack

    def carried(self, nbytes: int) -> Measured:
        """Milliseconds of put and get between two connectors, beside a fresh segment for every payload."""
        array = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)
        writer, reader = ShmConnector(), ShmConnector()
        rounds = 3 if self._quick else 60

        def ours(tick: int) -> None:
            key = PayloadKey("bench", "bench", 0, tick)
            receipt = writer.put(key, Payload(PayloadKind.LATENTS, {"latents": array}))
            assert reader.get(receipt).arrays["latents"][-1] == array[-1]
            writer.cleanup(key)

        try:
            return Measured(*_in_turns(rounds, ours, lambda tick: _fresh(array)))
        finally:
            writer.close()
            reader.close()

    @cached_property
    def one_runner(self) -> Previews:
        return self._previews(Deployment(pipelines=(PIPELINE,)))

    @cached_property
    def two_runners(self) -> Previews:
        """Frames are decoded in a runner of their own."""
        decode = RunnerConfig(name="decode", stages=(f"{PIPELINE}/decode",))
        return self._previews(Deployment(pipelines=(PIPELINE,), runners=(RunnerConfig(name="main"), decode)))

    def _previews(self, deployment: Deployment) -> Previews:
        server = self._stack.enter_context(BackgroundServer(deployment))
        client = self._stack.enter_context(connect(server.address))
        watched, plain = (self._stack.enter_context(client.open(PIPELINE, seed=0)) for _ in range(2))
        rng = np.random.default_rng(0)
        frame = rng.integers(0, 256, (1, 96, 96, 3), np.uint8)
        rows: list[tuple[float, float, float, int]] = []
        for turn in range((1 if self._quick else 30) + 1):
            for session in (watched, plain):
                session.recondition({"image": frame}, first_step=0, executed=np.zeros((0, 2), np.float32))
            actions = rng.uniform(100, 400, (FRAMES, 2)).astype(np.float32)
            first, whole, parts = _predict(watched, actions, watch=True)
            rows.append((first, whole, _predict(plain, actions, watch=False)[1], parts))
            del rows[: turn == 0]  # the first warms up
        return Previews(*(statistics.median(column) for column in zip(*rows, strict=True)))


def _predict(session: Session, actions: NDArray[np.float32], watch: bool) -> tuple[float, float, int]:
    """Milliseconds to the first part and to the whole; parts."""
    came: list[float] = []
    begin = time.perf_counter()
    session.predict(actions, on_part=(lambda part: came.append(time.perf_counter())) if watch else None)
    whole = time.perf_counter()
    return 1e3 * ((came[0] if came else whole) - begin), 1e3 * (whole - begin), len(came)


def _in_turns(rounds: int, *sides: Callable[[int], None]) -> list[float]:
    """Median milliseconds of each side, in turns."""
    spent: list[list[float]] = [[] for _ in sides]
    for tick in range(rounds + 3):
        for side, times in zip(sides, spent, strict=True):
            begin = time.perf_counter()
            side(tick)
            times.append(1e3 * (time.perf_counter() - begin))
    return [statistics.median(times[3:]) for times in spent]


def _fresh(array: NDArray[np.uint8]) -> None:
    """Serialised into a segment of its own, attached by name, copied out and unlinked, as peers do it."""
    data = array.tobytes()
    segment = SharedMemory(create=True, size=len(data))
    try:
        there = SharedMemory(name=segment.name)
        assert segment.buf is not None
        assert there.buf is not None
        segment.buf[: len(data)] = data
        assert np.frombuffer(bytes(there.buf[: len(data)]), np.uint8)[-1] == array[-1]
        there.close()
    finally:
        segment.close()
        segment.unlink()


@contextmanager
def _subject(settings: Settings) -> Iterator[Edges]:
    with ExitStack() as stack:
        yield Edges(settings, stack)


BENCH: Bench[Edges] = Bench("edges", _subject)


@BENCH.row("ms", Bar("ours", "<=", 8))
def shm_8mib(edges: Edges) -> Measured:
    """Put and get of 8 MiB through shared memory, against a fresh segment for every payload."""
    return edges.carried(8 * MIB)


@BENCH.row("ms", Bar("ours", "<=", 1))
def shm_1mib(edges: Edges) -> Measured:
    """Put and get of 1 MiB, likewise."""
    return edges.carried(MIB)


@BENCH.row("bytes", Bar("ours", "<=", 0))
def local_copied(edges: Edges) -> Measured:
    """Of a payload of 8 MiB, bytes that are in another place after put and get in the local connector."""
    connector, array = LocalConnector(), np.zeros(8 * MIB, np.uint8)
    receipt = connector.put(PayloadKey("bench", "bench", 0, 0), Payload(PayloadKind.KV, {"kv": array}))
    got = connector.get(receipt).arrays["kv"]
    same = got is array or got.__array_interface__["data"] == array.__array_interface__["data"]
    return Measured(0 if same else got.nbytes, array.nbytes)


@BENCH.row("us", Bar("ours", "<=", 20))
def schema_check(edges: Edges) -> Measured:
    """Checking a payload of frames and scene against the schema of its kind."""
    payload = Payload(
        PayloadKind.FRAMES,
        {"frames": np.zeros((8, 96, 96, 3), np.uint8), "scene": np.zeros((8, 9, 2), np.float32)},
    )
    schema, rounds = SCHEMAS[PayloadKind.FRAMES], 2_000
    begin = time.thread_time()
    for _ in range(rounds):
        if problem := schema.problem(payload):
            raise AssertionError(problem)
    return Measured(1e6 * (time.thread_time() - begin) / rounds)


@BENCH.row("ms", Bar("ratio", "<=", 0.5))
def first_preview(edges: Edges) -> Measured:
    """From a prediction of 8 frames being asked for to its first preview, against to the whole; one runner."""
    return Measured(edges.one_runner.first, edges.one_runner.watched)


@BENCH.row("ms", Bar("ratio", "<=", 0.5))
def first_preview_apart(edges: Edges) -> Measured:
    """The same with frames decoded in a runner of their own."""
    return Measured(edges.two_runners.first, edges.two_runners.watched)


@BENCH.row("ms", Bar("ratio", "<=", 1.2))
def previews_cost(edges: Edges) -> Measured:
    """The whole prediction with previews, against without; one runner."""
    return Measured(edges.one_runner.watched, edges.one_runner.plain)


@BENCH.row("ms", Bar("ratio", "<=", 1.2))
def previews_cost_apart(edges: Edges) -> Measured:
    """The same with frames decoded in a runner of their own."""
    return Measured(edges.two_runners.watched, edges.two_runners.plain)


@BENCH.row("parts")
def previews_shown(edges: Edges) -> Measured:
    """Parts of the 8 frames that came before the whole, decoded in a runner of their own, against in the same."""
    return Measured(edges.two_runners.parts, edges.one_runner.parts)
