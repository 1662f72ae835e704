"""Action-chunk head: flow matching over a flat chunk, reading the context model's keys and values.

A residual network over the whole chunk (``horizon * action_dim`` numbers), conditioned on a few state
features and the flow time, in which every block also looks up the keys and values that the context
model's paired layer holds for the present tick (read only; pi0's expert, arXiv 2410.24164, in small). The
path is ``x_t = (1 - t) noise + t actions``; ``steps`` Euler steps lead from noise to actions.

Sampling starts from noise scaled by ``temperature``: below 1 a chunk is a likelier one, and more episodes are won
(``omni-loop bench policy --rows ablations``; 0.5 was chosen on seeds that no figure uses).

Actions are relative to the agent's position, in units of ``scale``; positions are in -1..1 of the table.

A sample may be guided to join the chunk before it, see :mod:`.join`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Literal, cast

import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn

from .join import Guide


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


#: Keys ``[b * g, e, s]`` and values ``[b * g, s, e]`` of one layer of the context.
Seen = tuple[Tensor, Tensor]


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

    def seen(self, kv: Tensor) -> Seen:
        """What every step of a sample looks up in ``kv [b, 2, s, g, e]``: keys and values by head."""
        return kv[:, 0].permute(0, 2, 3, 1).flatten(0, 1), kv[:, 1].transpose(1, 2).flatten(0, 1)

    def look_up(self, y: Tensor, seen: Seen, present: Tensor) -> Tensor:
        """``y [b, d]`` reads what is ``seen`` where ``present [b, 1]``; zero elsewhere."""
        keys, values = seen
        q = self.query(y).view(len(keys), self.h // self.g, self.e)
        weights = torch.baddbmm(q.new_zeros(()), q, keys, beta=0, alpha=self.e**-0.5).softmax(-1)
        return self.read(torch.bmm(weights, values).view(len(y), -1)) * present

    def forward(self, x: Tensor, modulation: Tensor, seen: Seen, present: Tensor) -> Tensor:
        """``x [b, d]`` under ``modulation [b, 3 d]``, of the condition at the step's time."""
        scale, shift, gate = modulation.chunk(3, -1)
        y = torch.addcmul(shift, F.layer_norm(x, (x.shape[-1],)), 1 + scale)
        y = y + self.look_up(y, seen, present)
        return torch.addcmul(x, gate, self.down(F.silu(self.up(y))))


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
        c, reads = self._condition(t, features, history, present), self._seen(kv)
        modulations = [block.modulate(c) for block in self._blocks]
        return self._flow(x.flatten(1), modulations, reads, present[:, None]).view_as(x)

    @torch.no_grad()
    def sample(
        self,
        noise: Tensor,
        features: Tensor,
        history: Tensor,
        kv: Tensor,
        present: Tensor,
        guide: Guide | None = None,
    ) -> Tensor:
        """Chunk ``[b, horizon, action_dim]`` in -1..1 of the table from ``noise`` of the same shape; ``guide``: what it
        is to join, in the same units.

        Conditions depend on the time but not on ``x``: those of all steps are computed in one pass, before the first.
        """
        b, n = len(noise), self.config.steps
        t = (torch.arange(n, device=noise.device) / n).repeat_interleave(b)
        given = (part.repeat(n, *[1] * (part.ndim - 1)) for part in (features, history, present))
        c, reads = self._condition(t, *given), self._seen(kv)
        modulations = [block.modulate(c).view(n, b, -1).unbind() for block in self._blocks]
        x, there = noise.flatten(1) * self.config.temperature, present[:, None]
        origin = features[:, None, 2:4]
        goal = None if guide is None else guide.moved(origin, self.config.scale)
        for i, now in enumerate(zip(*modulations, strict=True)):
            if goal is None:
                x = x + self._flow(x, now, reads, there) / n
            else:
                flow = partial(self._flow, modulations=now, seen=reads, present=there)
                x = x + goal.velocity(flow, x, i / n) / n
        chunks = x.view_as(noise) * self.config.scale + origin
        return chunks if guide is None else guide.frozen(chunks)

    @property
    def _blocks(self) -> Iterable[ActBlock]:
        return cast("Iterable[ActBlock]", self.blocks)  # torch does not say what a ModuleList holds

    def _condition(self, t: Tensor, features: Tensor, history: Tensor, present: Tensor) -> Tensor:
        known = torch.cat([features, history[:, None], present[:, None], self.time(t)], -1)
        condition: Tensor = self.condition(known)
        return condition

    def _seen(self, kv: Tensor) -> list[Seen]:
        # Blocks pair with the context's last layers: those that have read the most.
        first = self.config.context_layers - self.config.blocks
        return [block.seen(kv[:, first + i]) for i, block in enumerate(self._blocks)]

    def _flow(self, x: Tensor, modulations: Sequence[Tensor], seen: Sequence[Seen], present: Tensor) -> Tensor:
        h: Tensor = self.inp(x)
        for block, modulation, read in zip(self._blocks, modulations, seen, strict=True):
            h = block(h, modulation, read, present)
        velocity: Tensor = self.out(h)
        return velocity


def features_of(agent_before: Tensor, agent: Tensor, keypoints: Tensor, history: Tensor) -> Tensor:
    """Features ``[b, 20]`` of positions in -1..1: ``agent_before [b, 2]`` (used where ``history [b]`` is
    1), ``agent [b, 2]``, ``keypoints [b, 8, 2]``. The agent's motion is scaled up: it is a few pixels."""
    motion = (agent - agent_before) * 8 * history[:, None]
    return torch.cat([motion, agent, keypoints.flatten(1)], -1)
