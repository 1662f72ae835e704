"""However a session comes to a tick (alone, interleaved, batched, forked, rewound, restored), it shows the same frames:
bit for bit where batches have the same shape, else within a step of a pixel."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from numpy.typing import NDArray

from omni_loop.config import Deployment, PipelineConfig, SnapshotConfig
from omni_loop.loop.orchestrator import Orchestrator
from omni_loop.loop.request import SessionInfo, TickRequest
from omni_loop.types import Op

from . import tiny

pytest.importorskip("transformers")
pytest.importorskip("torchvision")
pytestmark = pytest.mark.asyncio(loop_scope="module")

# Real frames from a step on, or so many imagined ones; Wan's chunks of 8 are left and begun in the middle.
TICKS: list[tuple[int, int] | int] = [(0, 6), 4, 8, (13, 2), 4]
STANDS = [5, 9, 17, 14, 18]
OPTIONS: dict[str, dict[str, Any]] = {
    "cosmos25": {**tiny.COSMOS, "frames": 13, "action_dim": 3, "history": 4},
    "wan22": {**tiny.WAN, "frames": 9, "action_dim": 3},
}
Shown = list[NDArray[np.int16]]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["cosmos25", "wan22"])
async def made(
    request: pytest.FixtureRequest, folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Orchestrator]:
    """A core that serves one pipeline."""
    name = request.param
    options = {**OPTIONS[name], "checkpoint": str(folders[name])}
    deployment = Deployment(
        pipelines=(PipelineConfig(name="world", template="wan" if name == "wan22" else "cosmos", options=options),),
        snapshots=SnapshotConfig(folder=str(tmp_path_factory.mktemp("snapshots"))),
    )
    core = await Orchestrator.start(deployment)
    yield core
    await core.stop(5.0)


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


async def begin(made: Orchestrator, seed: int = 1) -> Walk:
    return Walk(made, await made.open("world", seed, prompt="a cat"), seed)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def alone(made: Orchestrator) -> list[Shown]:
    """What sessions of seeds 1 and 2 show when nobody else is there."""
    return [await (await begin(made, seed)).walk() for seed in (1, 2)]


def apart(one: Sequence[NDArray[np.int16]], other: Sequence[NDArray[np.int16]]) -> int:
    return max(int(np.abs(a - b).max()) for a, b in zip(one, other, strict=True))


async def test_interleaved_sessions_agree_bit_for_bit(made: Orchestrator, alone: list[Shown]) -> None:
    assert apart(*alone) > 1  # other seeds, other frames
    walks = [await begin(made, seed) for seed in (1, 2)]
    said: list[Shown] = [[], []]
    for i in (0, 0, 1, 0, 1, 1, 1, 0, 0, 1):
        said[i] += await walks[i].tick()
    assert [apart(got, want) for got, want in zip(said, alone, strict=True)] == [0, 0]


async def test_batched_sessions_agree(made: Orchestrator, alone: list[Shown]) -> None:
    walks = [await begin(made, seed) for seed in (1, 2)]
    for got, want in zip(await asyncio.gather(*(walk.walk() for walk in walks)), alone, strict=True):
        assert apart(got, want) <= 1


async def test_a_fork_and_a_restored_session_go_on_as_their_parent(made: Orchestrator, alone: list[Shown]) -> None:
    parent = await begin(made)
    before = await parent.walk(2)
    child = Walk(made, await made.fork(parent.info.id, parent.info.token), 1, 2)
    await made.snapshot(parent.info.id, parent.info.token, "half")
    for heir in (child, parent, Walk(made, await made.restore("half"), 1, 2)):
        assert apart([*before, *(await heir.walk())], alone[0]) == 0


async def test_whatever_came_after_a_rewind_undoes_it(made: Orchestrator) -> None:
    """Noise follows the epoch, which a rewind begins anew: so all that are compared were rewound."""
    said = []
    for further in (2, 3):
        walk = await begin(made)
        await walk.walk(further)
        await made.rewind(walk.info.id, walk.info.token, STANDS[1])
        walk.done = 2
        said.append(await walk.walk())
    assert apart(*said) == 0
