"""The paged KV pool: one tensor, blocks counted by reference, tables that stage and commit.

Storage is ``[layers, 2, num_blocks, block_size, kv_heads, head_dim]`` (key 0, value 1). The block is not the first
axis, so that one ``index_select`` gathers all layers, and neighbouring blocks are a view of them. Keys are stored as
the model gives them (un-roped). A committed block is never written again, so a fork shares it without a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import Code, Exhausted, OmniLoopError, StateError, TensorError
from ..stage import KVSpec
from .block_table import BlockTable, Provenance


class PoolCorrupt(OmniLoopError):
    """The pool's books do not balance: a bug in this project, never the caller's fault."""

    code = Code.INTERNAL


@dataclass(frozen=True, slots=True)
class PoolStats:
    """``references`` exceeds ``owned`` by what forks share. All counts are of blocks but ``tables`` and bytes."""

    total: int
    free: int
    owned: int
    references: int
    tables: int
    owned_bytes: int
    total_bytes: int


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
    ) -> None:
        if num_blocks < 1:
            raise ValueError(f"pool {name!r} needs at least one block, not {num_blocks}")
        self.name = name
        self.spec = spec
        self.num_blocks = num_blocks
        shape = (spec.layers, 2, num_blocks, spec.block_size, spec.kv_heads, spec.head_dim)
        # Pages of memory nobody wrote to cost nothing, and nothing is read that was not written.
        self.storage = torch.empty(shape, dtype=dtype, device=device)
        self.block_bytes = block_bytes(spec, dtype)
        self._references = [0] * num_blocks
        self._provenance = [Provenance.FREE] * num_blocks
        self._free = dict.fromkeys(range(num_blocks - 1, -1, -1))  # ordered; the last one is taken first
        self._shares = 0  # sum of all reference counts
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
            Exhausted: the pool has fewer free, or one tick may not stage so many.
        """
        if len(table.fresh) + n > table.scratch_blocks:
            text = f"one tick may stage {table.scratch_blocks} blocks of {self.name!r}, not {len(table.fresh) + n}"
            raise Exhausted(text, retryable=False)
        if (missing := n - len(self._free)) > 0:
            raise Exhausted(f"KV pool {self.name!r} lacks {missing} of {n} blocks ({self.num_blocks} in all)")
        layout = table.layout
        tail = layout.window or layout.sink
        follow = tail[-1] + 1 if tail else -1
        blocks = []
        for _ in range(n):
            # Storage neighbours of one table make its gather a view.
            if follow in self._free:
                block = follow
                del self._free[block]
            else:
                block = self._free.popitem()[0]
            self._references[block] = 1
            self._provenance[block] = Provenance.SCRATCH
            blocks.append(block)
            follow = block + 1
        self._shares += n
        table.append(blocks, imagined)
        return blocks

    def write(self, blocks: Sequence[int], kv: Tensor) -> None:
        """Fill reserved blocks from ``kv float[layers, 2, n * block_size, kv_heads, head_dim]``."""
        spec, n = self.spec, len(blocks)
        if tuple(kv.shape) != (want := (spec.layers, 2, n * spec.block_size, spec.kv_heads, spec.head_dim)):
            raise TensorError(f"{n} blocks of {self.name!r} take a tensor of shape {want}, not {tuple(kv.shape)}")
        if any(self._provenance[b] is not Provenance.SCRATCH for b in blocks):
            raise StateError(
                f"only blocks reserved in this tick may be written; {list(blocks)} of {self.name!r} are not"
            )
        with torch.no_grad():
            source = kv.detach().unflatten(2, (n, spec.block_size))
            if (first := _run(blocks)) is not None:
                self.storage[:, :, first : first + n].copy_(source)
            else:
                self.storage[:, :, self._index(blocks)] = source.to(self.storage)

    def gather(self, table: BlockTable) -> Tensor:
        """``[layers, 2, tokens, kv_heads, head_dim]``, oldest first: a view when the blocks are neighbours, else one
        copy. Read-only, and valid until the tick is decided."""
        blocks = table.layout.blocks
        if not blocks:
            return self.storage[:, :, :0].flatten(2, 3)
        if (first := _run(blocks)) is not None:
            return self.storage[:, :, first : first + len(blocks)].flatten(2, 3)
        return self.storage.index_select(2, self._index(blocks)).flatten(2, 3)

    def truncate(self, table: BlockTable, end: int) -> None:
        """Stage dropping every block at a position >= ``end`` (in blocks): rollback and rewind."""
        table.truncate(end)

    def drop_before(self, table: BlockTable, position: int) -> None:
        """Stage dropping blocks before ``position`` (in blocks) that are not in the sink."""
        table.drop_before(position)

    def commit(self, table: BlockTable) -> None:
        """Make what the tick staged permanent and free what it dropped."""
        fresh, release = table.settle(commit=True)
        for block, provenance in fresh.items():
            self._provenance[block] = provenance
        self._release(release)

    def discard(self, table: BlockTable) -> None:
        """Undo what the tick staged."""
        self._release(table.settle(commit=False)[1])

    def fork(self, table: BlockTable) -> BlockTable:
        """A second table on the same committed blocks; no block is copied, now or later.

        Raises:
            StateError: ``table`` has a tick under way.
        """
        if table.staged is not None:
            raise StateError(f"a table of {self.name!r} can be forked only between ticks")
        child = self.open(table.sink_blocks, table.window_blocks)
        child.committed = table.committed.copy()
        for block in (blocks := child.committed.blocks):
            self._references[block] += 1
        self._shares += len(blocks)
        return child

    def reset(self, table: BlockTable) -> None:
        """Empty the table, staged blocks included."""
        self.discard(table)
        table.truncate(0)
        self.commit(table)

    def free(self, table: BlockTable) -> None:
        """Empty the table and forget it; it must not be used again."""
        self.reset(table)
        del self._tables[id(table)]

    def provenance(self, block: int) -> Provenance:
        return self._provenance[block]

    def stats(self) -> PoolStats:
        """O(1)."""
        total, free = self.num_blocks, len(self._free)
        owned = total - free
        return PoolStats(
            total, free, owned, self._shares, len(self._tables), owned * self.block_bytes, total * self.block_bytes
        )

    def check(self) -> None:
        """Verify that free + owned = total and that reference counts equal the tables' references. O(blocks).

        Raises:
            PoolCorrupt: they do not.
        """
        counts = [0] * self.num_blocks
        for table in self._tables.values():
            references = table.references
            if len(set(references)) != len(references):
                raise PoolCorrupt(f"pool {self.name!r}: a table holds a block twice: {references}")
            for block in references:
                counts[block] += 1
            if stray := set(table.layout.blocks) - set(references):
                raise PoolCorrupt(f"pool {self.name!r}: a table sees blocks it does not hold: {sorted(stray)}")
        for block, count in enumerate(counts):
            if count != self._references[block]:
                raise PoolCorrupt(f"pool {self.name!r}: block {block} counts {self._references[block]}, held {count}")
            if (count == 0) != (block in self._free) or (count == 0) != (self._provenance[block] is Provenance.FREE):
                raise PoolCorrupt(f"pool {self.name!r}: block {block} is held by {count} tables, free or not at once")
        if sum(counts) != self._shares:
            raise PoolCorrupt(f"pool {self.name!r}: {self._shares} references on the books, {sum(counts)} held")

    def _release(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._references[block] -= 1
            if self._references[block] == 0:
                self._provenance[block] = Provenance.FREE
                self._free[block] = None
        self._shares -= len(blocks)

    def _index(self, blocks: Sequence[int]) -> Tensor:
        return torch.tensor(blocks, device=self.storage.device)


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
