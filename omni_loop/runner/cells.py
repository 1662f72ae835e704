"""Typed state of one session in one stage: each cell holds what is committed and, during a tick, what is staged.

Values are checked when they are staged (shape, dtype, finite), so committed state is always sound. A cell may be
written only while its stage runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ..errors import InvalidInput, Reason, StageFailed, StateError, TensorError
from ..stage import CounterSpec, KVSpec, RingSpec, TensorSpec
from .kv_pool import KVPool


class Scope:
    """Whether the stage is running, for all its cells at once."""

    __slots__ = ("open",)

    def __init__(self) -> None:
        self.open = False

    def check(self, name: str) -> None:
        if not self.open:
            raise StateError(f"state {name!r} can be changed only while its stage runs")


class Cell(Protocol):
    """What the manager needs of every typed state."""

    def settle(self, commit: bool) -> None:
        """End the tick: keep what it staged, or forget it. Cannot fail."""

    def reset(self) -> None:
        """As freshly opened."""

    def free(self) -> None:
        """Give back what it holds; the cell must not be used again."""


def torch_dtype(name: str, owner: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise InvalidInput(f"state {owner!r} has the unknown dtype {name!r}", reason=Reason.BAD_SPEC)
    return dtype


def is_finite(tensor: Tensor) -> bool:
    """Whether no element is NaN or infinite. One sum decides, unless it overflows."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.numel() == 0:
        return True
    total = tensor.sum().item()
    return (isinstance(total, float) and math.isfinite(total)) or bool(torch.isfinite(tensor).all())


def _value(name: str, value: Any, shape: tuple[int, ...], like: Tensor) -> Tensor:
    """``value`` as a tensor of ``like``'s dtype and device; raises what is wrong with it."""
    tensor = torch.as_tensor(value).detach()
    if tuple(tensor.shape) != shape:
        raise TensorError(f"state {name!r} has shape {list(shape)}, not {list(tensor.shape)}")
    if not torch.can_cast(tensor.dtype, like.dtype):
        raise TensorError(f"state {name!r} holds {like.dtype}, to which {tensor.dtype} cannot be cast")
    tensor = tensor.to(like.device, like.dtype)  # first, since a cast may overflow
    if not is_finite(tensor):
        raise StageFailed(f"state {name!r} was given values that are not finite", reason=Reason.BAD_OUTPUT)
    return tensor


