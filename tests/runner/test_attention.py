from __future__ import annotations

import pytest
import torch

from omni_loop.errors import Exhausted, InvalidInput, StageFailed, TensorError
from omni_loop.runner.attention import append_batch, gather_batch
from omni_loop.runner.kv_cell import KVCell
from omni_loop.runner.state import Budget, StateManager
from omni_loop.stage import KVSpec

KV = KVSpec(layers=2, kv_heads=2, head_dim=3, block_size=4, window_blocks=4, sink_blocks=1, scratch_blocks=3)


def make(sessions: int, blocks: int | None = None) -> tuple[StateManager, list[KVCell]]:
    manager = StateManager({"p/a": {"kv": KV}}, Budget(sessions, blocks=blocks))
    return manager, [begin(manager, i) for i in range(sessions)]


def begin(manager: StateManager, i: int) -> KVCell:
    manager.open(f"s{i}")
    return manager.begin(f"s{i}", "p/a", 0).kv("kv")


def kv(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator)


def is_view(cell: KVCell, gathered: torch.Tensor) -> bool:
    return gathered.untyped_storage().data_ptr() == cell.pool.storage.untyped_storage().data_ptr()


def test_a_batch_is_every_session_s_own_gather() -> None:
    manager, cells = make(3)
    for n in range(6):
        for i, cell in enumerate(cells):
            cell.append(kv(2, 2, 4, 2, 3) + 10 * i + n)
        batch = gather_batch(cells)
        assert batch.shape == (2, 2, 3, cells[0].length, 2, 3)
        for i, cell in enumerate(cells):
            assert torch.equal(batch[:, :, i], cell.gather())
        for i, cell in enumerate(cells):
            manager.commit(f"s{i}", n, ["p/a"])
            manager.begin(f"s{i}", "p/a", n + 1)
            assert cell.length <= 20


def test_the_last_tokens_alone() -> None:
    _, (cell, _) = make(2)
    cell.append(kv(2, 2, 12, 2, 3))
    for last in (0, 4, 8, 12, 16):
        assert torch.equal(cell.gather(last=last), cell.gather()[:, :, max(0, 12 - last) :])
    for last in (2, -4):
        with pytest.raises(InvalidInput, match="'kv' is read in blocks of 4"):
            cell.gather(last=last)


def test_neighbours_are_a_view_for_one_and_for_all() -> None:
    _, cells = make(2)
    for cell in cells:
        cell.append(kv(2, 2, 8, 2, 3))
    assert is_view(cells[0], gather_batch(cells[:1]))
    assert is_view(cells[0], gather_batch(cells))
    assert not is_view(cells[0], gather_batch(cells[::-1]))
    assert torch.equal(gather_batch(cells[::-1]), gather_batch(cells).flip(2))
    assert gather_batch(cells).is_contiguous() is False  # nothing was copied to make it so


def test_branches_are_gathered_with_what_they_share() -> None:
    _, (cell,) = make(1)
    cell.append(kv(2, 2, 8, 2, 3))
    made = cell.branches(3)
    errors = append_batch(made, kv(2, 2, 3, 4, 2, 3), imagined=True)
    assert errors == [None] * 3
    batch = gather_batch(made)
    assert torch.equal(batch[:, :, :, :8], cell.gather()[:, :, None].expand(-1, -1, 3, -1, -1, -1))
    assert torch.equal(batch[:, :, :, 8:], kv(2, 2, 3, 4, 2, 3))


def test_one_write_for_all() -> None:
    _, cells = make(3)
    values = kv(2, 2, 3, 8, 2, 3)
    assert append_batch(cells, values) == [None] * 3
    assert torch.equal(gather_batch(cells), values)


def test_a_bad_item_is_its_own() -> None:
    manager, cells = make(3)
    values = kv(2, 2, 3, 4, 2, 3)
    values[1, 0, 1, 2, 0, 0] = float("nan")
    errors = append_batch(cells, values)
    assert [type(e) for e in errors] == [type(None), StageFailed, type(None)]
    assert [cell.length for cell in cells] == [4, 0, 4]
    assert torch.equal(gather_batch([cells[0], cells[2]]), values[:, :, [0, 2]])
    manager.check()


def test_who_finds_no_room_is_alone_in_that() -> None:
    manager, cells = make(3, blocks=5)
    values = kv(2, 2, 3, 8, 2, 3)
    errors = append_batch(cells, values)
    assert [type(e) for e in errors] == [type(None), type(None), Exhausted]
    assert torch.equal(gather_batch(cells[:2]), values[:, :, :2])
    assert cells[2].length == 0
    manager.check()


def test_what_cannot_be_a_batch_is_refused() -> None:
    _, cells = make(2)
    _, (stranger,) = make(1)
    for wrong in ([], [cells[0], stranger]):
        with pytest.raises(InvalidInput, match="one pool"):
            gather_batch(wrong)
        with pytest.raises(InvalidInput, match="one pool"):
            append_batch(wrong, kv(2, 2, 2, 4, 2, 3))
    with pytest.raises(InvalidInput, match="once"):
        append_batch([cells[0], cells[0]], kv(2, 2, 2, 4, 2, 3))
    for shape in ((2, 2, 2, 3, 2, 3), (2, 2, 2, 0, 2, 3), (2, 2, 1, 4, 2, 3), (2, 2, 4, 2, 3), (2, 2, 2, 4, 2, 4)):
        with pytest.raises(TensorError):
            append_batch(cells, kv(*shape))
    cells[0].append(kv(2, 2, 4, 2, 3))
    with pytest.raises(InvalidInput, match=r"\[4, 0\]"):
        gather_batch(cells)
