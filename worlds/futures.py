"""Many futures of one session: what the world model imagines under each of ``n`` action sequences.

A future forks from the session's cache: what all share is gathered and roped once, what each imagines stays in a
workspace of its own that is gone with the search; the pool and the session's state are only read. All futures go on
in step, one batched pass after the other. A frame that only serves to choose takes one denoise step, the clean pass of
the last frame is left out, and the noise is the same in every future, so that they differ by their actions alone.

Shapes: ``n`` futures, ``h`` steps, ``p`` tokens a frame, ``c`` numbers a token, ``a`` numbers an action.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace

import torch
from torch import Tensor

from .dit import DiT, denoise
from .window import Context

BATCH = 64  # futures in one pass: more are no faster each, and their keys and values take room


class Futures:
    """Futures that go on from one frame.

    ``kv [layers, 2, s, heads, e]``: what the session's cache gathers; ``last [p, c]``: the latents of its last frame;
    ``noise [h, p, c]``: of each step to come, where a rollout of fewer steps takes the first.
    """

    def __init__(self, model: DiT, kv: Tensor, last: Tensor, noise: Tensor, steps: int = 1, batch: int = BATCH) -> None:
        c = model.config
        past = kv[:, :, max(0, kv.shape[2] - (c.window - 1) * c.tokens) :]
        self._context = model.roped_context(past.unsqueeze(2))
        self._model, self._last, self._noise, self._steps, self._batch = model, last, noise, steps, batch

    def imagine(self, actions: Tensor) -> Generator[None, None, Tensor]:
        """Latents ``[n, h, p, c]`` under ``actions [n, h, a]`` in -1..1; yields after every batched frame."""
        parts: list[Tensor] = []
        for part in actions.split(self._batch):
            latents = yield from self._together(part)
            parts.append(latents)
        return torch.cat(parts)

    def _together(self, actions: Tensor) -> Generator[None, None, Tensor]:
        n, steps, device = len(actions), actions.shape[1], self._last.device
        context = self._forked(n)
        known = torch.ones(n, 1, dtype=torch.bool, device=device)
        prev = self._last.expand(n, 1, *self._last.shape)
        frames: list[Tensor] = []
        for i, action in enumerate(actions.unsqueeze(2).unbind(1)):
            noise = self._noise[i].expand(prev.shape)
            latents = denoise(self._model, prev, action, known, context, noise, self._steps)
            frames.append(latents[:, 0])
            if i + 1 < steps:
                self._model.look_at(latents, prev, action, known, context)
                context.keep(range(n))
            prev = latents
            yield
        return torch.stack(frames, 1)

    def _forked(self, n: int) -> Context:
        c = self._context
        room = c.room.expand(-1, -1, n, -1, -1, -1).clone(memory_format=torch.contiguous_format)
        return replace(c, room=room, position=c.position * n)


@torch.no_grad()
def first_frame(model: DiT, latents: Tensor) -> Tensor:
    """Cache ``[layers, 2, p, heads, e]`` of a frame ``[1, p, c]`` that nothing known led to."""
    c, device = model.config, latents.device
    empty = model.roped_context(torch.zeros(c.layers, 2, 1, 0, c.heads, c.head_dim, device=device))
    known = torch.zeros(1, 1, dtype=torch.bool, device=device)
    level, action = torch.zeros(1, 1, device=device), torch.zeros(1, 1, c.action_dim, device=device)
    x = latents[None]
    return model.frame(x, x, level, action, known, empty)[1][:, :, 0]
