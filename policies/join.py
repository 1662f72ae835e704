"""Guided inpainting: a flow-matching sample that joins the chunk before it (real-time chunking, arXiv:2506.07339).

At flow time ``t`` the sample is expected to end at ``x + (1 - t) v``. The velocity ``v`` is corrected by the gradient
that pulls that end towards the rows left of the chunk before (pseudo-inverse guidance, arXiv:2310.04432), row by row
weighed: 1 for frozen rows, which are executed before the new chunk is there; falling exponentially over the next ones
(the paper's equation 5); 0 beyond them. Frozen rows then are the very same.

The paper lets the weights fall over all that is left of the chunk before; here they fall over ``SOFT`` rows. Longer
tails jump less and hold on to the old plan for longer (``docs/player.md`` has what was tried, on seeds no figure uses).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

SOFT = 4  # rows after the frozen ones that are pulled too
MOST = 5.0  # bound of a step's guidance: with few steps more makes it diverge (the paper's section 4.1)


@dataclass(frozen=True, slots=True)
class Guide:
    """``goal [b, horizon, action_dim]`` and ``weights [b, horizon]``; rows ``[b]`` of ``guided`` False are sampled as
    if there was no guide. ``counts``: frozen rows of each."""

    goal: Tensor
    weights: Tensor
    guided: Tensor
    counts: tuple[int, ...]

    def moved(self, origin: Tensor, scale: float) -> Guide:
        """In units of ``scale``, relative to ``origin [b, 1, action_dim]``."""
        return replace(self, goal=(self.goal - origin) / scale)

    def velocity(self, flow: Callable[[Tensor], Tensor], x: Tensor, t: float) -> Tensor:
        """The corrected velocity at ``x [b, horizon * action_dim]``."""
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            v = flow(x)
            end = x + (1 - t) * v
            error = (self.goal.flatten(1) - end.detach()).view_as(self.goal) * self.weights[..., None]
            (pull,) = torch.autograd.grad(end, x, error.flatten(1))
        v = v.detach()
        return torch.where(self.guided[:, None], v + strength(t) * pull, v)

    def frozen(self, chunks: Tensor) -> Tensor:
        """``chunks`` with the frozen rows as they were in the chunk before."""
        chunks = chunks.clone()
        for chunk, goal, n in zip(chunks, self.goal, self.counts, strict=True):
            chunk[:n] = goal[:n]
        return chunks


def guide_of(left_over: Sequence[Tensor | None], frozen: Sequence[int], horizon: int) -> Guide | None:
    """Of a batch: each item's rows that are left ``[n, action_dim]``, None where it joins nothing, and how many of them
    are frozen. None: no item joins anything."""
    some = next((left for left in left_over if left is not None), None)
    if some is None:
        return None
    b = len(left_over)
    goal, weights = some.new_zeros(b, horizon, some.shape[-1]), some.new_zeros(b, horizon)
    for i, left in enumerate(left_over):
        if left is not None:
            goal[i, : len(left)] = left
            weights[i] = prefix_weights(frozen[i], min(len(left), frozen[i] + SOFT), horizon).to(weights)
    guided = torch.tensor([left is not None for left in left_over], device=some.device)
    return Guide(goal, weights, guided, tuple(frozen))


def prefix_weights(frozen: int, left: int, horizon: int) -> Tensor:
    """``[horizon]``, the paper's equation 5: 1 for ``frozen`` rows, then falling to 0 at row ``left``."""
    i = torch.arange(horizon, dtype=torch.float32)
    c = ((left - i) / (left - frozen + 1)).clamp(0, 1)
    soft = c * torch.expm1(c) / (math.e - 1)
    return torch.where(i < frozen, 1.0, soft)


def strength(t: float) -> float:
    """How strongly the expected end at flow time ``t`` is pulled: ``(1 - t) / (t r^2)``, where ``r^2 = (1 - t)^2 /
    (t^2 + (1 - t)^2)``, bounded."""
    if t <= 0:
        return MOST
    return min(MOST, (t * t + (1 - t) ** 2) / (t * (1 - t)))
