from __future__ import annotations

import copy
from itertools import pairwise

import pytest
import torch

from omni_loop.errors import Exhausted, InvalidInput, StateError, TensorError
from omni_loop.runner.block_table import BlockTable, Provenance
from omni_loop.runner.books import PoolCorrupt
from omni_loop.runner.kv_pool import KVPool
from omni_loop.stage import KVSpec

SPEC = KVSpec(layers=2, kv_heads=1, head_dim=2, block_size=2, window_blocks=4, sink_blocks=1, scratch_blocks=4)


def kv(value: float, n: int = 1) -> torch.Tensor:
    """``n`` blocks, the i-th full of ``value + i``."""
    blocks = torch.arange(n, dtype=torch.float32) + value
    return blocks.repeat_interleave(2)[None, None, :, None, None].expand(2, 2, 2 * n, 1, 2)


def put(pool: KVPool, table: BlockTable, value: float, n: int = 1, imagined: bool = False) -> list[int]:
    blocks = pool.reserve(table, n, imagined)
    pool.write(blocks, kv(value, n))
    return blocks


def seen(pool: KVPool, table: BlockTable) -> list[float]:
    gathered = pool.gather(table)
    assert (gathered == gathered[:1, :1, :, :, :1]).all()
    return gathered[0, 0, ::2, 0, 0].tolist()


def is_view(pool: KVPool, table: BlockTable) -> bool:
    return pool.gather(table).untyped_storage().data_ptr() == pool.storage.untyped_storage().data_ptr()


def test_neighbours_are_a_view_and_others_one_copy() -> None:
    pool = KVPool(SPEC, 16)
    one, two = pool.open(), pool.open()
    put(pool, one, 1, 3)
    assert is_view(pool, one)
    put(pool, two, 10, 2)
    pool.commit(two)
    put(pool, one, 4)
    assert not is_view(pool, one)
    assert seen(pool, one) == [1, 2, 3, 4]
    assert seen(pool, two) == [10, 11]
    assert pool.gather(pool.open()).shape == (2, 2, 0, 1, 2)


def test_a_lone_table_stays_a_view_although_others_have_come_and_gone() -> None:
    pool = KVPool(SPEC, 16)
    gone = pool.open()
    put(pool, gone, 0, 2)
    pool.commit(gone)
    table = pool.open()
    for value in range(3):
        put(pool, table, value)
        pool.commit(table)
    pool.free(gone)
    put(pool, table, 3)
    assert is_view(pool, table)


def test_provenance_follows_the_blocks() -> None:
    pool = KVPool(SPEC, 16)
    table = pool.open()
    (real,) = put(pool, table, 1)
    assert pool.provenance(real) is Provenance.SCRATCH
    pool.commit(table)
    (dreamt,) = put(pool, table, 2, imagined=True)
    assert (pool.provenance(real), pool.provenance(dreamt)) == (Provenance.OBSERVED, Provenance.SCRATCH)
    pool.commit(table)
    assert pool.provenance(dreamt) is Provenance.IMAGINED
    pool.truncate(table, table.layout.observed_end)
    assert pool.provenance(dreamt) is Provenance.IMAGINED
    pool.commit(table)
    assert pool.provenance(dreamt) is Provenance.FREE


@pytest.mark.parametrize(
    ("sink", "kinds", "rewind", "tail"),
    [
        (1, "oiooioo", 5, 4),  # back to behind an imagined block in the window
        (1, "oiooioo", 4, 4),
        (2, "oioooooo", 2, 1),  # back to behind an imagined block in the sink
        (1, "oioooooo", 2, 2),  # the imagined block is gone, so there is nothing to drop
        (0, "iiiiiiii", 8, 0),  # most of the imagined tail is gone already
        (0, "oiiiiiii", 3, 1),
    ],
)
def test_the_imagined_tail_is_known_as_far_as_blocks_are_held(sink: int, kinds: str, rewind: int, tail: int) -> None:
    pool = KVPool(SPEC, 16)
    table = pool.open(sink_blocks=sink)
    for i, kind in enumerate(kinds):
        put(pool, table, i, imagined=kind == "i")
        pool.commit(table)
    pool.truncate(table, rewind)
    assert table.layout.observed_end == tail


def test_what_is_kept_about_gone_blocks_is_bounded() -> None:
    pool = KVPool(SPEC, 16)
    table = pool.open()
    for i in range(500):
        put(pool, table, i, imagined=i % 2 == 1)
        pool.commit(table)
    assert len(table.committed.observed) <= SPEC.window_blocks + SPEC.sink_blocks + 1


def test_nothing_read_in_a_tick_is_overwritten_before_it_is_decided() -> None:
    pool = KVPool(SPEC, 8)
    table = pool.open()
    put(pool, table, 1, 4)
    pool.commit(table)
    read = pool.gather(table)
    before = read.clone()
    pool.truncate(table, 1)
    put(pool, table, 50, 4)
    assert torch.equal(read, before)
    pool.discard(table)
    assert seen(pool, table) == [1, 2, 3, 4]


