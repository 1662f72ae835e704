"""Other ways to keep what a frame's predecessors said, on the same weights, sampler and noise as the frames stage.

Each rolls latents out as a peer of this project would: a dense window, ``torch.cat``, a ring that is moved, no cache.
None pays for sessions, transactions or payloads: what ours costs beside its models is in ours alone.

Shapes are those of :mod:`omni_loop_worlds.dit`: ``b`` sessions, ``p`` tokens a frame, ``h`` heads of ``e``.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from omni_loop_worlds.dit import Block, DiT, attend, band_mask, denoise, gelu, noise_levels
from omni_loop_worlds.window import Context


class Rollout:
    """``b`` sessions that imagine frame after frame from ``first [b, 1, p, c]``."""

    def __init__(self, model: DiT, steps: int, first: Tensor) -> None:
        self.model, self.steps, self.last = model, steps, first

    def frames(self, generators: Sequence[torch.Generator], actions: Tensor) -> Tensor:
        """The next latents ``[b, n, p, c]`` under ``actions [b, n, 2]`` in -1..1, one generator a session."""
        shape = self.last.shape[1:]

        def next_noise() -> Tensor:
            return torch.stack([torch.randn(shape, generator=g) for g in generators])

        made = []
        for i in range(actions.shape[1]):
            self.last = self._next(actions[:, i : i + 1], next_noise())
            made.append(self.last)
        return torch.cat(made, 1)

    def _next(self, action: Tensor, noise: Tensor) -> Tensor:
        raise NotImplementedError

    def _known(self, known: bool) -> Tensor:
        return torch.full((len(self.last), 1), known)


class Cached(Rollout):
    """A window per session that lasts over ticks. The passes are the model's own, those that the frames stage runs."""

    context: Context  # of all sessions, in a tick

    def __init__(self, model: DiT, steps: int, first: Tensor) -> None:
        super().__init__(model, steps, first)
        self.context = self._empty(len(first))
        self._clean_pass(first, torch.zeros(len(first), 1, model.config.action_dim), known=False)

    def _next(self, action: Tensor, noise: Tensor) -> Tensor:
        latents = denoise(self.model, self.last, action, self._known(True), self.context, noise, self.steps)
        self._clean_pass(latents, action, known=True)
        return latents

    def _clean_pass(self, latents: Tensor, action: Tensor, known: bool) -> None:
        level = torch.zeros(len(latents), 1)
        self.model.residual(latents, self.last, level, action, self._known(known), self.context)
        self._keep()

    def _empty(self, sessions: int) -> Context:
        c = self.model.config
        return self.model.roped_context(torch.zeros(c.layers, 2, sessions, 0, c.heads, c.head_dim))

    def _keep(self) -> None:
        """The clean pass's keys and values join the window."""
        raise NotImplementedError


class Dense(Cached):
    """A tensor per session, its oldest frame overwritten by the newest; sessions meet in one batch, for which their
    tensors are put side by side once a tick, as ours are. What differs are pages, all that is kept in books, and
    that a frame's clean pass is a pass of its own."""

    def __init__(self, model: DiT, steps: int, first: Tensor) -> None:
        super().__init__(model, steps, first)
        self._rooms = [self.context.room[:, :, i : i + 1].clone() for i in range(len(first))]

    def frames(self, generators: Sequence[torch.Generator], actions: Tensor) -> Tensor:
        if len(self._rooms) == 1:
            self.context.room = self._rooms[0]
            return super().frames(generators, actions)
        self.context.room = torch.cat(self._rooms, 2)
        made = super().frames(generators, actions)
        for i, room in enumerate(self._rooms):
            room.copy_(self.context.room[:, :, i : i + 1])
        return made

    def _keep(self) -> None:
        self.context.keep(range(len(self.last)))


class Grown(Context):
    """A context whose window is put behind the present frame's place by ``torch.cat``, anew at every pass."""

    @property
    def seen(self) -> Tensor:
        self.latest = torch.cat([self.room[:, :, :, :0].new_empty(self._place()), self.room], 3)
        return self.latest

    def grown(self, held: int) -> Grown:
        """The context of the next frame: the latest pass's joins the window of ``held`` frames."""
        return Grown(self.latest[:, :, :, : held * self.tokens], [1 + self.position[0]], self.tokens)

    def _place(self) -> tuple[int, ...]:
        layers, two, b, _, h, e = self.room.shape
        return layers, two, b, self.tokens, h, e


