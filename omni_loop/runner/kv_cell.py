"""A session's paged KV as its stage sees it: :class:`~omni_loop.stage.PagedKV` on a table of a pool.

Lengths and positions are in tokens. Branches are tables that live inside the tick: they share every block they were
made with, and are freed when the tick is decided.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import InvalidInput, Reason, StateError, TensorError
from ..stage import KVSpec
from .block_table import BlockTable, Layout
from .cells import Cell, Scope, checked
from .kv_pool import KVPool


class KVCell(Cell):
    """See the module's text. ``value`` is the committed :class:`Layout`."""

    __slots__ = ("_branches", "_gathered", "_live", "_parent", "pool", "table")

    def __init__(self, name: str, pool: KVPool, scope: Scope, parent: KVCell | None = None) -> None:
        super().__init__(name, scope)
        self.pool = pool
        self.table: BlockTable = pool.branch(parent.table) if parent is not None else pool.open()
        self._parent = parent
        self._live = True
        self._branches: list[KVCell] = []
        self._gathered: Tensor | None = None

    @property
    def value(self) -> Layout:
        return self.table.committed

    @property
    def length(self) -> int:
        return len(self.table.layout.blocks) * self.pool.spec.block_size

    @property
    def total(self) -> int:
        return self.table.layout.end * self.pool.spec.block_size

    @property
    def sink_length(self) -> int:
        return self.table.layout.sink * self.pool.spec.block_size

    @property
    def tables(self) -> int:
        """Tables of the pool that this holds: its own and those of its branches."""
        return 1 + sum(branch.tables for branch in self._branches)

    def gather(self, last: int | None = None) -> Tensor:
        blocks = self.table.layout.blocks
        if last is not None and last < len(blocks) * self.pool.spec.block_size:
            block, rest = divmod(last, self.pool.spec.block_size)
            if rest or block < 0:
                raise InvalidInput(f"state {self.name!r} is read in blocks of {self.pool.spec.block_size} tokens")
            return self.pool.read(blocks[len(blocks) - block :]).flatten(2, 3)
        # Denoise steps of one tick read the same context again and again.
        if self._gathered is None:
            self._gathered = self.pool.gather(self.table)
        return self._gathered

    def append(self, kv: Any, imagined: bool = False) -> None:
        self._write()
        self.put(self.accept(kv), imagined)

    def accept(self, kv: Any) -> Tensor:
        """``kv`` as whole blocks of the pool's dtype and device; raises what is wrong with it."""
        spec: KVSpec = self.pool.spec
        given = torch.as_tensor(kv)
        tokens = given.shape[2] if given.ndim == 5 else 0
        tensor = checked(self.name, given, (spec.layers, 2, tokens, spec.kv_heads, spec.head_dim), self.pool.storage)
        if tokens == 0 or tokens % spec.block_size:
            raise TensorError(
                f"state {self.name!r} takes whole blocks of {spec.block_size} tokens, not {tokens} tokens"
            )
        return tensor

    def put(self, tensor: Tensor, imagined: bool) -> list[int]:
        """Stage what :meth:`accept` accepted; the blocks it went to."""
        self._gathered = None
        blocks = self.pool.reserve(self.table, tensor.shape[2] // self.pool.spec.block_size, imagined)
        self.pool.write(blocks, tensor)
        return blocks

    def reserve(self, n: int, imagined: bool) -> list[int]:
        """Stage ``n`` blocks that the caller writes at once, many sessions' together."""
        self._write()
        self._gathered = None
        return self.pool.reserve(self.table, n, imagined)

    def prefix(self, key: bytes, compute: Callable[[], Any]) -> None:
        self._write()
        if self.total:
            raise StateError(
                f"state {self.name!r} holds {self.total} tokens; only an empty one can begin with a prefix"
            )
        self._gathered = None
        if not self.pool.share(self.table, key):
            self.pool.publish(key, self.put(self.accept(compute()), imagined=False))

    def branches(self, n: int) -> Sequence[KVCell]:
        if n < 1:
            raise InvalidInput(f"state {self.name!r} can have one branch or more, not {n}")
        self._write()
        made = [KVCell(self.name, self.pool, self._scope, parent=self) for _ in range(n)]
        self._branches += made
        return made

    def release(self) -> None:
        if self._parent is None:
            raise StateError(f"state {self.name!r} is the session's own cache, not a branch", reason=Reason.BAD_REQUEST)
        if self._live:
            self._parent._branches.remove(self)
            self.free()

    def truncate(self, total: int) -> None:
        self._write()
        size = self.pool.spec.block_size
        block, rest = divmod(total, size)
        if rest or not 0 <= total <= self.total:
            raise InvalidInput(
                f"state {self.name!r} can be truncated to multiples of {size} from 0 to {self.total}, not to {total}"
            )
        self._gathered = None
        self.pool.truncate(self.table, block)

    def drop_imagined(self) -> int:
        self.truncate(self.table.layout.observed_end * self.pool.spec.block_size)
        return self.total

    def commit(self) -> list[int]:
        self._end()
        return self.pool.settle(self.table)

    def discard(self) -> None:
        self._end()
        self.pool.discard(self.table)

    def elements(self, value: Layout) -> Sequence[int]:
        return value.blocks

    def keep(self, dropped: Sequence[int]) -> None:
        self.table.keep(dropped)

    def forget(self, dropped: Sequence[int]) -> None:
        self.table.forget(dropped)
        self.pool.release(dropped)

    def drop(self, dropped: Sequence[int]) -> None:
        self.pool.release(dropped)

    def rewind(self, value: Layout, kept: Sequence[Sequence[int]]) -> None:
        self._gathered = None
        self.pool.rewind(self.table, value, kept)

    def copy_to(self, other: KVCell) -> None:
        self.pool.adopt(other.table, self.table.committed)

    def reset(self) -> None:
        self._end()
        self.pool.reset(self.table)

    def free(self) -> None:
        self._end()
        self._live = False
        self.pool.free(self.table)

    def _write(self) -> None:
        root = self
        while root._parent is not None:
            root = root._parent
        self._scope.write(root)
        if not self._live:
            raise StateError(f"the branch of {self.name!r} was released", reason=Reason.BAD_REQUEST)

    def _end(self) -> None:
        self._gathered = None
        if self._branches:
            for branch in self._branches:
                branch.free()
            self._branches.clear()
