"""Causal diffusion transformer over frames of latents; one frame is one block of 16 tokens.

Every frame attends to the frames before it (a window of ``window`` frames with itself) and to itself. It
is denoised from noise at level 1 to level 0 by predicting the clean latents as a residual on the previous
frame's (rectified-flow path ``x_u = (1 - u) x + u noise``). Training runs a clean and a noisy stream of the
same frames in one pass (teacher forcing as in arXiv 2412.07772, an own noise level per frame as in
diffusion forcing, arXiv 2407.01392); serving keeps the clean stream's keys and values in blocks.

Shapes: ``b`` batch, ``f`` frames, ``p`` = 16 tokens a frame, ``d`` width, ``h`` heads, ``e`` head size,
``s`` tokens of context. Keys are kept un-roped and get their rotary position when a tick gathers them, so
positions are relative to the window and a rollout has no last frame.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Literal, cast

import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn

from .window import Ahead, Context, Rope, look


class DiTConfig(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["dit"] = "dit"
    token_dim: int = 72
    tokens: int = 16
    width: int = 160
    layers: int = 5
    heads: int = 5
    ratio: int = 3  # feed-forward width over width
    action_dim: int = 2
    window: int = 6  # frames a frame sees, itself included
    denoise_steps: int = 2

    @property
    def head_dim(self) -> int:
        return self.width // self.heads


def rotate(x: Tensor, rope: Rope) -> Tensor:
    """Rotary embedding over the last axis; ``rope`` broadcasts against ``x``'s halves."""
    cos, sin = rope
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1).to(x.dtype)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """``[b, h, n, e]`` attention; plain matmul is faster than masked SDPA on a CPU at these sizes."""
    if mask is None:
        return F.scaled_dot_product_attention(q, k, v)
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
    return scores.masked_fill(~mask, float("-inf")).softmax(-1).to(v.dtype) @ v


def gelu(x: Tensor) -> Tensor:
    """``F.gelu`` with ``approximate="tanh"`` by the identity 1 + tanh u = 2 sigmoid 2u: half the time on a CPU."""
    u = torch.addcmul(x, x.square(), x, value=0.044715)
    return x * u.mul_(2 * math.sqrt(2 / math.pi)).sigmoid_()


def attend_streams(q: Tensor, k: Tensor, v: Tensor, frames: int, window: int) -> Tensor:
    """Attention of a clean stream and a noisy one behind it, ``[b, h, 2 * frames * p, e]`` each.

    Frame i of either stream sees the clean frames i - window + 1 .. i - 1 and its own tokens. Equal to
    :func:`attend` under :func:`two_stream_mask`, without the scores that the mask would throw away.
    """
    b, h, n, e = q.shape
    p, past_frames = n // (2 * frames), window - 1

    def past(x: Tensor) -> Tensor:  # clean frames before each frame: [b, h, f, past * p, e]
        x = F.pad(x[:, :, 0], (0, 0, 0, 0, past_frames, 0))
        return torch.stack([x[:, :, j : j + frames] for j in range(past_frames)], 3).flatten(3, 4)

    q, k, v = (x.view(b, h, 2, frames, p, e) for x in (q * e**-0.5, k, v))
    both = q.transpose(2, 3).flatten(3, 4)  # [b, h, f, 2p, e]
    before = (both @ past(k).transpose(-1, -2)).view(b, h, frames, 2, p, -1).transpose(2, 3)
    i, j = torch.arange(frames)[:, None], torch.arange(past_frames * p)[None] // p
    real = (i - past_frames + j >= 0).view(frames, 1, -1).to(q.device)
    own = q @ k.transpose(-1, -2)  # [b, h, 2, f, p, p]
    weights = torch.cat([before.masked_fill(~real, float("-inf")), own], -1).softmax(-1).to(v.dtype)
    w_before, w_own = weights.split([past_frames * p, p], -1)
    seen = (w_before.transpose(2, 3).flatten(3, 4) @ past(v)).view(b, h, frames, 2, p, e).transpose(2, 3)
    return (seen + w_own @ v).reshape(b, h, n, e)


