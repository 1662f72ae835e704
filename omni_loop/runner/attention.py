"""Keys and values of several sessions at once: one gather, one write, whatever the number of sessions."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..errors import InvalidInput, OmniLoopError, TensorError
from .cells import is_finite
from .kv_cell import KVCell
from .kv_pool import KVPool


def gather_batch(cells: Sequence[KVCell]) -> Tensor:
    """What ``cells`` see, ``float[layers, 2, b, s, kv_heads, head_dim]``, oldest first: a view when there is one cell
    and its blocks are neighbours, or the blocks of all are; else one copy. Read-only, and valid until one of their
    ticks is decided.

    Raises:
        InvalidInput: no cells, cells of different pools, or of different lengths.
    """
    pool = _pool(cells)
    held = [cell.table.layout.blocks for cell in cells]
    n = len(held[0])
    if any(len(blocks) != n for blocks in held):
        raise InvalidInput(f"a batch gathers equal lengths, not {[cell.length for cell in cells]} tokens")
    blocks = held[0] if len(held) == 1 else [block for one in held for block in one]
    found = pool.read(blocks)
    return found.unflatten(2, (len(held), n)).flatten(3, 4)


def append_batch(cells: Sequence[KVCell], kv: Tensor, imagined: bool = False) -> list[Exception | None]:
    """Stage ``kv float[layers, 2, b, n, kv_heads, head_dim]`` at the end of each cell; per cell None or its own error,
    with which nothing is staged there.

    Raises:
        InvalidInput: no cells, or cells of different pools.
        TensorError: ``kv`` does not hold whole blocks for as many cells.
    """
    pool = _pool(cells)
    spec, b = pool.spec, len(cells)
    want = (spec.layers, 2, b, kv.shape[3] if kv.ndim == 6 else 0, spec.kv_heads, spec.head_dim)
    if tuple(kv.shape) != want or kv.shape[3] == 0 or kv.shape[3] % spec.block_size:
        raise TensorError(f"{b} caches of {pool.name!r} take whole blocks of {want}, not {list(kv.shape)}")
    if len(set(map(id, cells))) != b:
        raise InvalidInput("a batch appends to each cache once")
    errors: list[Exception | None] = [None] * b
    sound = is_finite(kv)
    blocks: list[int] = []
    rows: list[int] = []
    n = kv.shape[3] // spec.block_size
    for i, cell in enumerate(cells):
        try:
            if not sound:
                cell.accept(kv[:, :, i])
            blocks += cell.reserve(n, imagined)
            rows.append(i)
        except OmniLoopError as e:
            errors[i] = e
    if rows:
        pool.write(blocks, (kv if len(rows) == b else kv[:, :, rows]).flatten(2, 3))
    return errors


def _pool(cells: Sequence[KVCell]) -> KVPool:
    if not cells or any(cell.pool is not cells[0].pool for cell in cells):
        raise InvalidInput("a batch needs one cache or more, all of one pool")
    return cells[0].pool