class Cat(Cached):
    """The window and every pass's keys and values in a new tensor by ``torch.cat``, of all layers at once; as in
    ``transformers``' dynamic cache with a sliding window."""

    context: Grown

    def _empty(self, sessions: int) -> Context:
        c = self.model.config
        return Grown(torch.zeros(c.layers, 2, sessions, 0, c.heads, c.head_dim), [0] * sessions, c.tokens)

    def _keep(self) -> None:
        self.context = self.context.grown(self.model.config.window - 1)


class Ring(Cached):
    """A window allocated once; every pass writes its frame's place, and the window is moved on by a frame, as the
    rolling caches of CausVid and Self-Forcing."""

    def _keep(self) -> None:
        context, p = self.context, self.context.tokens
        past = min(1 + context.position[0], context.window - 1) * p
        # Through a copy, since source and target overlap.
        context.room[:, :, :, p : p + past] = context.room[:, :, :, :past].clone()
        self.context = Context(context.room, [1 + context.position[0]], p)


class Recompute(Rollout):
    """No cache: every denoise step runs the frames of the window, all sessions in one batch. Until the window is full
    this is the same function; then its oldest frames have lost what they saw."""

    def __init__(self, model: DiT, steps: int, first: Tensor) -> None:
        super().__init__(model, steps, first)
        self._frames, self._actions = first, torch.zeros(len(first), 1, model.config.action_dim)
        self._known_past = self._known(False)

    def _next(self, action: Tensor, noise: Tensor) -> Tensor:
        c = self.model.config
        past = slice(-(c.window - 1), None)
        frames = self._frames[:, past]
        led = torch.cat([self._actions[:, past], action], 1)
        known = torch.cat([self._known_past[:, past], self._known(True)], 1)
        n = led.shape[1]
        # The oldest frame's predecessor has left the window: it stands in for itself, as a first frame does.
        previous = torch.cat([frames[:, :1], frames], 1)
        x = noise
        for now, then in pairwise(noise_levels(self.steps)):
            level = torch.zeros(len(x), n)
            level[:, -1] = now
            out = self._residual(torch.cat([frames, x], 1), previous, level, led, known)
            clean = frames[:, -1:] + out
            x = clean + (then / now) * (x - clean)
        self._frames, self._actions, self._known_past = torch.cat([frames, x], 1), led, known
        return x

    def _residual(self, x: Tensor, prev: Tensor, level: Tensor, action: Tensor, known: Tensor) -> Tensor:
        """Of the last of ``n`` frames ``[b, n, p, c]``, by the operations of :meth:`Block.serve`."""
        c, (b, n, p, _) = self.model.config, x.shape
        h, shared, final = self.model.embed(x, prev, level, action, known)
        mask = band_mask(n, p, c.window)
        turn = [t.view(n, 1, 1, 1, -1) for t in self.model.turn(range(n))]
        for block in self.model.blocks:
            assert isinstance(block, Block)
            m = (shared + block.table).unsqueeze(3).unbind(2)  # six [b, n, 1, d]
            y = torch.addcmul(m[1], F.layer_norm(h, h.shape[-1:]), 1 + m[0])
            qkv = block.qkv(y).view(b, n, p, 3, c.heads, c.head_dim)
            qk = F.rms_norm(qkv[..., :2, :, :], (c.head_dim,)) * torch.stack([block.q_scale, block.k_scale])[:, None]
            roped = torch.addcmul(qk * turn[0], qk.roll(c.head_dim // 2, -1), turn[1])
            q, k, v = (t.flatten(1, 2).transpose(1, 2) for t in (*roped.unbind(3), qkv[:, :, :, 2]))
            a = attend(q, k, v, mask).transpose(1, 2).reshape(h.shape)
            h = torch.addcmul(h, m[2], block.out(a))
            y = torch.addcmul(m[4], F.layer_norm(h, h.shape[-1:]), 1 + m[3])
            h = torch.addcmul(h, m[5], block.down(gelu(block.up(y))))
        return self.model.head(h[:, -1:], final[:, -1:])
