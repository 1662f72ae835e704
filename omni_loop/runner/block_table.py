"""A session's list of blocks: which ones it holds, at which model position, and what a tick staged.

No memory is touched here. Positions count blocks since the session began; storage is wherever the pool had room,
so a window slides without moving anything and a rollout has no last frame::

    position   0 1      |  gone  |   7  8  9 10 | 11
    held       sink            window             staged by the tick under way
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from ..errors import InvalidInput


class Provenance(IntEnum):
    """What a block holds. SCRATCH: staged by a tick that is not committed yet."""

    FREE = 0
    SCRATCH = 1
    IMAGINED = 2
    OBSERVED = 3


@dataclass(slots=True)
class Layout:
    """Blocks held. ``window`` ends at position ``end``; ``sink`` begins at 0. All positions are in blocks."""

    sink: list[int] = field(default_factory=list)
    window: list[int] = field(default_factory=list)
    end: int = 0
    observed: list[tuple[int, int]] = field(default_factory=list)  # runs [begin, end) of observed blocks, in order

    def copy(self) -> Layout:
        return Layout(self.sink.copy(), self.window.copy(), self.end, self.observed.copy())

    @property
    def first(self) -> int:
        """Position of the window's first block."""
        return self.end - len(self.window)

    @property
    def observed_end(self) -> int:
        """Everything from here on is the imagined tail."""
        return self.observed[-1][1] if self.observed else 0

    @property
    def blocks(self) -> list[int]:
        """Oldest first."""
        return self.sink + self.window


class BlockTable:
    """Made by a pool, changed only through it.

    ``committed`` is what the session has; the first change in a tick copies it to ``staged``. ``fresh`` are the
    blocks the tick reserved, ``dropped`` those it no longer sees. Nothing is freed before commit or discard, so
    whatever was read during a tick keeps its content until the tick is decided.
    """

    __slots__ = ("committed", "dropped", "fresh", "scratch_blocks", "sink_blocks", "staged", "window_blocks")

    def __init__(self, sink_blocks: int, window_blocks: int, scratch_blocks: int) -> None:
        self.sink_blocks = sink_blocks
        self.window_blocks = window_blocks
        self.scratch_blocks = scratch_blocks
        self.committed = Layout()
        self.staged: Layout | None = None
        self.fresh: dict[int, Provenance] = {}  # block -> what it becomes at commit
        self.dropped: list[int] = []

    @property
    def layout(self) -> Layout:
        """What the tick under way sees."""
        return self.staged or self.committed

    @property
    def references(self) -> list[int]:
        """Every block this table keeps from being freed."""
        return [*self.committed.blocks, *self.fresh]

    def append(self, blocks: Sequence[int], imagined: bool) -> None:
        """Stage ``blocks`` at the end; the window slides."""
        layout = self._stage()
        into_sink = max(0, min(self.sink_blocks - layout.end, len(blocks)))
        layout.sink += blocks[:into_sink]
        layout.window += blocks[into_sink:]
        if not imagined:
            begin = layout.observed.pop()[0] if layout.observed_end == layout.end > 0 else layout.end
            layout.observed.append((begin, layout.end + len(blocks)))
        layout.end += len(blocks)
        provenance = Provenance.IMAGINED if imagined else Provenance.OBSERVED
        for block in blocks:
            self.fresh[block] = provenance
        self._drop_window(len(layout.window) - self.window_blocks)

    def drop_before(self, position: int) -> None:
        """Stage dropping what lies behind the sink and before ``position``."""
        layout = self._stage()
        self._drop_window(min(position, layout.end) - layout.first)

    def truncate(self, end: int) -> None:
        """Stage dropping every block at a position >= ``end`` that is still held."""
        if not 0 <= end <= self.layout.end:
            raise InvalidInput(f"cannot truncate to block {end}: the table ends at block {self.layout.end}")
        layout = self._stage()
        keep = max(0, end - layout.first)
        self.dropped += layout.window[keep:] + layout.sink[end:]
        del layout.window[keep:], layout.sink[end:]
        layout.end = end
        while layout.observed_end > end:
            begin = layout.observed.pop()[0]
            if begin < end:
                layout.observed.append((begin, end))

    def settle(self, commit: bool) -> tuple[dict[int, Provenance], list[int]]:
        """End the tick. Returns the blocks it reserved and, of all blocks referenced before, those to release."""
        fresh, release = self.fresh, self.dropped if commit else list(self.fresh)
        if commit and self.staged is not None:
            self.committed = self.staged
        self.staged, self.fresh, self.dropped = None, {}, []
        return fresh, release

    def _stage(self) -> Layout:
        if self.staged is None:
            self.staged = self.committed.copy()
        return self.staged

    def _drop_window(self, n: int) -> None:
        if n <= 0:
            return
        layout = self._stage()
        self.dropped += layout.window[:n]
        del layout.window[:n]
        if len(layout.observed) > 1:
            self._join_runs(layout)

    def _join_runs(self, layout: Layout) -> None:
        """Join runs between which nothing is held any more, so that their number is bounded by what is held."""
        runs: list[tuple[int, int]] = []
        for begin, end in layout.observed:
            if runs and runs[-1][1] >= self.sink_blocks and begin <= layout.first:
                runs[-1] = (runs[-1][0], end)
            else:
                runs.append((begin, end))
        layout.observed = runs