def test_a_fork_shares_blocks_and_diverges() -> None:
    pool = KVPool(SPEC, 16)
    table = pool.open()
    put(pool, table, 1, 4)
    pool.commit(table)
    forks = [pool.fork(table) for _ in range(5)]
    assert pool.stats().owned == 4
    assert pool.stats().references == 24
    for i, fork in enumerate(forks):
        put(pool, fork, 100 + i)
        pool.commit(fork)
    assert pool.stats().owned == 9
    pool.free(table)
    for i, fork in enumerate(forks):
        assert seen(pool, fork) == [1, 2, 3, 4, 100 + i]
        pool.check()
        pool.free(fork)
    assert pool.stats().free == 16


def test_a_fork_in_the_middle_of_a_tick_is_refused() -> None:
    pool = KVPool(SPEC, 16)
    table = pool.open()
    put(pool, table, 1)
    with pytest.raises(StateError):
        pool.fork(table)


def test_exhaustion_names_the_blocks_missing_and_takes_none() -> None:
    pool = KVPool(SPEC, 6)
    one, two = pool.open(), pool.open()
    put(pool, one, 1, 4)
    with pytest.raises(Exhausted, match="lacks 1 of 3 blocks"):
        pool.reserve(two, 3)
    assert pool.stats().free == 2
    assert seen(pool, two) == []
    pool.check()
    pool.discard(one)
    assert len(pool.reserve(two, 3)) == 3


def test_one_tick_may_not_stage_more_than_declared() -> None:
    pool = KVPool(SPEC, 16)
    table = pool.open()
    put(pool, table, 1, 3)
    with pytest.raises(Exhausted, match="not 5") as caught:
        pool.reserve(table, 2)
    assert not caught.value.retryable
    assert seen(pool, table) == [1, 2, 3]


def test_only_reserved_blocks_of_the_right_shape_are_written() -> None:
    pool = KVPool(SPEC, 16)
    table = pool.open()
    blocks = put(pool, table, 1, 2)
    with pytest.raises(TensorError):
        pool.write(blocks, kv(5, 3))
    pool.commit(table)
    with pytest.raises(StateError):
        pool.write(blocks, kv(5, 2))
    assert seen(pool, table) == [1, 2]


def test_drop_before_keeps_the_sink() -> None:
    pool = KVPool(SPEC, 16)
    table = pool.open()
    put(pool, table, 0, 4)
    pool.drop_before(table, 3)
    assert seen(pool, table) == [0, 3]
    pool.drop_before(table, 99)
    assert seen(pool, table) == [0]
    pool.discard(table)
    assert seen(pool, table) == []


def test_truncate_beyond_the_end_is_refused() -> None:
    pool = KVPool(SPEC, 4)
    with pytest.raises(InvalidInput, match="block 1"):
        pool.truncate(pool.open(), 1)


def test_a_window_that_goes_round_stays_in_one_piece_or_two() -> None:
    pool = KVPool(SPEC, 11)
    table = pool.open(sink_blocks=0)
    views = 0
    for value in range(100):
        put(pool, table, value)
        pool.commit(table)
        blocks = table.committed.blocks
        assert sum(b != a + 1 for a, b in pairwise(blocks)) <= 1
        views += is_view(pool, table)
    assert views > 60


def test_scattered_writes_land_where_they_belong() -> None:
    pool = KVPool(SPEC, 6)
    tables = [pool.open() for _ in range(4)]
    for i, table in enumerate(tables):
        put(pool, table, i)
        pool.commit(table)
    pool.free(tables[0])
    pool.free(tables[2])
    table = pool.open()
    blocks = put(pool, table, 20, 4)
    assert blocks != sorted(blocks) or blocks[-1] - blocks[0] != 3
    assert seen(pool, table) == [20, 21, 22, 23]
    assert seen(pool, tables[1]) == [1]
    assert seen(pool, tables[3]) == [3]


@pytest.mark.parametrize("harm", ["count", "free", "lost", "shares", "provenance", "stray"])
def test_check_finds_books_that_do_not_balance(harm: str) -> None:
    pool = KVPool(SPEC, 8)
    table = pool.open()
    (block,) = put(pool, table, 1)
    pool.commit(table)
    sound = copy.deepcopy((pool._references, pool._free, pool._shares, pool._provenance))
    if harm == "count":
        pool._references[block] = 2
    elif harm == "free":
        pool._free[block] = None
    elif harm == "lost":
        del pool._free[next(iter(pool._free))]
    elif harm == "shares":
        pool._shares = 2
    elif harm == "provenance":
        pool._provenance[block] = Provenance.FREE
    else:
        table.staged = table.committed.copy()
        table.staged.blocks.append(7)
    with pytest.raises(PoolCorrupt):
        pool.check()
    pool._references, pool._free, pool._shares, pool._provenance = sound
    table.staged = None
    pool.check()


def test_a_pool_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one block"):
        KVPool(SPEC, 0)
