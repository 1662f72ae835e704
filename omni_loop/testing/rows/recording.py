"""F10: the disk is full, gone or hangs while sessions are recorded. Nobody waits for it, and no tick is lost unsaid."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
import tempfile
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
from zarr.core.sync import cleanup_resources

from ...config import Deployment, RecordConfig
from ...record.reader import Recording
from ...record.recorder import Recorder
from ...record.table import Tick
from ...types import Op, TickResult
from ..board import Broken, expect
from ..faulty_disk import Disk
from .bed import Bed, Outcome, Robot, bed, check_alone, nothing_leaks, row, same, some_actions
from .toys import NAME

ROBOTS, PART = 3, 4  # PART: ticks after which a part is sealed, so that the disk is asked often
ROUNDS = 3  # of each fault, in CI
SOON_S = 60.0
Fault = Callable[[Disk, Recorder], None]


def measure(seed: int, full: bool) -> float:
    """Ticks answered as if nothing had happened while the disk failed."""
    with tempfile.TemporaryDirectory() as folder, nothing_leaks():
        try:
            return asyncio.run(_all(seed, ROUNDS * (10 if full else 1), Path(folder)))
        finally:
            cleanup_resources()  # zarr's own loop and threads, which it would keep for ever


async def _all(seed: int, rounds: int, folder: Path) -> float:
    draw, disk, served = np.random.default_rng(seed), Disk(), 0
    record = RecordConfig(folder=str(folder), part_ticks=PART, queue_events=32)
    recorder = Recorder(Deployment(pipelines=(NAME,), record=record), disk)
    async with bed(tap=recorder, threads=seed % 2 == 1) as made:
        robots = [await made.open(seed + i) for i in range(ROBOTS)]
        for number in range(rounds):
            await _ticks(robots, draw, 2)
            begin, end = _FAULTS[number % len(_FAULTS)]
            begin(disk, recorder)
            before = recorder.counts.heard
            try:
                await _fails(robots, recorder, draw)
            finally:
                end(disk, recorder)
            served += recorder.counts.heard - before
            await _recovers(made, robots, recorder, draw)
        for robot in robots:
            await check_alone(robot.info.seed, robot)
    _agree(recorder, {robot.info.id: robot for robot in robots})
    return float(served)


async def _fails(robots: list[Robot], recorder: Recorder, draw: np.random.Generator) -> None:
    """Ticks go on, and the recorder says that it does not."""
    for _ in range(100):
        await _ticks(robots, draw, PART)
        await asyncio.sleep(0.01)
        if not recorder.healthy():
            await _ticks(robots, draw, int(draw.integers(1, 2 * PART)))
            return
    raise Broken("a failing disk was not noticed")


async def _recovers(made: Bed, robots: list[Robot], recorder: Recorder, draw: np.random.Generator) -> None:
    """Recording is healthy again after some ticks, without anybody's help."""
    for _ in range(100):
        await _until(lambda: recorder.counts.waiting == 0, "the recorder does not go on when the disk does")
        await _ticks(robots, draw, PART)
        if recorder.healthy():
            await made.settled()
            return
    raise Broken("recording did not recover when the disk did")


async def _ticks(robots: list[Robot], draw: np.random.Generator, n: int) -> None:
    for _ in range(n):
        outcomes = await asyncio.gather(*(_one(robot, draw) for robot in robots))
        for outcome in outcomes:
            expect(isinstance(outcome, TickResult), f"a tick failed with the disk: {outcome}")


def _one(robot: Robot, draw: np.random.Generator) -> Coroutine[Any, Any, Outcome]:
    if robot.step >= 0 and draw.random() < 0.2:
        return robot.predict(some_actions(draw, 2))
    return robot.infer(row(draw), frames=int(draw.integers(0, 3)))


async def _until(true: Callable[[], bool], otherwise: str) -> None:
    for _ in range(round(SOON_S / 0.01)):
        if true():
            return
        await asyncio.sleep(0.01)
    raise Broken(otherwise)


def _agree(recorder: Recorder, robots: dict[str, Robot]) -> None:
    """Every tick is counted once; what is on disk is what was answered, and what is not is a gap."""
    counts = recorder.counts
    done = sum(len(robot.done) for robot in robots.values())
    expect(counts.heard == done, f"{done} ticks were answered, {counts.heard} were heard of")
    said = f"{counts.heard} ticks were heard of, {counts.written} written, {counts.lost} lost"
    expect(counts.heard == counts.written + counts.lost, said)
    expect(counts.lost > 0, "no fault has cost a tick: it was none")
    kept = 0
    for episode in Recording(recorder.run.parent):  # with what was taken elsewhere
        ticks = [tick for tick in episode.ticks if tick.kept]
        kept += len(ticks)
        expect(episode.complete == (len(ticks) == len(robots[episode.session].done)), "an episode hides its gaps")
        answered = {request.seq: (request, result) for request, result in robots[episode.session].done}
        for tick in ticks:
            request, result = answered[tick.seq]
            expect(same(tick.result, result), f"seq {tick.seq} was recorded otherwise than it was answered")
            expect(_asked(tick, request.arrays.get("x")), f"seq {tick.seq}: another observation was recorded")
    expect(kept == counts.written, f"{kept} ticks are on disk, {counts.written} were written")


def _asked(tick: Tick, x: object) -> bool:
    return tick.op is Op.PREDICT or bool(np.array_equal(tick.arrays["x"], np.asarray(x)))


def _fills(disk: Disk, recorder: Recorder) -> None:
    disk.full = True


def _empties(disk: Disk, recorder: Recorder) -> None:
    disk.full = False


def _hangs(disk: Disk, recorder: Recorder) -> None:
    disk.flows.clear()


def _flows(disk: Disk, recorder: Recorder) -> None:
    disk.flows.set()


def _vanishes(disk: Disk, recorder: Recorder) -> None:
    """It is taken elsewhere, and a file in its place lets nothing be written there."""
    for number in itertools.count():
        with contextlib.suppress(OSError):  # the recorder may make it again in between
            recorder.run.rename(recorder.run.with_name(f"taken-{secrets.token_hex(4)}-{number}"))
        with contextlib.suppress(IsADirectoryError):
            recorder.run.write_text("in the way")
            return


def _returns(disk: Disk, recorder: Recorder) -> None:
    recorder.run.unlink()


_FAULTS: tuple[tuple[Fault, Fault], ...] = ((_fills, _empties), (_hangs, _flows), (_vanishes, _returns))
