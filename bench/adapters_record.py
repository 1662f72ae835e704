"""Rows of ``omni-loop bench adapters``: what recording costs a tick, and whether what was recorded comes out again."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from omni_loop.client import Client, Session, connect
from omni_loop.config import Deployment, RecordConfig, load_deployment
from omni_loop.record.reader import Recording
from omni_loop.record.replay import replay
from omni_loop.serve.background import BackgroundServer
from omni_loop.types import Array

from .rows import Bar, Bench, Measured, Settings

PIPELINE, KEYS = "pusht", ("image", "agent_pos")
SESSIONS, HZ = 16, 5.0
STEPS_APART = 8
REPLAYED, WITH_FRAMES = 1000, 50  # ticks, and every how many-th asks for frames besides


@dataclass(frozen=True, slots=True)
class Pace:
    """``rounds`` of ``seconds`` on each server, in turns."""

    rounds: int = 6
    seconds: float = 10.0


class Recorded:
    """Two servers of one deployment, of which one records, and a third to replay on."""

    def __init__(self, settings: Settings, stack: ExitStack, folder: Path) -> None:
        self._quick, self._stack, self._folder = settings.quick, stack, folder
        self._deployment = load_deployment(PIPELINE).model_copy(update={"record": RecordConfig()})
        if settings.checkpoints:
            options = {s: {"checkpoints": settings.checkpoints} for s in ("context", "act", "frames", "decode")}
            self._deployment = self._deployment.model_copy(update={"stage_options": options})
        self._say = settings.say

    @cached_property
    def cost(self) -> Measured:
        """Median round trip in ms of ticks at 16 x 5 Hz, recorded against not recorded."""
        self._say("starting two servers")
        folder = self._folder / "cost"
        clients = [self._serve(self._recording(folder)), self._serve(self._deployment)]
        pace = Pace(1, 1.0) if self._quick else Pace()
        trips: list[list[float]] = [[], []]
        for turn in range(2 * pace.rounds):
            which = (turn + turn // 2) % 2  # on, off, off, on: a drift of the machine favours neither
            self._say(f"{SESSIONS} sessions at {HZ:g} Hz, {'not ' * which}recorded")
            trips[which] += _drive(clients[which], pace.seconds)
        return Measured(*(float(np.median(t)) for t in trips))

    @cached_property
    def differing(self) -> float:
        """Of 1,000 recorded ticks of sessions served alone, how many come out otherwise on a server started anew."""
        folder, count = self._folder / "replayed", 8 if self._quick else REPLAYED
        with ExitStack() as stack:
            server = stack.enter_context(BackgroundServer(self._recording(folder)))
            client = stack.enter_context(connect(server.address))
            self._say(f"recording {count} ticks")
            for seed in range(4):
                with client.open(PIPELINE, seed=seed, keys=KEYS) as session:
                    _ticks(session, seed, count // 4)
        recording = Recording(folder)
        self._say("replaying them")
        report = replay(self._serve(self._deployment), recording)
        return float(count - report.ticks + report.differing)

    def _recording(self, folder: Path) -> Deployment:
        return self._deployment.model_copy(update={"record": RecordConfig(folder=str(folder))})

    def _serve(self, deployment: Deployment) -> Client:
        server = self._stack.enter_context(BackgroundServer(deployment))
        return self._stack.enter_context(connect(server.address))


def _ticks(session: Session, seed: int, count: int) -> None:
    draw = np.random.default_rng(seed)
    for tick in range(count):
        frames = 8 if tick % WITH_FRAMES == WITH_FRAMES - 1 else 0
        session.infer(_arrays(draw), tick * STEPS_APART, frames=frames)


def _drive(client: Client, seconds: float) -> list[float]:
    """Round trips in ms of 16 sessions, each of which observes at 5 Hz; the first of each is left out."""
    trips: list[list[float]] = [[] for _ in range(SESSIONS)]
    errors: list[BaseException] = []
    began = time.perf_counter() + 0.5

    def robot(number: int) -> None:
        draw = np.random.default_rng(number)
        try:
            with client.open(PIPELINE, seed=number, keys=KEYS) as session:
                for tick in range(round(seconds * HZ)):
                    arrays = _arrays(draw)
                    time.sleep(max(0.0, began + (tick + number / SESSIONS) / HZ - time.perf_counter()))
                    sent = time.perf_counter()
                    session.infer(arrays, tick * STEPS_APART)
                    trips[number].append(1e3 * (time.perf_counter() - sent))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=robot, args=(number,)) for number in range(SESSIONS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [ms for one in trips for ms in one[1:]]


def _arrays(draw: np.random.Generator) -> dict[str, Array]:
    """A camera's image, smooth and noisy as one is, and the agent's position."""
    coarse = draw.integers(0, 256, (12, 12, 3)).repeat(8, 0).repeat(8, 1)
    image = np.clip(coarse + draw.normal(0, 3, (96, 96, 3)), 0, 255).astype(np.uint8)
    return {"image": image, "agent_pos": np.full((2, 2), 256, np.float32)}


@contextmanager
def _subject(settings: Settings) -> Iterator[Recorded]:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        yield Recorded(settings, stack, Path(folder))


BENCH: Bench[Recorded] = Bench("record", _subject)


@BENCH.row("ms", Bar("ratio", "<=", 1.05))
def recording_p50(recorded: Recorded) -> Measured:
    """Median round trip of a tick of 16 sessions at 5 Hz with 96 x 96 images that are recorded, against ones that are
    not, in turns."""
    return recorded.cost


@BENCH.row("ticks", Bar("ours", "<=", 0))
def replay_differs(recorded: Recorded) -> Measured:
    """Of 1,000 recorded ticks, those that a server started anew answers otherwise, by any bit."""
    return Measured(recorded.differing)