class Block(nn.Module):
    """Attention and feed-forward, modulated by a shared projection plus a table of its own."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        d = config.width
        self.heads, self.head_dim = config.heads, config.head_dim
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, config.ratio * d), nn.Linear(config.ratio * d, d)
        self.table = nn.Parameter(torch.randn(6, d) / d**0.5)
        self.q_scale, self.k_scale = nn.Parameter(torch.ones(self.head_dim)), nn.Parameter(torch.ones(self.head_dim))

    def modulation(self, shared: Tensor) -> tuple[Tensor, ...]:
        """``[b, f, 6, d]`` to six ``[b, f, 1, d]``."""
        return (shared + self.table.to(shared.dtype)).unsqueeze(3).unbind(2)

    def qkv_of(self, x: Tensor, m: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
        """``[b, f, p, d]`` to three ``[b, h, f * p, e]``; queries and keys normalised, not roped."""
        b, f, p, d = x.shape
        y = F.layer_norm(x, (d,)) * (1 + m[0]) + m[1]
        q, k, v = self.qkv(y).view(b, f * p, 3, self.heads, self.head_dim).permute(2, 0, 3, 1, 4)
        e = self.head_dim
        return F.rms_norm(q, (e,)) * self.q_scale, F.rms_norm(k, (e,)) * self.k_scale, v

    def serve(
        self, x: Tensor, m: Tensor, scale: Tensor, turn: Rope, room: Tensor, ahead: Ahead | None, layer: int, quiet: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Frames ``[n, p, d]``: the present ones, whose roped keys and values are written to the head of ``room [2, b,
        s, h, e]``, to which they attend, and those ``ahead``. The block's output and the frames' un-roped keys and
        values ``[n, p, h, e]``. ``m [n, 6, 1, d]`` as :meth:`modulation`, with 1 added where it scales; ``scale [2, 1,
        e]`` of queries and keys. With ``quiet``, the number of the present ones, the output is of those ahead alone."""
        (n, p, d), b = x.shape, room.shape[1]
        y = torch.addcmul(m[:, 1], F.layer_norm(x, (d,)), m[:, 0])
        qkv = self.qkv(y).view(n, p, 3, self.heads, self.head_dim)
        qk = F.rms_norm(qkv[:, :, :2], (self.head_dim,)) * scale
        q, k = torch.addcmul(qk * turn[0], qk.roll(self.head_dim // 2, -1), turn[1]).unbind(2)
        v = qkv[:, :, 2]
        seen = []
        if quiet:
            room[0, :, :p], room[1, :, :p] = k[:b], v[:b]
        else:
            seen.append(look(q[:b], k[:b], v[:b], room, slice(None)))
        if ahead is not None:
            then = ahead.seen[layer]
            for rows, place in ahead.kept:
                then[:, rows, place] = then[:, rows, :p]
            seen.append(look(q[b:], k[b:], v[b:], then, ahead.rows))
        x, m = x[quiet:], m[quiet:]
        if not seen:
            return x, qk[:, :, 1], v
        a = seen[0] if len(seen) == 1 else torch.cat(seen)
        x = torch.addcmul(x, m[:, 2], self.out(a.reshape(n - quiet, p, d)))
        y = torch.addcmul(m[:, 4], F.layer_norm(x, (d,)), m[:, 3])
        return torch.addcmul(x, m[:, 5], self.down(gelu(self.up(y)))), qk[:, :, 1], v

    def rest(self, x: Tensor, a: Tensor, m: tuple[Tensor, ...]) -> Tensor:
        b, f, p, d = x.shape
        x = x + m[2] * self.out(a.transpose(1, 2).reshape(b, f, p, d))
        y = F.layer_norm(x, (d,)) * (1 + m[3]) + m[4]
        return x + m[5] * self.down(F.gelu(self.up(y), approximate="tanh"))


class DiT(nn.Module):
    """See the module's text. All inputs are per frame: latents ``[b, f, p, c]``, the previous frame's
    latents, noise level ``[b, f]`` in 0..1, action that led to the frame ``[b, f, a]`` in -1..1 and whether
    it is known ``bool[b, f]``."""

    frequencies: Tensor
    level_frequencies: Tensor

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.config = config
        d = config.width
        self.inp = nn.Linear(2 * config.token_dim, d)
        self.place = nn.Parameter(torch.randn(config.tokens, d) * 0.02)
        self.level = nn.Sequential(nn.Linear(64, d), nn.SiLU(), nn.Linear(d, d))
        self.action = nn.Sequential(nn.Linear(config.action_dim, d), nn.SiLU(), nn.Linear(d, d))
        self.no_action = nn.Parameter(torch.zeros(d))
        self.shared, self.final_shared = nn.Linear(d, 6 * d), nn.Linear(d, 2 * d)
        self.blocks = nn.ModuleList([Block(config) for _ in range(config.layers)])
        self.final = nn.Linear(d, config.token_dim)
        for layer in (self.shared, self.final_shared, self.final):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)
        half = config.head_dim // 2
        self.register_buffer("frequencies", 100.0 ** (-torch.arange(half) / half), persistent=False)
        scale = torch.exp(torch.arange(32) * (-math.log(1000.0) / 31)) * 1000
        self.register_buffer("level_frequencies", scale, persistent=False)

    @property
    def _blocks(self) -> Iterable[Block]:
        return cast("Iterable[Block]", self.blocks)  # torch does not say what a ModuleList holds

    def rope(self, frames: Tensor) -> Rope:
        """Cosines and sines ``[f * p, e / 2]`` for frame positions ``[f]``."""
        angle = (frames.float()[:, None] * self.frequencies).repeat_interleave(self.config.tokens, 0)
        return angle.cos(), angle.sin()

    def embed(
        self, x: Tensor, prev: Tensor, level: Tensor, action: Tensor, known: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        b, f = level.shape
        d = self.config.width
        angle = level[..., None] * self.level_frequencies
        t = self.level(torch.cat([angle.sin(), angle.cos()], -1))
        a = torch.where(known[..., None], self.action(action), self.no_action.to(t.dtype))
        c = F.silu(t + a)
        tokens = self.inp(torch.cat([x, prev], -1)) + self.place + a[:, :, None]
        return tokens, self.shared(c).view(b, f, 6, d), self.final_shared(c).view(b, f, 2, 1, d)

    def head(self, x: Tensor, m: Tensor) -> Tensor:
        return self.final(F.layer_norm(x, (x.shape[-1],)) * (1 + m[:, :, 0]) + m[:, :, 1])

    def streams(
        self,
        x: Tensor,
        prev: Tensor,
        level: Tensor,
        action: Tensor,
        known: Tensor,
        position: Tensor,
        mask: Tensor | None = None,
    ) -> Tensor:
        """All frames at once; the residual ``[b, f, p, c]``. With a ``mask bool[f * p, f * p]``: the recompute
        that the block pool is tested against. Without: a clean stream and a noisy one behind it (training)."""
        h, shared, final = self.embed(x, prev, level, action, known)
        rope = self.rope(position)
        for block in self._blocks:
            m = block.modulation(shared)
            q, k, v = block.qkv_of(h, m)
            q, k = rotate(q, rope), rotate(k, rope)
            if mask is None:
                seen = attend_streams(q, k, v, x.shape[1] // 2, self.config.window)
            else:
                seen = attend(q, k, v, mask)
            h = block.rest(h, seen, m)
        return self.head(h, final)

    def turn(self, position: Sequence[int]) -> Rope:
        """Cosines and sines ``[n, 1, 1, 1, e]`` of frame positions, for ``x cos + roll(x, e / 2) sin``."""
        at = torch.tensor(position, dtype=torch.float32, device=self.frequencies.device)
        angle = (at[:, None] * self.frequencies)[:, None, None, None]
        cos, sin = angle.cos(), angle.sin()
        return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)

    def roped_context(self, kv: Tensor) -> Context:
        """Context of the frame behind ``kv [layers, 2, b, s, h, e]``, as gathered from blocks: once a tick."""
        c, (layers, two, b, s, h, e) = self.config, kv.shape
        held = s // c.tokens
        room = kv.new_empty(layers, two, b, c.window * c.tokens, h, e)
        past = room[:, :, :, c.tokens : c.tokens + s]
        past[:, 1] = kv[:, 1]
        cos, sin = (t.view(held, 1, 1, e) for t in self.turn(range(held)))
        keys = kv[:, 0].unflatten(2, (held, c.tokens))
        torch.addcmul(keys * cos, keys.roll(e // 2, -1), sin, out=past[:, 0].unflatten(2, (held, c.tokens)))
        return Context(room, [held] * b, c.tokens)

    @torch.no_grad()
    def frame(
        self,
        x: Tensor,
        prev: Tensor,
        level: Tensor,
        action: Tensor,
        known: Tensor,
        context: Context,
        ahead: Sequence[int] = (),
        quiet: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """One frame ``[b, 1, p, c]`` in its context, where its roped keys and its values are left: the residual, and
        this frame's un-roped keys and values ``[layers, 2, b, p, h, e]`` for the pool.

        In the rows ``ahead``, in order, the pass keeps the present frame and goes on to the next one, whose inputs
        stand behind those of all present ones; so do its results. ``quiet``: nobody wants the residual of the present
        frames, as of clean ones, and it is not computed: that given is of those ahead.
        """
        residual, keys, values = self._serve((x, prev, level, action, known), context, ahead, quiet)
        return residual, torch.stack([torch.stack(keys), torch.stack(values)], 1)

    @torch.no_grad()
    def residual(
        self, x: Tensor, prev: Tensor, level: Tensor, action: Tensor, known: Tensor, context: Context
    ) -> Tensor:
        """The residual alone: all that a denoise step wants."""
        return self._serve((x, prev, level, action, known), context, (), False)[0]

    @torch.no_grad()
    def look_at(self, x: Tensor, prev: Tensor, action: Tensor, known: Tensor, context: Context) -> None:
        """The clean pass alone: the present frame's keys and values are left in its context."""
        self._serve((x, prev, torch.zeros(x.shape[:2], device=x.device), action, known), context, (), True)

    def _serve(
        self, inputs: tuple[Tensor, ...], context: Context, ahead: Sequence[int], quiet: bool
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        embedded, shared, final = self.embed(*inputs)
        # Of all layers at once: a pass of one session is many small operations.
        m = shared[:, 0] + torch.stack([block.table for block in self._blocks])[:, None]
        m[:, :, ::3] += 1
        scales = torch.stack([scale for block in self._blocks for scale in (block.q_scale, block.k_scale)])
        scales = scales.view(len(self.blocks), 2, 1, -1)
        turn, after = context.turn, context.ahead(ahead) if ahead else None
        if turn is None or ahead:
            turn = context.turn = self.turn([*context.position, *(context.position[row] + 1 for row in ahead)])
        h, keys, values = embedded[:, 0], [], []
        per_layer = zip(self._blocks, m.unsqueeze(3), scales, context.seen, strict=True)
        # What nobody wants of the last block is left out.
        leave = len(h) - len(ahead) if quiet else 0
        for layer, (block, modulation, scale, room) in enumerate(per_layer):
            last = layer + 1 == len(self.blocks)
            h, k, v = block.serve(h, modulation, scale, turn, room, after, layer, leave if last else 0)
            keys.append(k)
            values.append(v)
        if ahead:
            context.go_on(ahead)
        return self.head(h[:, None], final[leave:]), keys, values


def band_mask(frames: int, tokens: int, window: int) -> Tensor:
    """``bool[f * p, f * p]``: frame i sees frames i - window + 1 .. i."""
    i = torch.arange(frames)
    distance = i[:, None] - i[None]
    mask = (distance >= 0) & (distance < window)
    return mask.repeat_interleave(tokens, 0).repeat_interleave(tokens, 1)


def two_stream_mask(frames: int, tokens: int, window: int) -> Tensor:
    """Clean stream ahead of noisy stream: clean i sees clean <= i, noisy i sees clean < i and itself."""
    i = torch.arange(frames)
    distance = i[:, None] - i[None]
    clean, noisy = (distance >= 0) & (distance < window), (distance > 0) & (distance < window)
    mask = torch.cat([torch.cat([clean, torch.zeros_like(clean)], 1), torch.cat([noisy, distance == 0], 1)], 0)
    return mask.repeat_interleave(tokens, 0).repeat_interleave(tokens, 1)


def noise_levels(steps: int) -> list[float]:
    """Levels from 1 to 0 of an Euler sampler with ``steps`` steps."""
    return [1 - i / steps for i in range(steps + 1)]


@torch.no_grad()
def denoise(
    model: DiT, prev: Tensor, action: Tensor, known: Tensor, context: Context, noise: Tensor, steps: int
) -> Tensor:
    """Sample the next frame ``[b, 1, p, c]``. Of the context only the present frame's place is written."""
    x, levels = noise, noise_levels(steps)
    for now, then in pairwise(levels):
        level = torch.full(x.shape[:2], now, device=x.device)
        clean = prev + model.residual(x, prev, level, action, known, context)
        x = clean + (then / now) * (x - clean)
    return x
