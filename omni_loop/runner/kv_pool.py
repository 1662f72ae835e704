"""The paged KV pool: one tensor, blocks counted by reference, tables that stage and commit.

Storage is ``[layers, 2, num_blocks, block_size, kv_heads, head_dim]`` (key 0, value 1). The block is not the first
axis, so that one ``index_select`` gathers all layers, and neighbouring blocks are a view of them. Keys are stored as
the model gives them (un-roped). A committed block is never written again, so a fork shares it without a copy.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..errors import Exhausted, StateError, TensorError
from ..stage import KVSpec
from .block_table import BlockTable, Layout, Provenance
from .books import PoolStats, check_pool
from .prefixes import Prefixes

_FREE, _SCRATCH = Provenance.FREE, Provenance.SCRATCH
_IMAGINED, _OBSERVED = Provenance.IMAGINED, Provenance.OBSERVED


class KVPool:
    """Blocks of one geometry, for one runner's thread. Blocks never leave it."""

    def __init__(
        self,
        spec: KVSpec,
        num_blocks: int,
        *,
        name: str = "kv",
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        make_room: Callable[[int], float] | None = None,
    ) -> None:
        """``make_room(n)`` is asked to free ``n`` blocks when they are missing; it answers after how many ms a retry
        may find them."""
        if num_blocks < 1:
            raise ValueError(f"pool {name!r} needs at least one block, not {num_blocks}")
        self.name = name
        self.spec = spec
        self.num_blocks = num_blocks
        self.make_room = make_room
        shape = (spec.layers, 2, num_blocks, spec.block_size, spec.kv_heads, spec.head_dim)
        # Pages of memory nobody wrote to cost nothing, and nothing is read that was not written.
        self.storage = torch.empty(shape, dtype=dtype, device=device)
        self.block_bytes = block_bytes(spec, dtype)
        self._references = [0] * num_blocks
        self._provenance = [_FREE] * num_blocks
        # In the order they were freed, and taken in that order: what a window drops one by one are neighbours again
        # when they come back.
        self._free = OrderedDict.fromkeys(range(num_blocks))
        self._shares = 0  # sum of all reference counts
        self._cached = 0  # blocks that only the prefixes hold
        self._prefixes = Prefixes()
        self._tables: dict[int, BlockTable] = {}

    def open(self, sink_blocks: int | None = None, window_blocks: int | None = None) -> BlockTable:
        """An empty table, with the spec's sink and window unless others are given."""
        sink = self.spec.sink_blocks if sink_blocks is None else sink_blocks
        window = self.spec.window_blocks if window_blocks is None else window_blocks
        table = BlockTable(sink, window, self.spec.scratch_blocks)
        self._tables[id(table)] = table
        return table

    def reserve(self, table: BlockTable, n: int, imagined: bool = False) -> list[int]:
        """Stage ``n`` blocks at the table's end: all of them or none.

        Raises:
            Exhausted: the pool has fewer and nobody can give up any, or one tick may not stage so many.
        """
        if len(table.fresh) + n > table.scratch_blocks:
            text = f"one tick may stage {table.scratch_blocks} blocks of {self.name!r}, not {len(table.fresh) + n}"
            raise Exhausted(text, retryable=False)
        if n > len(self._free):
            self._find_room(n)
        held = table.layout.blocks
        blocks = self._take(n, held[-1] + 1 if held else -1)
        table.append(blocks, imagined)
        return blocks

    def write(self, blocks: Sequence[int], kv: Tensor) -> None:
        """Fill reserved blocks from ``kv float[layers, 2, n * block_size, kv_heads, head_dim]``."""
        spec, n = self.spec, len(blocks)
        if tuple(kv.shape) != (want := (spec.layers, 2, n * spec.block_size, spec.kv_heads, spec.head_dim)):
            raise TensorError(f"{n} blocks of {self.name!r} take a tensor of shape {want}, not {tuple(kv.shape)}")
        if any(self._provenance[b] is not _SCRATCH for b in blocks):
            raise StateError(
                f"only blocks reserved in this tick may be written; {list(blocks)} of {self.name!r} are not"
            )
        with torch.no_grad():
            source = kv.detach().unflatten(2, (n, spec.block_size))
            if (first := _run(blocks)) is not None:
                self.storage[:, :, first : first + n].copy_(source)
            else:
                self.storage[:, :, self.index(blocks)] = source.to(self.storage)

    def gather(self, table: BlockTable) -> Tensor:
        """``[layers, 2, tokens, kv_heads, head_dim]``, oldest first: a view when the blocks are neighbours, else one
        copy. Read-only, and valid until the tick is decided."""
        return self.read(table.layout.blocks).flatten(2, 3)

    def read(self, blocks: Sequence[int]) -> Tensor:
        """``[layers, 2, n, block_size, kv_heads, head_dim]`` of ``blocks``, which must be held: as :meth:`gather`."""
        if not blocks:
            return self.storage[:, :, :0]
        if (first := _run(blocks)) is not None:
            return self.storage[:, :, first : first + len(blocks)]
        return self.storage.index_select(2, self.index(blocks))

    def index(self, blocks: Sequence[int]) -> Tensor:
        return torch.tensor(blocks, device=self.storage.device)

    def truncate(self, table: BlockTable, end: int) -> None:
        """Stage dropping every block at a position >= ``end`` (in blocks): rollback and rewind."""
        table.truncate(end)

    def drop_before(self, table: BlockTable, position: int) -> None:
        """Stage dropping blocks before ``position`` (in blocks) that are not in the sink."""
        table.drop_before(position)

    def share(self, table: BlockTable, key: bytes) -> bool:
        """Stage the blocks of the prefix ``key`` at the end of an empty table; False when nobody published it."""
        if (blocks := self._prefixes.find(key)) is None:
            return False
        if len(table.fresh) + len(blocks) > table.scratch_blocks:
            text = f"one tick may stage {table.scratch_blocks} blocks of {self.name!r}, not {len(blocks)} of a prefix"
            raise Exhausted(text, retryable=False)
        for block in (taken := table.adopt(blocks)):
            if self._references[block] == 1:
                self._cached -= 1
            self._references[block] += 1
        self._shares += len(taken)
        return True

    def publish(self, key: bytes, blocks: Sequence[int]) -> None:
        """Blocks reserved and written in this tick are the prefix ``key``, whatever becomes of the tick."""
        if any(self._provenance[b] is not _SCRATCH for b in blocks):
            raise StateError(f"only blocks reserved in this tick can begin a prefix of {self.name!r}")
        for block in blocks:
            self._provenance[block] = _OBSERVED
            self._references[block] += 1
        self._shares += len(blocks)
        self._prefixes.add(key, blocks)

    def commit(self, table: BlockTable) -> None:
        """Make what the tick staged permanent and free what it dropped."""
        self._release(self.settle(table))

    def settle(self, table: BlockTable) -> list[int]:
        """As :meth:`commit`, but the blocks that were committed and are dropped keep their references, which the
        caller gives back or has the table keep."""
        fresh, dropped = table.settle(commit=True)
        provenance = self._provenance
        for block, kind in fresh.items():
            provenance[block] = kind
        if not dropped or fresh.keys().isdisjoint(dropped):
            return dropped
        self._release([block for block in dropped if block in fresh])  # staged and dropped in the same tick
        return [block for block in dropped if block not in fresh]

    def discard(self, table: BlockTable) -> None:
        """Undo what the tick staged."""
        self._release(table.settle(commit=False)[1])

    def release(self, blocks: Sequence[int]) -> None:
        """Give back one reference on each of ``blocks``."""
        self._release(blocks)

    def rewind(self, table: BlockTable, layout: Layout, kept: Sequence[Sequence[int]]) -> None:
        """Between ticks: as :meth:`BlockTable.rewind`, and free what is no longer held."""
        self._release(table.rewind(layout, kept))

    def fork(self, table: BlockTable) -> BlockTable:
        """A second table on the same committed blocks; no block is copied, now or later.

        Raises:
            StateError: ``table`` has a tick under way.
        """
        if table.staged is not None:
            raise StateError(f"a table of {self.name!r} can be forked only between ticks")
        return self.branch(table)

    def branch(self, table: BlockTable) -> BlockTable:
        """A table on the blocks that ``table`` sees now, staged ones included. It must be freed before the tick of
        ``table`` is decided unless nothing is staged."""
        child = self.open(table.sink_blocks, table.window_blocks)
        self.adopt(child, table.committed if table.staged is None else table.staged.copy())
        return child

    def adopt(self, table: BlockTable, layout: Layout) -> None:
        """Give an empty table another one's ``layout``, by reference."""
        references = self._references
        for block in layout.blocks:
            references[block] += 1
        self._shares += len(layout.blocks)
        table.committed = layout

    def place(self, table: BlockTable, layout: Layout, content: Tensor) -> None:
        """Give an empty table the ``layout``, whose block numbers are replaced, with the ``content
        [layers, 2, n, block_size, kv_heads, head_dim]`` of another pool's table.

        Raises:
            Exhausted: the pool has no ``n`` blocks; nothing is taken.
        """
        n = len(layout.blocks)
        if n > len(self._free):
            self._find_room(n)
        blocks = self._take(n, -1)
        if blocks:
            self.write(blocks, content.flatten(2, 3))
        for block, position in zip(blocks, layout.positions(), strict=True):
            seen = any(begin <= position < end for begin, end in layout.observed)
            self._provenance[block] = _OBSERVED if seen else _IMAGINED
        table.committed = Layout(blocks, layout.sink, layout.end, layout.observed)

    def reset(self, table: BlockTable) -> None:
        """Empty the table: what is committed, staged and kept."""
        self._release(table.clear())

    def free(self, table: BlockTable) -> None:
        """Empty the table and forget it; it must not be used again."""
        self.reset(table)
        del self._tables[id(table)]

    def provenance(self, block: int) -> Provenance:
        return self._provenance[block]

    @property
    def free_blocks(self) -> int:
        """Blocks that can be reserved without anybody giving up anything."""
        return len(self._free)

    def stats(self) -> PoolStats:
        """O(1)."""
        total, free, cached = self.num_blocks, len(self._free), self._cached
        owned = total - free - cached
        return PoolStats(
            total,
            free,
            cached,
            owned,
            self._shares,
            len(self._tables),
            len(self._prefixes),
            owned * self.block_bytes,
            total * self.block_bytes,
        )

    def check(self) -> None:
        """Verify the books. O(blocks).

        Raises:
            PoolCorrupt: they do not balance.
        """
        check_pool(
            self.name,
            self._tables.values(),
            self._prefixes,
            self._references,
            self._provenance,
            self._free,
            self.stats(),
        )

    def _find_room(self, n: int) -> None:
        """Have at least ``n`` blocks free, or raise Exhausted: shared prefixes nobody uses go first."""
        self.give_up_prefixes(n - len(self._free))
        retry_after_ms = 0.0
        if n > len(self._free) and self.make_room is not None:
            retry_after_ms = self.make_room(n - len(self._free))
        if (missing := n - len(self._free)) > 0:
            raise Exhausted(
                f"KV pool {self.name!r} lacks {missing} of {n} blocks ({self.num_blocks} in all)",
                retryable=n <= self.num_blocks,
                retry_after_ms=retry_after_ms,
                missing_bytes=missing * self.block_bytes,
            )

    def give_up_prefixes(self, n: int) -> None:
        """Free up to ``n`` cached blocks or a few more, those of the prefixes least recently used first."""
        if self._cached and n > 0:
            blocks = self._prefixes.give_up(n, lambda block: self._references[block] == 1)
            self._cached -= sum(self._references[block] == 1 for block in blocks)
            self._release(blocks)

    def _take(self, n: int, follow: int) -> list[int]:
        """``n`` free blocks as SCRATCH, neighbours from ``follow`` on while they are free: the gather of a table of
        neighbours is a view."""
        free, references, provenance = self._free, self._references, self._provenance
        blocks = []
        for _ in range(n):
            if follow in free:
                block = follow
                del free[block]
            else:
                block = free.popitem(last=False)[0]
            references[block] = 1
            provenance[block] = _SCRATCH
            blocks.append(block)
            follow = block + 1
        self._shares += n
        return blocks

    def _release(self, blocks: Sequence[int]) -> None:
        references = self._references
        for block in blocks:
            left = references[block] = references[block] - 1
            if left == 0:
                self._provenance[block] = _FREE
                self._free[block] = None
            elif left == 1 and block in self._prefixes:
                self._cached += 1
        self._shares -= len(blocks)


def block_bytes(spec: KVSpec, dtype: torch.dtype = torch.float32) -> int:
    """Bytes of one block in all layers, keys and values."""
    return spec.layers * 2 * spec.block_size * spec.kv_heads * spec.head_dim * dtype.itemsize


def blocks_per_session(spec: KVSpec) -> int:
    """Blocks one session can hold at once: sink and window, and what two ticks may stage, since blocks that fall
    out of the window are freed only when the tick is decided."""
    return spec.sink_blocks + spec.window_blocks + 2 * spec.scratch_blocks


def _run(blocks: Sequence[int]) -> int | None:
    """The first block when all are neighbours in order, else None."""
    first = blocks[0]
    return (
        first
        if blocks[-1] - first == len(blocks) - 1 and list(blocks) == list(range(first, first + len(blocks)))
        else None
    )
