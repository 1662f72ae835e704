"""The pool against a model that knows positions and values but no blocks, under any order of operations."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    MultipleResults,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from omni_loop.errors import Exhausted, InvalidInput, StateError
from omni_loop.runner.block_table import BlockTable, Provenance
from omni_loop.runner.kv_pool import KVPool
from omni_loop.stage import KVSpec

SPEC = KVSpec(layers=1, kv_heads=1, head_dim=1, block_size=1, window_blocks=3, sink_blocks=2, scratch_blocks=4)
BLOCKS = 12
TABLES = 3  # few, so that much happens to each


@dataclass
class Model:
    """What one table should hold: a value per position, and for every position ever whether it is imagined."""

    held: dict[int, int] = field(default_factory=dict)
    imagined: list[bool] = field(default_factory=list)

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

    @property
    def now(self) -> Model:
        return self.staged or self.committed

    def stage(self) -> Model:
        self.staged = self.staged or copy.deepcopy(self.committed)
        return self.staged


class PoolMachine(RuleBasedStateMachine):
    tables = Bundle("tables")

    def __init__(self) -> None:
        super().__init__()
        self.pool = KVPool(SPEC, BLOCKS)
        self.pairs: list[Pair] = []
        self.value = 0

    @initialize(target=tables)
    def begin(self) -> Pair:
        return self._open()

    @precondition(lambda self: len(self.pairs) < TABLES)
    @rule(target=tables)
    def open(self) -> Pair:
        return self._open()

    def _open(self) -> Pair:
        pair = Pair(self.pool.open(), Model())
        self.pairs.append(pair)
        return pair

    @rule(pair=tables, n=st.integers(1, 5), imagined=st.booleans())
    def append(self, pair: Pair, n: int, imagined: bool) -> None:
        free = self.pool.stats().free
        try:
            blocks = self.pool.reserve(pair.table, n, imagined)
        except Exhausted:
            assert n > free or pair.fresh + n > SPEC.scratch_blocks
            assert self.pool.stats().free == free
            return
        assert n <= free
        assert pair.fresh + n <= SPEC.scratch_blocks
        values = list(range(self.value, self.value + n))
        self.value += n
        self.pool.write(
            blocks, torch.tensor(values, dtype=torch.float32)[None, None, :, None, None].expand(1, 2, n, 1, 1)
        )
        pair.stage().append(values, imagined)
        pair.fresh += n

    @rule(pair=tables, end=st.integers(0, 12))
    def truncate(self, pair: Pair, end: int) -> None:
        if end > len(pair.now.imagined):
            with pytest.raises(InvalidInput):
                self.pool.truncate(pair.table, end)
        else:
            self.pool.truncate(pair.table, end)
            pair.stage().truncate(end)

    @rule(pair=tables)
    def drop_imagined(self, pair: Pair) -> None:
        self.pool.truncate(pair.table, pair.now.tail)
        pair.stage().truncate(pair.now.tail)

    @rule(pair=tables, position=st.integers(0, 12))
    def drop_before(self, pair: Pair, position: int) -> None:
        self.pool.drop_before(pair.table, position)
        pair.stage().drop_before(position)

    @rule(pair=tables)
    def commit(self, pair: Pair) -> None:
        self.pool.commit(pair.table)
        pair.committed, pair.staged, pair.fresh = pair.now, None, 0

    @rule(pair=tables)
    def discard(self, pair: Pair) -> None:
        self.pool.discard(pair.table)
        pair.staged, pair.fresh = None, 0

    @rule(pair=tables, imagined=st.booleans())
    def tick(self, pair: Pair, imagined: bool) -> None:
        self.append(pair, 1, imagined)
        self.commit(pair)

    @precondition(lambda self: len(self.pairs) < TABLES)
    @rule(target=tables, pair=tables)
    def fork(self, pair: Pair) -> Pair | MultipleResults[Pair]:
        if pair.table.staged is not None:
            with pytest.raises(StateError):
                self.pool.fork(pair.table)
            return multiple()
        free = self.pool.stats().free
        child = Pair(self.pool.fork(pair.table), copy.deepcopy(pair.committed))
        assert self.pool.stats().free == free
        self.pairs.append(child)
        return child

    @rule(pair=tables)
    def reset(self, pair: Pair) -> None:
        self.pool.reset(pair.table)
        pair.committed, pair.staged, pair.fresh = Model(), None, 0

    @rule(pair=consumes(tables))
    def free(self, pair: Pair) -> None:
        self.pool.free(pair.table)
        self.pairs.remove(pair)

    @invariant()
    def balances(self) -> None:
        self.pool.check()
        stats = self.pool.stats()
        assert stats.free + stats.cached + stats.owned == stats.total == BLOCKS
        assert stats.tables == len(self.pairs)

    @invariant()
    def holds_what_the_model_holds(self) -> None:
        for pair in self.pairs:
            layout = pair.table.layout
            assert self.pool.gather(pair.table).flatten().tolist() == [*pair.now.values, *pair.now.values]
            assert (layout.end, layout.observed_end) == (len(pair.now.imagined), pair.now.tail)
            assert layout.sink == sum(p < SPEC.sink_blocks for p in pair.now.held)
            committed = zip(pair.table.committed.blocks, sorted(pair.committed.held), strict=True)
            for block, position in committed:
                want = Provenance.IMAGINED if pair.committed.imagined[position] else Provenance.OBSERVED
                assert self.pool.provenance(block) is want


PoolMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
TestPoolMachine = PoolMachine.TestCase
