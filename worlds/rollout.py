"""A batch of rollouts on a plain dense cache: evaluation, and the baseline the block pool is held against."""

from __future__ import annotations

import torch
from torch import Tensor

from .dit import DiT, denoise


class DenseRollout:
    """``b`` rollouts in step: observe real frames, predict the next. Not for serving: the cache is
    concatenated and cut, where the pool moves nothing."""

    def __init__(self, model: DiT, batch: int) -> None:
        c = model.config
        self.model = model
        self.kv = torch.zeros(c.layers, 2, batch, 0, c.heads, c.head_dim)
        self.last: Tensor | None = None  # [b, 1, p, c]

    @torch.no_grad()
    def observe(self, latents: Tensor, action: Tensor | None) -> None:
        """Clean pass of ``latents [b, p, c]``, led to by ``action [b, 2]`` (None for a first frame)."""
        c, b = self.model.config, len(latents)
        x = latents[:, None]
        prev = x if self.last is None else self.last
        known = torch.full((b, 1), action is not None)
        led = torch.zeros(b, 1, c.action_dim) if action is None else action[:, None]
        _, fresh = self.model.frame(x, prev, torch.zeros(b, 1), led, known, self.model.roped_context(self.kv))
        self.kv = torch.cat([self.kv, fresh], 3)[:, :, :, -(c.window - 1) * c.tokens :]
        self.last = x

    @torch.no_grad()
    def predict(self, action: Tensor, noise: Tensor, steps: int) -> Tensor:
        """Next latents ``[b, p, c]`` under ``action [b, 2]`` from ``noise [b, p, c]``; commits nothing."""
        if self.last is None:
            raise ValueError("observe a frame first")
        known = torch.ones(len(action), 1, dtype=torch.bool)
        context = self.model.roped_context(self.kv)
        return denoise(self.model, self.last, action[:, None], known, context, noise[:, None], steps)[:, 0]
