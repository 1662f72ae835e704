"""A session's list of blocks: which ones it holds, at which model position, and what a tick staged.

No memory is touched here. Positions count blocks since the session began; storage is wherever the pool had room,
so a window slides without moving anything and a rollout has no last frame::

    position   0 1      |  gone  |   7  8  9 10 | 11
    held       sink            window             staged by the tick under way
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from itertools import chain

from ..errors import InvalidInput

Runs = tuple[tuple[int, int], ...]


class Provenance(IntEnum):
    """What a block holds. SCRATCH: staged by a tick that is not committed yet."""

    FREE = 0
    SCRATCH = 1
    IMAGINED = 2
    OBSERVED = 3


_IMAGINED, _OBSERVED = Provenance.IMAGINED, Provenance.OBSERVED


class Layout:
    """Blocks held, oldest first: the first ``sink`` of them begin at position 0, the rest, the window, end at
    position ``end``. ``observed`` are the runs [begin, end) of observed blocks, in order. All in blocks.

    Never changed once committed, so that versions and forks share it.
    """

    __slots__ = ("blocks", "end", "observed", "sink")

    def __init__(self, blocks: list[int], sink: int = 0, end: int = 0, observed: Runs = ()) -> None:
        self.blocks, self.sink, self.end, self.observed = blocks, sink, end, observed

    def copy(self) -> Layout:
        return Layout(self.blocks.copy(), self.sink, self.end, self.observed)

    @property
    def window(self) -> int:
        """Blocks behind the sink."""
        return len(self.blocks) - self.sink

    @property
    def first(self) -> int:
        """Position of the window's first block."""
        return self.end - len(self.blocks) + self.sink

    @property
    def observed_end(self) -> int:
        """Everything from here on is the imagined tail."""
        return self.observed[-1][1] if self.observed else 0

    def positions(self) -> list[int]:
        """Of ``blocks``, in order."""
        return [*range(self.sink), *range(self.first, self.end)]


