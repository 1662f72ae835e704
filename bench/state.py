"""``omni-loop bench state``: what state costs and what batches of sessions gain, on the shipped models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

import torch

from . import plot
from .batching import IMAGINED, Batches
from .books import Books, Forks, idle
from .rollout import Curve, Rolled, roll
from .rows import Bar, Bench, Measured, Result, Settings
from .sessions import one_thread


class State:
    """Figures that several rows share are computed once."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def rounds(self, n: int) -> int:
        return 2 if self.settings.quick else n

    @cached_property
    def batches(self) -> Batches:
        return Batches(self.settings.checkpoints, self.rounds(20))

    @cached_property
    def rolled(self) -> Rolled:
        return roll(self.settings.checkpoints, Curve.quick() if self.settings.quick else Curve())

    @cached_property
    def forks(self) -> Forks:
        return Forks(self.settings.checkpoints, self.rounds(30))

    @cached_property
    def books(self) -> Books:
        return Books(self.settings.checkpoints, 50 if self.settings.quick else 2000)

    def growth(self, stage: str) -> Measured:
        """One batch of 16 sessions, against one session."""
        many, one = self.batches.ms(stage)
        return Measured(many, one)


@contextmanager
def _subject(settings: Settings) -> Iterator[State]:
    with one_thread(), torch.no_grad():
        yield State(settings)


BENCH: Bench[State] = Bench("state", _subject)


@BENCH.row("CPU ms", Bar("ratio", "<=", 5), "batch")
def frames_16(state: State) -> Measured:
    """A tick of 8 frames of 16 sessions in one batch, against of one session."""
    return state.growth("frames")


@BENCH.row("CPU ms", Bar("ratio", "<=", 3), "batch")
def context_16(state: State) -> Measured:
    """A real observation read by 16 sessions in one batch, against by one session."""
    return state.growth("context")


@BENCH.row("CPU ms", Bar("ratio", "<=", 3), "batch")
def context_imagined_16(state: State) -> Measured:
    """Imagined latents read by 16 sessions in one batch, against by one session: no image is encoded."""
    return state.growth(IMAGINED)


@BENCH.row("CPU ms", Bar("ratio", "<=", 3), "batch")
def act_16(state: State) -> Measured:
    """Action chunks of 16 sessions in one batch, against of one session."""
    return state.growth("act")


@BENCH.row("CPU ms", group="batch")
def decode_16(state: State) -> Measured:
    """8 frames of each of 16 sessions decoded in one batch, against of one session."""
    return state.growth("decode")


@BENCH.row("CPU ms", Bar("ratio", "<=", 1.05), "rollout")
def rollout_p50(state: State) -> Measured:
    """Median time of a frame around frame 4,000 of a rollout, against around frame 100 of others, in turns."""
    return Measured(state.rolled.late_ms, state.rolled.early_ms)


@BENCH.row("blocks", Bar("ratio", "<=", 1), "rollout")
def rollout_blocks(state: State) -> Measured:
    """Most KV blocks held from frame 1,000 to 5,000, against before."""
    return Measured(*state.rolled.blocks)


@BENCH.row("bytes/frame", Bar("ours", "<=", 64), "rollout")
def rollout_memory(state: State) -> Measured:
    """Slope of the process' resident memory from frame 1,000 to 5,000, against the KV of one frame."""
    return Measured(*state.rolled.slope)


@BENCH.row("us", Bar("ours", "<=", 50), "fork")
def fork(state: State) -> Measured:
    """Fork of a session whose windows are full, in all stages, against copying its KV."""
    return Measured(state.forks.fork_us, state.forks.copy_us)


@BENCH.row("blocks", Bar("ours", "<=", 0), "fork")
def fork_blocks(state: State) -> Measured:
    """Blocks that 64 forks of that session take, against the blocks it holds."""
    return Measured(state.forks.taken, state.forks.held)


@BENCH.row("blocks", Bar("ours", "<=", 1), "fork")
def fork_diverged(state: State) -> Measured:
    """Blocks per fork once each of the 64 has imagined a frame of its own, against a copy of the frames' cache."""
    return Measured(*state.forks.diverged)


@BENCH.row("us", Bar("ours", "<=", 10), "books")
def reserve_commit(state: State) -> Measured:
    """Reserving and committing a block of a full window, which drops its oldest."""
    return Measured(state.books.reserve_commit_us)


@BENCH.row("us", Bar("ours", "<=", 20), "books")
def tick_books(state: State) -> Measured:
    """All of a tick's bookkeeping in the frames stage: begin, reserve, seal, commit; no tensor is touched."""
    return Measured(state.books.tick_us)


@BENCH.row("us", Bar("ours", "<", 50), "books")
def stats_1000(state: State) -> Measured:
    """Statistics of a state manager with 1,000 sessions, against with one."""
    return Measured(*state.books.stats_us)


@BENCH.row("CPU ms", Bar("ratio", "<=", 1.02), "idle")
def idle_1000(state: State) -> Measured:
    """A tick of one frame of a session beside 1,000 idle ones, against of a session alone."""
    quick = state.settings.quick
    return Measured(*idle(state.settings.checkpoints, 20 if quick else 1000, state.rounds(300)))


def _draw(state: State, results: Sequence[Result], path: Path) -> None:
    plot.draw(path, results, state.rolled.curve if "rolled" in vars(state) else ())


BENCH.picture = _draw
