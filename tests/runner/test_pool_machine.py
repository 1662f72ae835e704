"""The pool against a model that knows positions and values but no blocks, under any order of operations."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from omni_loop.errors import Exhausted, InvalidInput, StateError
from omni_loop.runner.block_table import BlockTable, Provenance
from omni_loop.runner.kv_pool import KVPool
from omni_loop.stage import KVSpec

SPEC = KVSpec(layers=1, kv_heads=1, head_dim=1, block_size=1, window_blocks=3, sink_blocks=2, scratch_blocks=4)
BLOCKS = 12
TABLES = 4  # few, so that much happens to each
WHICH = st.integers(0, TABLES - 1)
PREFIXES = {b"one": [1001], b"two": [1002, 1003], b"six": [1004, 1005, 1006]}


@dataclass
class Model:
    """What one table should hold: a value per position, and for every position ever whether it is imagined."""

    held: dict[int, int] = field(default_factory=dict)
    imagined: list[bool] = field(default_factory=list)

    def copy(self) -> Model:
        return Model(dict(self.held), list(self.imagined))

    def append(self, values: list[int], imagined: bool) -> None:
        for value in values:
            self.held[len(self.imagined)] = value
            self.imagined.append(imagined)
        behind = sorted(p for p in self.held if p >= SPEC.sink_blocks)
        if len(behind) > SPEC.window_blocks:
            self.drop_before(behind[-SPEC.window_blocks])

    def drop_before(self, position: int) -> None:
        held = {p: v for p, v in self.held.items() if p >= position or p < SPEC.sink_blocks}
        if held == self.held:
            return
        self.held = held
        # What was imagined between real blocks is forgotten once none of it is held.
        begin = None
        for p, imagined in enumerate(list(self.imagined)):
            if imagined and begin is None:
                begin = p
            elif not imagined and begin is not None:
                if not any(q in held for q in range(begin, p)) and begin > 0:
                    self.imagined[begin:p] = [False] * (p - begin)
                begin = None

    def truncate(self, end: int) -> None:
        self.held = {p: v for p, v in self.held.items() if p < end}
        del self.imagined[end:]

    @property
    def values(self) -> list[int]:
        return [self.held[p] for p in sorted(self.held)]

    @property
    def tail(self) -> int:
        return max((i + 1 for i, imagined in enumerate(self.imagined) if not imagined), default=0)


@dataclass(eq=False)
class Pair:
    table: BlockTable
    committed: Model
    staged: Model | None = None
    fresh: int = 0
    branches: list[Pair] = field(default_factory=list)  # of what it sees in the tick under way
    branch: bool = False

    @property
    def now(self) -> Model:
        return self.staged or self.committed

    def stage(self) -> Model:
        self.staged = self.staged or self.committed.copy()
        return self.staged


class PoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = KVPool(SPEC, BLOCKS)
        self.pairs: list[Pair] = []
        self.value = 0
        self.open()

    @precondition(lambda self: len(self.pairs) < TABLES)
    @rule()
    def open(self) -> None:
        self.pairs.append(Pair(self.pool.open(), Model()))

    @rule(i=WHICH, n=st.integers(1, 5), imagined=st.booleans())
    def append(self, i: int, n: int, imagined: bool) -> None:
        pair = self._pair(i)
        values = list(range(self.value, self.value + n))
        if (blocks := self._reserve(pair, n, imagined)) is not None:
            self.value += n
            self._write(blocks, values)
            pair.stage().append(values, imagined)

    @rule(i=WHICH, key=st.sampled_from(sorted(PREFIXES)))
    def prefix(self, i: int, key: bytes) -> None:
        pair, values = self._pair(i), PREFIXES[key]
        if pair.now.imagined or pair.fresh + len(values) > SPEC.scratch_blocks:
            return
        free = self.pool.stats().free
        dropped = set(pair.table.dropped)
        if self.pool.share(pair.table, key):
            assert self.pool.stats().free == free
            pair.stage().append(values, False)
            seen = set(pair.table.layout.blocks)
            pair.fresh = len(pair.table.fresh)
            assert not seen & set(pair.table.dropped)
            assert dropped - seen == set(pair.table.dropped)
        elif (blocks := self._reserve(pair, len(values), False)) is not None:
            self._write(blocks, values)
            self.pool.publish(key, blocks)
            with pytest.raises(StateError):
                self._write(blocks, values)
            pair.stage().append(values, False)

    @rule(n=st.integers(1, BLOCKS))
    def give_up_prefixes(self, n: int) -> None:
        before = self.pool.stats()
        self.pool.give_up_prefixes(n)
        after = self.pool.stats()
        assert after.free + after.cached == before.free + before.cached
        assert after.free >= before.free + min(n, before.cached)
        assert after.owned == before.owned

    @rule(i=WHICH, end=st.integers(0, 12))
    def truncate(self, i: int, end: int) -> None:
        pair = self._pair(i)
        if end > len(pair.now.imagined):
            with pytest.raises(InvalidInput):
                self.pool.truncate(pair.table, end)
        else:
            self.pool.truncate(pair.table, end)
            pair.stage().truncate(end)

    @rule(i=WHICH)
    def drop_imagined(self, i: int) -> None:
        pair = self._pair(i)
        self.pool.truncate(pair.table, pair.now.tail)
        pair.stage().truncate(pair.now.tail)

    @rule(i=WHICH, position=st.integers(0, 12))
    def drop_before(self, i: int, position: int) -> None:
        pair = self._pair(i)
        self.pool.drop_before(pair.table, position)
        pair.stage().drop_before(position)

    @rule(i=WHICH)
    def commit(self, i: int) -> None:
        pair = self._pair(i)
        self._free_branches(pair)
        if not pair.branch:
            self.pool.commit(pair.table)
            pair.committed, pair.staged, pair.fresh = pair.now, None, 0

    @rule(i=WHICH)
    def discard(self, i: int) -> None:
        pair = self._pair(i)
        self._free_branches(pair)
        self.pool.discard(pair.table)
        pair.staged, pair.fresh = None, 0

    @rule(i=WHICH, imagined=st.booleans())
    def tick(self, i: int, imagined: bool) -> None:
        self.append(i, 1, imagined)
        self.commit(i)

    @precondition(lambda self: len(self.pairs) < TABLES)
    @rule(i=WHICH)
    def fork(self, i: int) -> None:
        pair = self._pair(i)
        if pair.table.staged is not None:
            with pytest.raises(StateError):
                self.pool.fork(pair.table)
        elif not pair.branch:
            free = self.pool.stats().free
            self.pairs.append(Pair(self.pool.fork(pair.table), pair.committed.copy()))
            assert self.pool.stats().free == free

    @precondition(lambda self: len(self.pairs) < TABLES)
    @rule(i=WHICH)
    def branch(self, i: int) -> None:
        pair, free = self._pair(i), self.pool.stats().free
        made = Pair(self.pool.branch(pair.table), pair.now.copy(), branch=True)
        assert self.pool.stats().free == free
        pair.branches.append(made)
        self.pairs.append(made)

    @precondition(lambda self: len(self.pairs) < TABLES)
    @rule(i=WHICH)
    def transfer(self, i: int) -> None:
        """Export and import: what is committed, in blocks of its own."""
        pair = self._pair(i)
        if pair.branch:
            return
        layout, stats = pair.table.committed, self.pool.stats()
        content = self.pool.read(layout.blocks).clone()
        made = Pair(self.pool.open(), pair.committed.copy())
        try:
            self.pool.place(made.table, layout, content)
        except Exhausted:
            assert len(layout.blocks) > stats.free + stats.cached
            self.pool.free(made.table)
            assert self.pool.stats().owned == stats.owned
        else:
            self.pairs.append(made)
            assert not set(made.table.committed.blocks) & set(layout.blocks)

    @rule(i=WHICH)
    def reset(self, i: int) -> None:
        pair = self._pair(i)
        self._free_branches(pair)
        if not pair.branch:
            self.pool.reset(pair.table)
            pair.committed, pair.staged, pair.fresh = Model(), None, 0

    @rule(i=WHICH)
    def free(self, i: int) -> None:
        pair = self._pair(i)
        if len(self.pairs) > 1:
            self._free(pair)

    def _pair(self, i: int) -> Pair:
        return self.pairs[i % len(self.pairs)]

    def _free(self, pair: Pair) -> None:
        self._free_branches(pair)
        self.pool.free(pair.table)
        self.pairs.remove(pair)
        for other in self.pairs:
            if pair in other.branches:
                other.branches.remove(pair)
        if not self.pairs:
            self.open()

    def _free_branches(self, pair: Pair) -> None:
        for branch in list(pair.branches):
            self._free(branch)

    def _reserve(self, pair: Pair, n: int, imagined: bool) -> list[int] | None:
        before = self.pool.stats()
        if pair.fresh + n > SPEC.scratch_blocks:
            with pytest.raises(Exhausted, match="one tick may stage"):
                self.pool.reserve(pair.table, n, imagined)
            assert self.pool.stats() == before
            return None
        if n > before.free + before.cached:
            with pytest.raises(Exhausted) as caught:
                self.pool.reserve(pair.table, n, imagined)
            after = self.pool.stats()
            assert (after.owned, after.cached) == (before.owned, 0)  # what was cached went first
            assert caught.value.missing_bytes == (n - after.free) * self.pool.block_bytes > 0
            return None
        blocks = self.pool.reserve(pair.table, n, imagined)
        pair.fresh += n
        return blocks

    def _write(self, blocks: list[int], values: list[int]) -> None:
        kv = torch.tensor(values, dtype=torch.float32)[None, None, :, None, None]
        self.pool.write(blocks, kv.expand(1, 2, len(values), 1, 1))

    @invariant()
    def balances(self) -> None:
        self.pool.check()
        stats = self.pool.stats()
        assert stats.free + stats.cached + stats.owned == stats.total == BLOCKS
        assert stats.tables == len(self.pairs)
        assert stats.owned == len({b for pair in self.pairs for b in pair.table.references})

    @invariant()
    def holds_what_the_model_holds(self) -> None:
        content = self.pool.storage.flatten(1).tolist()[0]
        scratch = {block for pair in self.pairs for block in pair.table.fresh}
        for pair in self.pairs:
            layout = pair.table.layout
            assert [content[block] for block in layout.blocks] == pair.now.values
            assert [content[block + BLOCKS] for block in layout.blocks] == pair.now.values
            assert (layout.end, layout.observed_end) == (len(pair.now.imagined), pair.now.tail)
            assert layout.sink == sum(p < SPEC.sink_blocks for p in pair.now.held)
            assert layout.positions() == sorted(pair.now.held)
            committed = zip(pair.table.committed.blocks, sorted(pair.committed.held), strict=True)
            for block, position in committed:
                want = Provenance.IMAGINED if pair.committed.imagined[position] else Provenance.OBSERVED
                assert self.pool.provenance(block) is want or block in scratch


PoolMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)
TestPoolMachine = PoolMachine.TestCase
