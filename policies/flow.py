"""Action-chunk head: flow matching over a flat chunk, reading the context model's keys and values.

A residual network over the whole chunk (``horizon * action_dim`` numbers), conditioned on a few state
features and the flow time, in which every block also looks up the keys and values that the context
model's paired layer holds for the present tick (read only; pi0's expert, arXiv 2410.24164, in small). The
path is ``x_t = (1 - t) noise + t actions``; ``steps`` Euler steps lead from noise to actions.

Sampling starts from noise scaled by ``temperature``: below 1 a chunk is a likelier one, and more episodes are won
(``omni-loop bench policy --rows ablations``; 0.5 was chosen on seeds that no figure uses).

Actions are relative to the agent's position, in units of ``scale``; positions are in -1..1 of the table.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn


class ActConfig(BaseModel):
    """``context_layers`` of ``context_kv_heads x context_head_dim`` are what the context hands over."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["act"] = "act"
    horizon: int = 16
    execution_horizon: int = 8
    action_dim: int = 2
    features: int = 20  # agent before, agent now, eight keypoints
    width: int = 320
    condition: int = 256
    blocks: int = 5
    query_heads: int = 6
    context_layers: int = 6
    context_kv_heads: int = 2
    context_head_dim: int = 32
    context_tokens: int = 32  # the present tick
    steps: int = 8
    scale: float = 0.25
    temperature: float = 0.5


class FlowTime(nn.Module):
    """Sines and cosines of the flow time ``[b]``."""

    rates: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("rates", torch.exp(torch.linspace(0, math.log(200.0), size // 2)), persistent=False)

    def forward(self, t: Tensor) -> Tensor:
        angle = t[:, None] * self.rates
        return torch.cat([angle.sin(), angle.cos()], -1)


class ActBlock(nn.Module):
    """Modulated residual feed-forward after one cross-attention into a layer of the context."""

    def __init__(self, config: ActConfig) -> None:
        super().__init__()
        d, self.h, self.g, self.e = (
            config.width, config.query_heads, config.context_kv_heads, config.context_head_dim,
        )  # fmt: skip
        self.modulate = nn.Linear(config.condition, 3 * d)
        self.up, self.down = nn.Linear(d, 2 * d), nn.Linear(2 * d, d)
        self.query, self.read = nn.Linear(d, self.h * self.e), nn.Linear(self.h * self.e, d)
        nn.init.zeros_(self.modulate.weight)
        nn.init.zeros_(self.modulate.bias)
        nn.init.zeros_(self.read.weight)
        nn.init.zeros_(self.read.bias)
        with torch.no_grad():
            self.modulate.bias[2 * d :] = 1.0

    def look_up(self, y: Tensor, kv: Tensor, present: Tensor) -> Tensor:
        """``y [b, d]`` reads ``kv [b, 2, s, g, e]`` where ``present [b]``; zero elsewhere."""
        b = y.shape[0]
        q = self.query(y).view(b, self.g, self.h // self.g, self.e)
        k, v = kv[:, 0].transpose(1, 2), kv[:, 1].transpose(1, 2)  # [b, g, s, e]
        weights = (q @ k.transpose(-1, -2) * self.e**-0.5).softmax(-1)
        return self.read((weights @ v).reshape(b, -1)) * present[:, None]

    def forward(self, x: Tensor, c: Tensor, kv: Tensor, present: Tensor) -> Tensor:
        scale, shift, gate = self.modulate(c).chunk(3, -1)
        y = F.layer_norm(x, (x.shape[-1],)) * (1 + scale) + shift
        y = y + self.look_up(y, kv, present)
        return x + gate * self.down(F.silu(self.up(y)))


class ActHead(nn.Module):
    """See the module's text. ``features [b, f]``, ``kv [b, layers, 2, s, g, e]`` un-roped, ``present
    [b]`` 1.0 where there is a context."""

    def __init__(self, config: ActConfig) -> None:
        super().__init__()
        self.config = config
        flat = config.horizon * config.action_dim
        self.time = FlowTime(64)
        self.condition = nn.Sequential(
            nn.Linear(config.features + 2 + 64, config.condition), nn.SiLU(),
            nn.Linear(config.condition, config.condition), nn.SiLU(),
        )  # fmt: skip
        self.inp, self.out = nn.Linear(flat, config.width), nn.Linear(config.width, flat)
        self.blocks = nn.ModuleList([ActBlock(config) for _ in range(config.blocks)])
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def velocity(self, x: Tensor, t: Tensor, features: Tensor, history: Tensor, kv: Tensor, present: Tensor) -> Tensor:
        """Flow velocity ``[b, horizon, action_dim]`` at ``x``. ``history [b]`` is 1.0 where the agent's
        position before is known."""
        known = torch.cat([features, history[:, None], present[:, None], self.time(t)], -1)
        c, h = self.condition(known), self.inp(x.flatten(1))
        # Blocks pair with the context's last layers: those that have read the most.
        first = self.config.context_layers - self.config.blocks
        for i, block in enumerate(self.blocks):
            h = block(h, c, kv[:, first + i], present)
        return self.out(h).view_as(x)

    @torch.no_grad()
    def sample(self, noise: Tensor, features: Tensor, history: Tensor, kv: Tensor, present: Tensor) -> Tensor:
        """Chunk ``[b, horizon, action_dim]`` in -1..1 of the table from ``noise`` of the same shape."""
        x, n = noise * self.config.temperature, self.config.steps
        for i in range(n):
            t = torch.full((len(x),), i / n, device=x.device)
            x = x + self.velocity(x, t, features, history, kv, present) / n
        agent = features[:, 2:4]
        return x * self.config.scale + agent[:, None]


def features_of(agent_before: Tensor, agent: Tensor, keypoints: Tensor, history: Tensor) -> Tensor:
    """Features ``[b, 20]`` of positions in -1..1: ``agent_before [b, 2]`` (used where ``history [b]`` is
    1), ``agent [b, 2]``, ``keypoints [b, 8, 2]``. The agent's motion is scaled up: it is a few pixels."""
    motion = (agent - agent_before) * 8 * history[:, None]
    return torch.cat([motion, agent, keypoints.flatten(1)], -1)
