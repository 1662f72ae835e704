"""Random numbers of one session in a batch of many: what a session draws does not depend on its neighbours."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Generator, Tensor
from torch.overrides import TorchFunctionMode

from omni_loop.errors import StageFailed

_global = threading.Lock()  # runners in threads of one process share torch's global generators


def generators(seeds: Sequence[int]) -> list[Generator]:
    """One per session. Always of the CPU, so that a session draws the same on every device."""
    return [Generator().manual_seed(seed) for seed in seeds]


def normal(own: Sequence[Generator], shape: tuple[int, ...], device: torch.device | str) -> Tensor:
    """``float32[len(own), *shape]``: noise to start from, each row of its own generator."""
    return torch.stack([torch.randn(shape, generator=g) for g in own]).to(device)


@contextmanager
def seeded(seed: int, device: torch.device | str) -> Iterator[None]:
    """The global generators are this call's, and as they were after it."""
    kind = torch.device(device).type
    with _global, torch.random.fork_rng(devices=None if kind == "cuda" else [], device_type="cuda"):
        torch.manual_seed(seed)
        yield


class Rows(TorchFunctionMode):
    """While it lasts, ``torch.randn``, ``randn_like``, ``rand``, ``rand_like`` and ``multinomial`` draw row by row.

    The leading axis of what they give is the batch, or a multiple of it that is ordered by session; each session's
    rows come from its own generator. Anything else random raises StageFailed: it would be shared between sessions.
    """

    def __init__(self, seeds: Sequence[int]) -> None:
        super().__init__()
        self._generators = generators(seeds)
        self._draw: Mapping[Any, Callable[..., Tensor]] = {
            torch.randn: self._fill(torch.randn),
            torch.rand: self._fill(torch.rand),
            torch.randn_like: self._like(torch.randn),
            torch.rand_like: self._like(torch.rand),
            torch.multinomial: self._multinomial,
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in self._draw:
            return self._draw[func](*args, **kwargs)
        if func in _SHARED:
            raise StageFailed(f"the policy draws with {func.__name__}, which cannot be drawn session by session")
        return func(*args, **kwargs)

    def _fill(self, draw: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def filled(*size: Any, **kwargs: Any) -> Tensor:
            given = kwargs.get("size", size[0] if len(size) == 1 and not isinstance(size[0], int) else size)
            return self._rows(draw, tuple(given), kwargs.get("dtype"), kwargs.get("device"))

        return filled

    def _like(self, draw: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def filled(like: Tensor, **kwargs: Any) -> Tensor:
            dtype, device = kwargs.get("dtype") or like.dtype, kwargs.get("device") or like.device
            return self._rows(draw, tuple(like.shape), dtype, device)

        return filled

    def _rows(self, draw: Callable[..., Tensor], shape: tuple[int, ...], dtype: Any, device: Any) -> Tensor:
        each = self._each(shape[0] if shape else 0)
        parts = [draw((each, *shape[1:]), generator=g, dtype=dtype) for g in self._generators]
        return torch.cat(parts).to(device or "cpu")

    def _multinomial(self, weights: Tensor, num_samples: int, replacement: bool = False, **_: Any) -> Tensor:
        parts = weights.cpu().split(self._each(len(weights)))
        drawn = [
            torch.multinomial(p, num_samples, replacement, generator=g)
            for p, g in zip(parts, self._generators, strict=True)
        ]
        return torch.cat(drawn).to(weights.device)

    def _each(self, rows: int) -> int:
        """Rows of one session."""
        each, rest = divmod(rows, len(self._generators))
        if rest or not each:
            raise StageFailed(f"the policy draws {rows} rows for {len(self._generators)} sessions")
        return each


_SHARED = {
    torch.normal,
    torch.randint,
    torch.randint_like,
    torch.randperm,
    torch.bernoulli,
    torch.poisson,
    Tensor.normal_,
    Tensor.uniform_,
    Tensor.bernoulli_,
    Tensor.exponential_,
    Tensor.random_,
    Tensor.multinomial,
}
