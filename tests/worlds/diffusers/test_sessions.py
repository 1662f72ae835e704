"""However a session comes to a tick (alone, interleaved, batched, forked, rewound, restored), it shows the same frames:
bit for bit where batches have the same shape, else within a step of a pixel."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from omni_loop.config import Deployment, PipelineConfig, RunnerConfig, SnapshotConfig
from omni_loop.loop.orchestrator import Orchestrator
from omni_loop.loop.request import SessionInfo, TickRequest
from omni_loop.types import Op

from . import tiny

pytest.importorskip("transformers")
pytest.importorskip("torchvision")
pytestmark = pytest.mark.parametrize("name", ["cosmos25", "action", "wan22"])

# Real frames from a step on, or so many imagined ones; Wan's chunks of 8 are left and begun in the middle.
TICKS: list[tuple[int, int] | int] = [(0, 6), 4, 8, (9, 2), 8, 4]
STANDS = [5, 9, 17, 10, 18, 22]
OPTIONS: dict[str, dict[str, Any]] = {
    "cosmos25": {**tiny.COSMOS, "frames": 13, "action_dim": 3},
    "action": {**tiny.COSMOS, "frames": 13, "context": 1},
    "wan22": {**tiny.WAN, "frames": 9, "action_dim": 3},
}
Shown = list[NDArray[np.int16]]


@asynccontextmanager
async def core(
    folders: dict[str, Path], name: str, snapshots: Path | None = None, wait_ms: float = 0.0
) -> AsyncIterator[Orchestrator]:
    options = {**OPTIONS[name], "checkpoint": str(folders[name])}
    deployment = Deployment(
        pipelines=(PipelineConfig(name=name, template="wan" if name == "wan22" else "cosmos", options=options),),
        runners=(RunnerConfig(name="one", max_wait_ms=wait_ms),),
        snapshots=SnapshotConfig(folder=None if snapshots is None else str(snapshots)),
    )
    made = await Orchestrator.start(deployment)
    try:
        yield made
    finally:
        await made.stop(5.0)


class Walk:
    def __init__(self, made: Orchestrator, info: SessionInfo, seed: int, done: int = 0) -> None:
        self.made, self.info, self.seed, self.done = made, info, seed, done
        self.seq = info.last_seq

    async def tick(self) -> Shown:
        draw = np.random.default_rng([self.seed, self.done])
        head, todo = (self.info.id, self.info.token, self.seq + 1), TICKS[self.done]
        if isinstance(todo, tuple):
            first, n = todo
            image = draw.integers(0, 256, (n, tiny.HEIGHT, tiny.WIDTH, 3), np.uint8)
            executed = np.zeros((n - (first == 0), 3), np.float32)
            request = TickRequest(*head, Op.RECONDITION, first, {"image": image}, executed)
        else:
            request = TickRequest(*head, Op.PREDICT, actions=draw.uniform(-1, 1, (todo, 3)).astype(np.float32))
        result = await self.made.tick(request)
        self.seq, self.done = self.seq + 1, self.done + 1
        if result.frames is None:
            return []
        assert result.frames.first_step == STANDS[self.done - 2] + 1
        return [result.frames.frames.astype(np.int16)]

    async def walk(self, upto: int = len(TICKS)) -> Shown:
        return [frames for _ in range(self.done, upto) for frames in await self.tick()]


async def begin(made: Orchestrator, name: str, seed: int) -> Walk:
    return Walk(made, await made.open(name, seed, prompt="a cat"), seed)


def apart(one: Sequence[NDArray[np.int16]], other: Sequence[NDArray[np.int16]]) -> int:
    return max(int(np.abs(a - b).max()) for a, b in zip(one, other, strict=True))


async def test_interleaved_and_forked_sessions_agree_bit_for_bit(folders: dict[str, Path], name: str) -> None:
    async with core(folders, name) as made:
        alone = [await (await begin(made, name, seed)).walk() for seed in (1, 2)]
        assert apart(*alone) > 1  # other seeds, other frames
        walks = [await begin(made, name, seed) for seed in (1, 2)]
        said: list[Shown] = [[], []]
        for i in (0, 0, 1, 0, 1, 1, 1, 0, 0, 1, 1, 0):
            said[i] += await walks[i].tick()
        for got, want in zip(said, alone, strict=True):
            assert apart(got, want) == 0
        parent = await begin(made, name, 1)
        before = await parent.walk(2)
        child = Walk(made, await made.fork(parent.info.id, parent.info.token), 1, 2)
        for heir in (child, parent):
            assert apart([*before, *(await heir.walk())], alone[0]) == 0


async def test_batched_sessions_agree(folders: dict[str, Path], name: str) -> None:
    async with core(folders, name, wait_ms=200.0) as made:
        walks = [await begin(made, name, seed) for seed in (1, 2, 3)]
        together = await asyncio.gather(*(walk.walk(3) for walk in walks))
        for got, seed in zip(together, (1, 2, 3), strict=True):
            assert apart(got, await (await begin(made, name, seed)).walk(3)) <= 1


async def test_whatever_came_after_a_rewind_undoes_it(folders: dict[str, Path], name: str) -> None:
    """Noise follows the epoch, which a rewind begins anew: so all that are compared were rewound."""
    said = []
    async with core(folders, name) as made:
        for further in (3, 5):
            walk = await begin(made, name, 1)
            await walk.walk(further)
            await made.rewind(walk.info.id, walk.info.token, STANDS[1])
            walk.done = 2
            said.append(await walk.walk())
    assert apart(*said) == 0


async def test_a_restored_session_goes_on(folders: dict[str, Path], name: str, tmp_path: Path) -> None:
    async with core(folders, name, tmp_path / "snapshots") as made:
        walk = await begin(made, name, 1)
        await walk.walk(2)
        await made.snapshot(walk.info.id, walk.info.token, "half")
        want = await walk.walk()
    async with core(folders, name, tmp_path / "snapshots") as made:
        assert apart(await Walk(made, await made.restore("half"), 1, 2).walk(), want) == 0
