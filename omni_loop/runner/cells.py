"""Typed state of one session in one stage: each cell holds what is committed and, during a tick, what is staged.

Values are checked when they are staged (shape, dtype, finite), so committed state is always sound. A cell may be
written only while its stage runs.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import InvalidInput, Reason, StageFailed, StateError, TensorError
from ..stage import CounterSpec, RingSpec, TensorSpec
from .ledger import Account


class Scope:
    """Whether the stage is running, for all its cells at once, and which of them it wrote to."""

    __slots__ = ("open", "written")

    def __init__(self) -> None:
        self.open = False
        self.written: list[Cell] = []

    def write(self, cell: Cell) -> None:
        """Raises StateError when the stage does not run."""
        if not self.open:
            raise StateError(f"state {cell.name!r} can be changed only while its stage runs")
        if cell not in self.written:
            self.written.append(cell)


class Cell(ABC):
    """What the manager needs of every typed state. ``value`` is what is committed: never changed in place, so that
    versions and forks share it. Its elements (blocks, tensors) that a newer value lacks are *dropped*: they are
    :meth:`keep`-ed while an older version needs them."""

    __slots__ = ("_scope", "name", "value")
    value: Any

    def __init__(self, name: str, scope: Scope) -> None:
        self.name, self._scope = name, scope

    @abstractmethod
    def commit(self) -> Sequence[Any]:
        """What is staged becomes the value. Returns what it dropped, for :meth:`keep` or :meth:`drop`. Cannot fail."""

    @abstractmethod
    def discard(self) -> None:
        """Forget what is staged. Cannot fail."""

    @abstractmethod
    def elements(self, value: Any) -> Sequence[Any]:
        """What ``value`` consists of."""

    @abstractmethod
    def keep(self, dropped: Sequence[Any]) -> None:
        """Elements are needed by a version that is kept."""

    @abstractmethod
    def forget(self, dropped: Sequence[Any]) -> None:
        """The version that needed them is gone: the reverse of :meth:`keep`, of the same list."""

    @abstractmethod
    def drop(self, dropped: Sequence[Any]) -> None:
        """No version needs the elements that :meth:`commit` returned."""

    def rewind(self, value: Any, kept: Sequence[Sequence[Any]]) -> None:
        """Between ticks: take an older value back; ``kept`` is what the commits since then dropped."""
        for dropped in kept:
            self.forget(dropped)
        self.value = value

    @abstractmethod
    def copy_to(self, other: Any) -> None:
        """Give a fresh cell of the same spec this one's value, by reference."""

    @abstractmethod
    def reset(self) -> None:
        """As freshly opened, with nothing staged or kept."""

    def free(self) -> None:
        """Give back what it holds; the cell must not be used again."""
        self.reset()


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


def checked(name: str, value: Any, shape: tuple[int, ...], like: Tensor) -> Tensor:
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


class _Tensors(Cell):
    """A cell whose elements are tensors of one size. What is committed and staged was reserved at opening; what
    versions keep besides goes to the account, every storage once."""

    __slots__ = ("_account", "_like", "_nbytes")

    def __init__(self, name: str, spec: TensorSpec | RingSpec, scope: Scope, account: Account) -> None:
        super().__init__(name, scope)
        self._account = account
        self._like = torch.empty(0, dtype=torch_dtype(spec.dtype, name), device=account.device)
        self._nbytes = math.prod(spec.shape) * self._like.itemsize

    @property
    def like(self) -> Tensor:
        """An empty tensor of the dtype and on the device of what this holds."""
        return self._like

    def keep(self, dropped: Sequence[Tensor]) -> None:
        self._account.hold(dropped, self._nbytes)

    def forget(self, dropped: Sequence[Tensor]) -> None:
        self._account.release(dropped, self._nbytes)

    def drop(self, dropped: Sequence[Tensor]) -> None:
        pass  # they were never in the account, and Python frees them


