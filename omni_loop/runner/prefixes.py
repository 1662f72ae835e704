"""Blocks that many sessions begin with, by the hash of what they hold: the instruction, a system prompt.

Every entry holds a reference on its blocks, so they outlive the sessions that use them, and are given up, least
recently used first, when blocks are needed and nobody else uses them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence


class Prefixes:
    """The pool's table of them. It counts nothing itself: the pool does when it adds and gives up."""

    __slots__ = ("_blocks", "_entries")

    def __init__(self) -> None:
        self._entries: OrderedDict[bytes, tuple[int, ...]] = OrderedDict()  # the least recently used first
        self._blocks: set[int] = set()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, block: int) -> bool:
        """Whether an entry holds ``block``."""
        return block in self._blocks

    def __iter__(self) -> Iterator[int]:
        """Every block held, each once: no block is in two entries."""
        return iter(self._blocks)

    def find(self, key: bytes) -> tuple[int, ...] | None:
        """The blocks of ``key``, which is now the one used last."""
        blocks = self._entries.get(key)
        if blocks is not None:
            self._entries.move_to_end(key)
        return blocks

    def add(self, key: bytes, blocks: Sequence[int]) -> None:
        self._entries[key] = tuple(blocks)
        self._blocks.update(blocks)

    def give_up(self, n: int, idle: Callable[[int], bool]) -> list[int]:
        """Forget entries of which a block is idle until ``n`` such blocks are won, or there are no more; returns all
        blocks of the entries forgotten."""
        blocks: list[int] = []
        won = 0
        for key, entry in list(self._entries.items()):
            if won >= n:
                break
            if found := sum(map(idle, entry)):
                del self._entries[key]
                self._blocks.difference_update(entry)
                blocks += entry
                won += found
        return blocks
