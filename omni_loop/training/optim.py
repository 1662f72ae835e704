"""Optimiser set-up of the recipes: warm-up and decay, weight averaging, Muon beside AdamW."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

M = TypeVar("M", bound=nn.Module)


def cosine(step: int, steps: int, warmup: int, floor: float = 0.0) -> float:
    """Factor on the learning rate: linear warm-up, then cosine to ``floor``."""
    ramp = min(1.0, (step + 1) / max(warmup, 1))
    return ramp * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, step / steps))))


def trapezoid(step: int, steps: int, warmup: int, hold: float = 0.4, floor: float = 0.02) -> float:
    """Factor on the learning rate: warm-up, constant for ``hold`` of the steps, linear to ``floor``."""
    ramp = min(1.0, (step + 1) / max(warmup, 1))
    return ramp * max(floor, min(1.0, (1 - step / steps) / (1 - hold)))


class Optimiser:
    """AdamW, with Muon on the matrices named by ``muon`` (arXiv 2502.16982), one schedule for both."""

    def __init__(
        self,
        params: Iterable[tuple[str, nn.Parameter]],
        lr: float,
        weight_decay: float = 0.01,
        betas: tuple[float, float] = (0.9, 0.99),
        muon: tuple[str, ...] = (),
        muon_lr: float = 0.02,
        clip: float = 1.0,
    ) -> None:
        named = [(n, p) for n, p in params if p.requires_grad]
        matrices = [p for n, p in named if n.endswith(".weight") and p.ndim == 2 and any(n.startswith(m) for m in muon)]
        chosen = {id(p) for p in matrices}
        rest = [p for _, p in named if id(p) not in chosen]
        self._parts: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(rest, lr=lr, betas=betas, weight_decay=weight_decay)
        ]
        if matrices:
            self._parts.append(torch.optim.Muon(matrices, lr=muon_lr, momentum=0.95, weight_decay=weight_decay))
        self._base = [[g["lr"] for g in part.param_groups] for part in self._parts]
        self._params, self._clip = [p for _, p in named], clip

    def step(self, loss: Tensor, factor: float) -> None:
        """Backward, clip, and one step at ``factor`` times the base learning rates."""
        for part, base in zip(self._parts, self._base, strict=True):
            part.zero_grad(set_to_none=True)
            for group, lr in zip(part.param_groups, base, strict=True):
                group["lr"] = lr * factor
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._params, self._clip)
        for part in self._parts:
            part.step()


class Average(Generic[M]):
    """Exponential moving average of a module's parameters, with the usual early warm-up."""

    def __init__(self, module: M, decay: float) -> None:
        self.module: M = copy.deepcopy(module).eval().requires_grad_(False)
        self._decay, self._steps = decay, 0

    @torch.no_grad()
    def update(self, module: M) -> None:
        self._steps += 1
        decay = min(self._decay, (1 + self._steps) / (10 + self._steps))
        torch._foreach_lerp_(list(self.module.parameters()), [p.detach() for p in module.parameters()], 1 - decay)