class KVCell:
    """:class:`~omni_loop.stage.PagedKV` on a table of a pool. Lengths and positions are in tokens."""

    __slots__ = ("_gathered", "_name", "_pool", "_scope", "_table")

    def __init__(self, name: str, pool: KVPool, scope: Scope) -> None:
        self._name, self._pool, self._scope = name, pool, scope
        self._table = pool.open()
        self._gathered: Tensor | None = None

    @property
    def length(self) -> int:
        layout = self._table.layout
        return (len(layout.sink) + len(layout.window)) * self._pool.spec.block_size

    @property
    def total(self) -> int:
        return self._table.layout.end * self._pool.spec.block_size

    @property
    def sink_length(self) -> int:
        return len(self._table.layout.sink) * self._pool.spec.block_size

    def gather(self) -> Tensor:
        # Denoise steps of one tick read the same context again and again.
        if self._gathered is None:
            self._gathered = self._pool.gather(self._table)
        return self._gathered

    def append(self, kv: Any, imagined: bool = False) -> None:
        self._scope.check(self._name)
        spec: KVSpec = self._pool.spec
        given = torch.as_tensor(kv)
        tokens = given.shape[2] if given.ndim == 5 else 0
        shape = (spec.layers, 2, tokens, spec.kv_heads, spec.head_dim)
        tensor = _value(self._name, given, shape, self._pool.storage)
        if tokens == 0 or tokens % spec.block_size:
            raise TensorError(
                f"state {self._name!r} takes whole blocks of {spec.block_size} tokens, not {tokens} tokens"
            )
        self._gathered = None
        blocks = self._pool.reserve(self._table, tokens // spec.block_size, imagined)
        self._pool.write(blocks, tensor)

    def truncate(self, total: int) -> None:
        self._scope.check(self._name)
        block, rest = divmod(total, self._pool.spec.block_size)
        if rest or not 0 <= total <= self.total:
            size = self._pool.spec.block_size
            raise InvalidInput(
                f"state {self._name!r} can be truncated to multiples of {size} from 0 to {self.total}, not to {total}"
            )
        self._gathered = None
        self._pool.truncate(self._table, block)

    def drop_imagined(self) -> int:
        self.truncate(self._table.layout.observed_end * self._pool.spec.block_size)
        return self.total

    def settle(self, commit: bool) -> None:
        self._gathered = None
        if commit:
            self._pool.commit(self._table)
        else:
            self._pool.discard(self._table)

    def reset(self) -> None:
        self._gathered = None
        self._pool.reset(self._table)

    def free(self) -> None:
        self._gathered = None
        self._pool.free(self._table)


class TensorCell:
    """:class:`~omni_loop.stage.TensorState`. ``set`` copies, so the stage may reuse what it gave."""

    __slots__ = ("_committed", "_fill", "_name", "_scope", "_spec", "_staged")

    def __init__(self, name: str, spec: TensorSpec, scope: Scope, device: torch.device | str) -> None:
        self._name, self._spec, self._scope = name, spec, scope
        self._fill = torch.full(spec.shape, spec.fill, dtype=torch_dtype(spec.dtype, name), device=device)
        self._committed = self._fill
        self._staged: Tensor | None = None

    def get(self) -> Tensor:
        return self._committed if self._staged is None else self._staged

    def set(self, value: Any) -> None:
        self._scope.check(self._name)
        self._staged = _value(self._name, value, self._spec.shape, self._fill).clone()

    def settle(self, commit: bool) -> None:
        if commit and self._staged is not None:
            self._committed = self._staged
        self._staged = None

    def reset(self) -> None:
        self._committed, self._staged = self._fill, None

    def free(self) -> None:
        self.reset()


class RingCell:
    """:class:`~omni_loop.stage.Ring`. ``push`` copies."""

    __slots__ = ("_committed", "_like", "_name", "_scope", "_spec", "_staged")

    def __init__(self, name: str, spec: RingSpec, scope: Scope, device: torch.device | str) -> None:
        self._name, self._spec, self._scope = name, spec, scope
        self._like = torch.empty(0, dtype=torch_dtype(spec.dtype, name), device=device)
        self._committed: tuple[Tensor, ...] = ()
        self._staged: tuple[Tensor, ...] | None = None

    def items(self) -> Sequence[Tensor]:
        return self._committed if self._staged is None else self._staged

    def push(self, item: Any) -> None:
        self._scope.check(self._name)
        tensor = _value(self._name, item, self._spec.shape, self._like).clone()
        self._staged = (*self.items(), tensor)[-self._spec.capacity :]

    def clear(self) -> None:
        self._scope.check(self._name)
        self._staged = ()

    def settle(self, commit: bool) -> None:
        if commit and self._staged is not None:
            self._committed = self._staged
        self._staged = None

    def reset(self) -> None:
        self._committed, self._staged = (), None

    def free(self) -> None:
        self.reset()


class CounterCell:
    """:class:`~omni_loop.stage.Counter`."""

    __slots__ = ("_committed", "_name", "_scope", "_spec", "_staged")

    def __init__(self, name: str, spec: CounterSpec, scope: Scope) -> None:
        self._name, self._spec, self._scope = name, spec, scope
        self._committed = spec.start
        self._staged: int | None = None

    def get(self) -> int:
        return self._committed if self._staged is None else self._staged

    def set(self, value: int) -> None:
        self._scope.check(self._name)
        if isinstance(value, bool) or not isinstance(value, int):
            raise InvalidInput(f"counter {self._name!r} takes an int, not {type(value).__name__}")
        self._staged = value

    def settle(self, commit: bool) -> None:
        if commit and self._staged is not None:
            self._committed = self._staged
        self._staged = None

    def reset(self) -> None:
        self._committed, self._staged = self._spec.start, None

    def free(self) -> None:
        self.reset()
