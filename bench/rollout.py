"""One rollout of 5,000 frames: whether its frames get slower, or it holds on to memory."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import linear_regression, median

from torch import Tensor

from omni_loop import registry
from omni_loop.errors import Unsupported
from omni_loop.messages import PayloadKind
from omni_loop.runner.kv_pool import block_bytes
from omni_loop.stage import KVSpec, Payload
from omni_loop.types import Op
from omni_loop_worlds.stages.frames import FramesStage
from omni_loop_worlds.stages.shared import to_px

from .kv import FRAMES, Hands, first_frames
from .sessions import Sessions


@dataclass(frozen=True, slots=True)
class Curve:
    """Frames: ``total`` of the rollout; ``around`` is compared with ``early`` of others, ``width`` on either side;
    memory is judged from ``settled`` on."""

    total: int = 5000
    around: int = 4000
    early: int = 100
    width: int = 240
    settled: int = 1000

    @classmethod
    def quick(cls) -> Curve:
        return cls(total=240, around=200, early=32, width=16, settled=120)


@dataclass(frozen=True, slots=True)
class Rolled:
    """``blocks``: most held from ``settled`` on, and before. ``slope``: of resident memory in bytes per frame, and
    the bytes of a frame's KV. ``curve``: (frame, CPU milliseconds a frame) of every tick."""

    late_ms: float
    early_ms: float
    blocks: tuple[int, int]
    slope: tuple[float, float]
    curve: Sequence[tuple[int, float]]


class Session:
    """One session that imagines tick by tick."""

    def __init__(self, stage: FramesStage, first: Tensor, seed: int) -> None:
        self._sessions, self._first, self._hands = Sessions(stage, 1), first, Hands(1, seed)
        self.ticks = 0

    def tick(self) -> float:
        """CPU milliseconds per frame."""
        inputs = {"actions": Payload(PayloadKind.ACTIONS, {"actions": to_px(self._hands()[0])})}
        if self.ticks == 0:
            inputs["latents"] = Payload(PayloadKind.LATENTS, {"latents": self._first})
        op, begin = Op.PREDICT if self.ticks else Op.INFER, time.thread_time()
        self._sessions.tick(self.ticks, op, [inputs], step=self.ticks * FRAMES)
        self.ticks += 1
        return (time.thread_time() - begin) * 1e3 / FRAMES

    def blocks(self) -> int:
        return self._sessions.blocks()


def roll(checkpoints: str, curve: Curve) -> Rolled:
    """While the rollout is around frame 4,000, young sessions around frame 100 take turns with it, so that both meet
    the same machine."""
    options = {"checkpoints": checkpoints} if checkpoints else {}
    stage: FramesStage = registry.build(registry.STAGES, "frames", options)
    first = first_frames(stage, 1)[0]
    old, near = Session(stage, first, 0), 5  # ticks of a young session around frame `early`
    turns = 2 * curve.width // FRAMES
    young = [Session(stage, first, 1 + i) for i in range(-(-turns // (2 * near)))]
    for session in young:
        for _ in range(max(curve.early // FRAMES - near, 1)):
            session.tick()
    late: list[float] = []
    early: list[float] = []
    points: list[tuple[int, float]] = []
    blocks: dict[bool, int] = {False: 0, True: 0}
    memory: list[tuple[int, int]] = []
    for tick in range(curve.total // FRAMES):
        frame = tick * FRAMES
        points.append((frame, old.tick()))
        if abs(frame - curve.around) < curve.width:
            late.append(points[-1][1])
            early.append(young[len(early) // (2 * near)].tick())
        settled = frame >= curve.settled
        blocks[settled] = max(blocks[settled], old.blocks())
        if settled:
            memory.append((frame, resident()))
    slope = linear_regression(*zip(*memory, strict=True)).slope
    spec = stage.state_specs()["kv"]
    assert isinstance(spec, KVSpec)
    return Rolled(median(late), median(early), (blocks[True], blocks[False]), (slope, float(block_bytes(spec))), points)


def resident() -> int:
    """Bytes of this process in memory.

    Raises:
        Unsupported: this system has no ``/proc``.
    """
    path = Path("/proc/self/statm")
    if not path.exists():
        raise Unsupported("resident memory is read from /proc, which this system does not have")
    return int(path.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