class TensorCell(_Tensors):
    """:class:`~omni_loop.stage.TensorState`. ``set`` copies, so the stage may reuse what it gave."""

    __slots__ = ("_spec", "_staged")

    def __init__(self, name: str, spec: TensorSpec, scope: Scope, account: Account) -> None:
        super().__init__(name, spec, scope, account)
        self._spec = spec
        self.value: Tensor | None = None  # None: never set
        self._staged: Tensor | None = None

    def get(self) -> Tensor:
        if self._staged is not None:
            return self._staged
        return self._fill() if self.value is None else self.value

    def _fill(self) -> Tensor:
        return torch.full(self._spec.shape, self._spec.fill, dtype=self._like.dtype, device=self._like.device)

    def set(self, value: Any) -> None:
        self._scope.write(self)
        self._staged = checked(self.name, value, self._spec.shape, self._like).clone()

    def export(self) -> Tensor:
        """A copy of what is committed."""
        return self._fill() if self.value is None else self.value.clone()

    def commit(self) -> Sequence[Tensor]:
        if self._staged is None:
            return ()
        old, self.value, self._staged = self.value, self._staged, None
        return self.elements(old)

    def discard(self) -> None:
        self._staged = None

    def elements(self, value: Tensor | None) -> Sequence[Tensor]:
        return () if value is None else (value,)

    def copy_to(self, other: TensorCell) -> None:
        other.value = self.value

    def reset(self) -> None:
        self.value, self._staged = None, None


class RingCell(_Tensors):
    """:class:`~omni_loop.stage.Ring`. ``push`` copies, but not what the ring itself holds."""

    __slots__ = ("_fallen", "_mixed", "_spec", "_staged")

    def __init__(self, name: str, spec: RingSpec, scope: Scope, account: Account) -> None:
        super().__init__(name, spec, scope, account)
        self._spec = spec
        self.value: tuple[Tensor, ...] = ()
        self._staged: list[Tensor] | None = None
        self._fallen = 0  # committed items that pushes drove out
        self._mixed = False  # whether that is not all that happened to them

    def items(self) -> Sequence[Tensor]:
        return self.value if self._staged is None else tuple(self._staged)

    def push(self, item: Any) -> None:
        self._scope.write(self)
        if any(item is known for known in self.value):  # what was committed is sound and never written to
            self._mixed = True
        else:
            item = checked(self.name, item, self._spec.shape, self._like).clone()
        staged = self._staged
        if staged is None:
            staged = self._staged = list(self.value)
        staged.append(item)
        if len(staged) > self._spec.capacity:
            del staged[0]
            self._fallen += 1

    def clear(self) -> None:
        self._scope.write(self)
        self._staged, self._mixed = [], True

    def export(self) -> Tensor:
        """A copy of what is committed: ``[n, *shape]``."""
        return torch.stack(self.value) if self.value else self._like.new_empty((0, *self._spec.shape))

    def commit(self) -> Sequence[Tensor]:
        if self._staged is None:
            return ()
        old, fallen, mixed = self.value, self._fallen, self._mixed
        self.value = tuple(self._staged)
        self.discard()
        if not mixed:
            return old[:fallen]
        held = set(map(id, self.value))
        return [item for item in old if id(item) not in held]

    def discard(self) -> None:
        self._staged, self._fallen, self._mixed = None, 0, False

    def elements(self, value: tuple[Tensor, ...]) -> Sequence[Tensor]:
        return value

    def copy_to(self, other: RingCell) -> None:
        other.value = self.value

    def reset(self) -> None:
        self.value = ()
        self.discard()


class CounterCell(Cell):
    """:class:`~omni_loop.stage.Counter`."""

    __slots__ = ("_spec", "_staged")

    def __init__(self, name: str, spec: CounterSpec, scope: Scope) -> None:
        super().__init__(name, scope)
        self._spec = spec
        self.value: int = spec.start
        self._staged: int | None = None

    def get(self) -> int:
        return self.value if self._staged is None else self._staged

    def set(self, value: int) -> None:
        self._scope.write(self)
        if isinstance(value, bool) or not isinstance(value, int):
            raise InvalidInput(f"counter {self.name!r} takes an int, not {type(value).__name__}")
        self._staged = value

    def commit(self) -> Sequence[Any]:
        if self._staged is not None:
            self.value, self._staged = self._staged, None
        return ()

    def discard(self) -> None:
        self._staged = None

    def elements(self, value: int) -> Sequence[Any]:
        return ()

    def keep(self, dropped: Sequence[Any]) -> None:
        pass  # a number has no elements

    def forget(self, dropped: Sequence[Any]) -> None:
        pass

    def drop(self, dropped: Sequence[Any]) -> None:
        pass

    def copy_to(self, other: CounterCell) -> None:
        other.value = self.value

    def reset(self) -> None:
        self.value, self._staged = self._spec.start, None