class BlockTable:
    """Made by a pool, changed only through it.

    ``committed`` is what the session has; the first change in a tick copies it to ``staged``. ``fresh`` are the
    blocks the tick took, ``dropped`` those it no longer sees. Nothing is freed before commit or discard, so whatever
    was read during a tick keeps its content until the tick is decided. ``kept`` are the blocks that later versions
    dropped, one list for each commit (by its identity): a shared prefix may come and go, so a block may be in two.
    """

    __slots__ = ("committed", "dropped", "fresh", "kept", "scratch_blocks", "sink_blocks", "staged", "window_blocks")

    def __init__(self, sink_blocks: int, window_blocks: int, scratch_blocks: int) -> None:
        self.sink_blocks = sink_blocks
        self.window_blocks = window_blocks
        self.scratch_blocks = scratch_blocks
        self.committed = Layout([])
        self.staged: Layout | None = None
        self.fresh: dict[int, Provenance] = {}  # block -> what it becomes at commit
        self.dropped: list[int] = []
        self.kept: dict[int, Sequence[int]] = {}

    @property
    def layout(self) -> Layout:
        """What the tick under way sees."""
        return self.staged or self.committed

    @property
    def references(self) -> list[int]:
        """Every block this table keeps from being freed, as often as it counts."""
        return [*self.committed.blocks, *self.fresh, *chain.from_iterable(self.kept.values())]

    def append(self, blocks: Sequence[int], imagined: bool) -> None:
        """Stage ``blocks`` at the end; the window slides."""
        layout = self.staged or self._stage()
        begin = layout.end
        end = layout.end = begin + len(blocks)
        layout.blocks += blocks
        if begin < self.sink_blocks:
            layout.sink = min(self.sink_blocks, end)
        if not imagined:
            runs = layout.observed
            if runs and runs[-1][1] == begin:
                layout.observed = (*runs[:-1], (runs[-1][0], end))
            else:
                layout.observed = (*runs, (begin, end))
        provenance = _IMAGINED if imagined else _OBSERVED
        fresh = dict.fromkeys(blocks, provenance)
        if self.fresh:
            self.fresh.update(fresh)
        else:
            self.fresh = fresh
        if (n := len(layout.blocks) - layout.sink - self.window_blocks) > 0:
            self._drop_window(layout, n)

    def drop_before(self, position: int) -> None:
        """Stage dropping what lies behind the sink and before ``position``."""
        layout = self.staged or self._stage()
        if (n := min(position, layout.end) - layout.first) > 0:
            self._drop_window(layout, n)

    def truncate(self, end: int) -> None:
        """Stage dropping every block at a position >= ``end`` that is still held."""
        if not 0 <= end <= self.layout.end:
            raise InvalidInput(f"cannot truncate to block {end}: the table ends at block {self.layout.end}")
        layout = self.staged or self._stage()
        keep = layout.sink + end - layout.first if end > layout.first else min(layout.sink, end)
        self.dropped += layout.blocks[keep:]
        del layout.blocks[keep:]
        layout.sink = min(layout.sink, keep)
        layout.end = end
        if layout.observed_end > end:
            layout.observed = tuple((a, min(b, end)) for a, b in layout.observed if a < end)

    def adopt(self, blocks: Sequence[int]) -> list[int]:
        """Append committed, observed ``blocks`` of somebody else; returns those on which this takes a reference: a
        block that the tick dropped is simply not dropped."""
        taken = [block for block in blocks if block not in self.dropped]
        for block in blocks:
            if block in self.dropped:
                self.dropped.remove(block)
        staged = self.fresh
        self.fresh = {}
        self.append(blocks, imagined=False)
        self.fresh = {**staged, **dict.fromkeys(taken, _OBSERVED)}
        return taken

    def settle(self, commit: bool) -> tuple[dict[int, Provenance], list[int]]:
        """End the tick. Returns the blocks it took and those it no longer holds."""
        fresh, release = self.fresh, self.dropped if commit else list(self.fresh)
        if commit and self.staged is not None:
            self.committed = self.staged
        self.staged, self.fresh, self.dropped = None, {}, []
        return fresh, release

    def keep(self, dropped: Sequence[int]) -> None:
        """Hold on to what a commit ``dropped``, for earlier versions."""
        self.kept[id(dropped)] = dropped

    def forget(self, dropped: Sequence[int]) -> None:
        """The reverse of :meth:`keep`, of the same list."""
        del self.kept[id(dropped)]

    def rewind(self, layout: Layout, kept: Sequence[Sequence[int]]) -> list[int]:
        """Between ticks: go back to an earlier version's ``layout``. ``kept`` is what the commits since then dropped.
        Returns the references that are no longer held."""
        needed = set(layout.blocks)
        released = []
        for block in chain(chain.from_iterable(kept), self.committed.blocks):
            if block in needed:
                needed.remove(block)
            else:
                released.append(block)
        for dropped in kept:
            self.forget(dropped)
        self.committed = layout
        return released

    def clear(self) -> list[int]:
        """Hold nothing any more; returns what was held."""
        released = self.references
        self.committed, self.staged = Layout([]), None
        self.fresh, self.dropped, self.kept = {}, [], {}
        return released

    def sees(self) -> chain[int]:
        """Blocks the committed and the staged layout name."""
        return chain(self.committed.blocks, self.staged.blocks if self.staged else ())

    def _stage(self) -> Layout:
        self.staged = self.committed.copy()
        return self.staged

    def _drop_window(self, layout: Layout, n: int) -> None:
        gone = slice(layout.sink, layout.sink + n)
        self.dropped += layout.blocks[gone]
        del layout.blocks[gone]
        if len(layout.observed) > 1:
            layout.observed = self._join_runs(layout)

    def _join_runs(self, layout: Layout) -> Runs:
        """Join runs between which nothing is held any more, so that their number is bounded by what is held."""
        runs: list[tuple[int, int]] = []
        for begin, end in layout.observed:
            if runs and runs[-1][1] >= self.sink_blocks and begin <= layout.first:
                runs[-1] = (runs[-1][0], end)
            else:
                runs.append((begin, end))
        return tuple(runs)
