"""What a session's earlier chunks do to its next one: they are averaged with it.

They lie in typed state, so that they commit, roll back, fork and rewind with the session. How a chunk is continued by
the next one: :mod:`omni_loop.action_queue`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from omni_loop.stage import RingSpec, StateSpec, StateView


class Ensemble:
    """Temporal ensembling (ACT, arXiv:2304.13705, algorithm 2): each step's action is the mean over all chunks that
    foresaw it, weighing ``exp(-decay * i)`` where the oldest chunk is ``i = 0``. Chunks are aligned by control step,
    so they need not follow each other step by step."""

    def __init__(self, horizon: int, action_dim: int, decay: float) -> None:
        self._horizon, self._dim, self._decay = horizon, action_dim, decay

    def state_specs(self) -> Mapping[str, StateSpec]:
        shape = (self._horizon, self._dim)
        return {"chunks": RingSpec(shape, self._horizon), "chunk_steps": RingSpec((1,), self._horizon, "int64")}

    def apply(self, state: StateView, step: int, chunk: Tensor) -> Tensor:
        """``chunk float32[horizon, action_dim]`` from ``step`` on, averaged with those before it, which it joins."""
        chunks, steps = state.ring("chunks"), state.ring("chunk_steps")
        chunks.push(chunk)
        steps.push(torch.tensor([step]))
        given = torch.stack(list(chunks.items())).cpu()
        return averaged(given, torch.cat(list(steps.items())).cpu(), step, self._decay)


def averaged(chunks: Tensor, steps: Tensor, step: int, decay: float) -> Tensor:
    """Chunks ``float32[n, horizon, d]``, the oldest first, that begin at ``steps int64[n]``, as one from ``step`` on
    ``[horizon, d]``. The last of them begins at ``step``, so that every row has one at least."""
    n, horizon, _ = chunks.shape
    at = step - steps[:, None] + torch.arange(horizon)  # of chunk i, the row that is for step + j
    foresaw = (at >= 0) & (at < horizon)
    rank = foresaw.cumsum(0) - 1
    weights = (torch.exp(-decay * rank.double()) * foresaw)[..., None]
    rows = chunks.double()[torch.arange(n)[:, None], at.clamp(0, horizon - 1)]
    return ((weights * rows).sum(0) / weights.sum(0)).float()
