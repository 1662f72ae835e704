"""What a pool counts, and whether it counts right."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..errors import Code, OmniLoopError
from .block_table import BlockTable, Provenance


class PoolCorrupt(OmniLoopError):
    """The books do not balance: a bug in this project, never the caller's fault."""

    code = Code.INTERNAL


@dataclass(frozen=True, slots=True)
class PoolStats:
    """All counts are of blocks but ``tables``, ``prefixes`` and bytes. ``cached`` blocks are held by shared prefixes
    alone and given up when blocks are needed; ``owned`` by tables. ``references`` exceeds them by what is shared."""

    total: int
    free: int
    cached: int
    owned: int
    references: int
    tables: int
    prefixes: int
    owned_bytes: int
    total_bytes: int


def check_pool(
    name: str,
    tables: Iterable[BlockTable],
    prefixed: Iterable[int],
    references: Sequence[int],
    provenance: Sequence[Provenance],
    free: Mapping[int, None],
    stats: PoolStats,
) -> None:
    """Verify that free + cached + owned = total and that reference counts equal the references of tables, of the
    versions they keep, and of prefixes. O(blocks).

    Raises:
        PoolCorrupt: they do not.
    """
    counts = [0] * stats.total
    for table in tables:
        held, seen = table.references, table.layout.blocks
        for block in held:
            counts[block] += 1
        if len(set(seen)) != len(seen):
            raise PoolCorrupt(f"pool {name!r}: a table sees a block twice: {seen}")
        if stray := set(seen) - set(held):
            raise PoolCorrupt(f"pool {name!r}: a table sees blocks it does not hold: {sorted(stray)}")
    owned = sum(count > 0 for count in counts)
    cached = 0
    for block in prefixed:
        cached += counts[block] == 0
        counts[block] += 1
    for block, count in enumerate(counts):
        if count != references[block]:
            raise PoolCorrupt(f"pool {name!r}: block {block} counts {references[block]}, held {count}")
        if (count == 0) != (block in free) or (count == 0) != (provenance[block] is Provenance.FREE):
            raise PoolCorrupt(f"pool {name!r}: block {block} is held {count} times, free or not at once")
    if sum(counts) != stats.references:
        raise PoolCorrupt(f"pool {name!r}: {stats.references} references on the books, {sum(counts)} held")
    if (owned, cached) != (stats.owned, stats.cached):
        raise PoolCorrupt(f"pool {name!r}: {stats} on the books, {owned} blocks owned and {cached} cached")
