"""Sessions of the shipped pipelines over the orchestrator, run in several ways; also as a process of its own."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from omni_loop.config import Deployment, RunnerConfig, SnapshotConfig
from omni_loop.loop.orchestrator import Orchestrator
from omni_loop.loop.request import SessionInfo, TickRequest
from omni_loop.types import Op, TickResult

PIPELINES = ("pusht-imagine", "pusht-world", "pusht")
TICKS = 8
Said = dict[str, np.ndarray[Any, Any]]


@asynccontextmanager
async def core(checkpoints: str, snapshots: str | None = None, wait_ms: float = 0.0) -> AsyncIterator[Orchestrator]:
    stages = ("context", "frames", "decode", "act")
    deployment = Deployment(
        pipelines=PIPELINES,
        runners=(RunnerConfig(name="one", max_wait_ms=wait_ms),),
        snapshots=SnapshotConfig(folder=snapshots),
        stage_options={stage: {"checkpoints": checkpoints} for stage in stages},
    )
    made = await Orchestrator.start(deployment)
    try:
        yield made
    finally:
        await made.stop(5.0)


class Walk:
    """A session whose every tick is drawn from its seed and its number: two of one seed ask for the same."""

    def __init__(self, made: Orchestrator, info: SessionInfo, seed: int, done: int = 0) -> None:
        self.made, self.info, self.seed, self.done = made, info, seed, done
        self.seq = info.last_seq

    async def tick(self) -> Said:
        self.seq += 1
        said = spoken(await self.made.tick(self._request(self.done)))
        self.done += 1
        return said

    async def walk(self, upto: int = TICKS) -> list[Said]:
        return [await self.tick() for _ in range(self.done, upto)]

    async def fork(self) -> Walk:
        return Walk(self.made, await self.made.fork(self.info.id, self.info.token), self.seed, self.done)

    async def rewind(self, to: int) -> None:
        """Back to where it stood when ``to`` ticks were done."""
        await self.made.rewind(self.info.id, self.info.token, self._stands(to))
        self.done = to

    def _request(self, n: int) -> TickRequest:
        """Ticks see, imagine, see, ...: four steps each."""
        draw = np.random.default_rng([self.seed, n])
        head = (self.info.id, self.info.token, self.seq)
        actions = draw.uniform(100, 400, (4, 2)).astype(np.float32)
        image = draw.integers(0, 256, (4, 96, 96, 3)).astype(np.uint8)
        if self.info.spec.pipeline == "pusht-world":
            if n % 2:
                return TickRequest(*head, Op.PREDICT, actions=actions)
            executed = actions if n else actions[1:]
            return TickRequest(*head, Op.RECONDITION, self._stands(n) + 1 if n else 0, {"image": image}, executed)
        if n % 2 and self.info.spec.pipeline == "pusht-imagine":
            return TickRequest(*head, Op.PREDICT, steps=4)
        step = 4 * n
        apart = 0 if n == 0 else 8 if self.info.spec.pipeline == "pusht-imagine" else 4
        executed = draw.uniform(100, 400, (apart, 2)).astype(np.float32)
        seen = {"image": image[0], "agent_pos": draw.uniform(100, 400, (2, 2)).astype(np.float32)}
        return TickRequest(*head, Op.INFER, step, seen, executed, frames=4)

    def _stands(self, n: int) -> int:
        """The session's step when ``n`` ticks are done."""
        if self.info.spec.pipeline == "pusht-world":
            return 4 * n - 1
        return 4 * n if self.info.spec.pipeline == "pusht-imagine" else 4 * (n - 1)


def spoken(result: TickResult) -> Said:
    """What the models said: actions in -1..1, frames, points in -1..1, progress."""
    if result.frames_error is not None:
        raise result.frames_error
    said: Said = {}
    if result.chunk is not None:
        said["act"] = result.chunk.actions / 256 - 1
    if result.frames is not None:
        said["frames"] = result.frames.frames.astype(np.int16)
        assert result.frames.scene is not None
        said["scene"] = result.frames.scene / 256 - 1
    if result.progress is not None:
        said["context"] = np.array([result.progress.progress, result.progress.done])
    return said


def apart(one: Sequence[Said], other: Sequence[Said]) -> float:
    """The greatest difference of what two walks said; a pixel's least step counts as nothing unless all is equal."""
    assert len(one) == len(other)
    worst = 0.0
    for a, b in zip(one, other, strict=True):
        assert a.keys() == b.keys()
        for name, value in a.items():
            worst = max(worst, float(np.abs(value - b[name]).max()))
    return worst


async def _restored(checkpoints: str, snapshots: str, seed: int, done: int, out: str) -> None:
    async with core(checkpoints, snapshots) as made:
        said = {}
        for pipeline in PIPELINES:
            walk = Walk(made, await made.restore(pipeline), seed, done)
            for n, tick in enumerate(await walk.walk()):
                said |= {f"{pipeline}/{n}/{name}": value for name, value in tick.items()}
        np.savez(out, **said)


if __name__ == "__main__":
    asyncio.run(_restored(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]))
    print(Path(sys.argv[5]).stat().st_size)
