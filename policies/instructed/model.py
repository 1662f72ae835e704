"""The whole policy: reader of instructions, eye, and flow matching over a chunk of actions.

The head is a residual network over the flat chunk (``horizon * action_dim`` numbers) under a condition of what is
known, what is read in the instruction, and the flow time. Which task it is stands nowhere but in the keys and values of
the text; what is known asks there for what matters now (cross-attention, one query of every layer).

Actions are handled in units of the demonstrations' mean and spread, states too; both lie in the checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Literal, cast

import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn

from ..flow import FlowTime
from ..join import Guide
from .eye import Eye, EyeConfig
from .text import TextConfig, TextModel

_FAR = 6.0  # spreads from the mean: states beyond are taken as that far


class HeadConfig(BaseModel):
    """``features`` numbers of state come in; with an ``eye`` an image too."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    horizon: int = 16
    execution_horizon: int = 8
    action_dim: int = 4
    features: int = 39
    width: int = 352
    condition: int = 224
    blocks: int = 3
    query_heads: int = 4
    eye: EyeConfig | None = None
    steps: int = 8
    temperature: float = 1.0


class InstructedConfig(BaseModel):
    """``tasks``: what it was trained to do, by the names that the demonstrations give them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["instructed"] = "instructed"
    tasks: tuple[str, ...] = ()
    text: TextConfig = TextConfig()
    head: HeadConfig = HeadConfig()


class Reading(nn.Module):
    """What ``known [b, f]`` looks up in instructions ``kv [texts, layers, 2, s, g, e]``: ``[b, layers * heads * e]``.
    Each text is that of as many rows, one text's behind another's; mostly of one."""

    def __init__(self, text: TextConfig, known: int, heads: int) -> None:
        super().__init__()
        self.shape = (text.layers, text.heads, heads // text.heads, text.head_dim)
        self.query = nn.Linear(known, text.layers * heads * text.head_dim)

    def forward(self, known: Tensor, kv: Tensor) -> Tensor:
        keys, values = kv.unbind(2)
        q = self.query(known).view(len(kv), -1, *self.shape)
        weights = torch.einsum("tnlghe,tlsge->tnlghs", q, keys) * self.shape[-1] ** -0.5
        read = torch.einsum("tnlghs,tlsge->tnlghe", weights.softmax(-1), values).reshape(len(known), -1)
        return F.layer_norm(read, (read.shape[-1],))  # as large as the state beside it from the first step on


class Block(nn.Module):
    """Modulated residual feed-forward."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        d = config.width
        self.modulate = nn.Linear(config.condition, 3 * d)
        self.up, self.down = nn.Linear(d, 2 * d), nn.Linear(2 * d, d)
        nn.init.zeros_(self.modulate.weight)
        nn.init.zeros_(self.modulate.bias)
        with torch.no_grad():
            self.modulate.bias[2 * d :] = 1.0

    def forward(self, x: Tensor, modulation: Tensor) -> Tensor:
        scale, shift, gate = modulation.chunk(3, -1)
        y = torch.addcmul(shift, F.layer_norm(x, (x.shape[-1],)), 1 + scale)
        return torch.addcmul(x, gate, self.down(F.silu(self.up(y))))


class Instructed(nn.Module):
    """See the module's text. ``state [b, features]`` is as the env gives it, ``image uint8[b, size, size, 3]`` or None,
    ``kv [texts, layers, 2, 32, heads, head_dim]`` from ``text``, of each row or each of as many rows; chunks ``[b,
    horizon, action_dim]`` are in units of the spread, see :meth:`actions`."""

    state_mean: Tensor
    state_spread: Tensor
    action_mean: Tensor
    action_spread: Tensor

    def __init__(self, config: InstructedConfig) -> None:
        super().__init__()
        self.config, head = config, config.head
        flat = head.horizon * head.action_dim
        self.text = TextModel(config.text)
        self.eye = None if head.eye is None else Eye(head.eye)
        known = head.features + (0 if head.eye is None else head.eye.out)
        self.reading = Reading(config.text, known, head.query_heads)
        self.time = FlowTime(64)
        read = config.text.layers * head.query_heads * config.text.head_dim
        self.condition = nn.Sequential(
            nn.Linear(known + read + 64, head.condition), nn.SiLU(),
            nn.Linear(head.condition, head.condition), nn.SiLU(),
        )  # fmt: skip
        self.inp, self.out = nn.Linear(flat, head.width), nn.Linear(head.width, flat)
        self.blocks = nn.ModuleList([Block(head) for _ in range(head.blocks)])
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)
        for name, n in (("state", head.features), ("action", head.action_dim)):
            self.register_buffer(f"{name}_mean", torch.zeros(n))
            self.register_buffer(f"{name}_spread", torch.ones(n))

    def known(self, state: Tensor, image: Tensor | None) -> Tensor:
        """``[b, known]``: the state in units of its spread, and what is seen."""
        near = ((state - self.state_mean) / self.state_spread).clamp(-_FAR, _FAR)
        return near if self.eye is None else torch.cat([near, self.eye(image)], -1)

    def velocity(self, x: Tensor, t: Tensor, known: Tensor, kv: Tensor) -> Tensor:
        """Flow velocity ``[b, horizon, action_dim]`` at ``x``, ``t [b]``."""
        c = self._condition(t, known, self.reading(known, kv))
        return self._flow(x.flatten(1), [block.modulate(c) for block in self._blocks]).view_as(x)

    @torch.no_grad()
    def sample(self, noise: Tensor, known: Tensor, kv: Tensor, guide: Guide | None = None) -> Tensor:
        """A chunk from ``noise`` of its shape; ``guide``: what it is to join. Conditions do not depend on the chunk:
        those of all steps are computed before the first."""
        b, n = len(noise), self.config.head.steps
        t = (torch.arange(n, device=noise.device) / n).repeat_interleave(b)
        c = self._condition(t, known.repeat(n, 1), self.reading(known, kv).repeat(n, 1))
        modulations = [block.modulate(c).view(n, b, -1).unbind() for block in self._blocks]
        x = noise.flatten(1) * self.config.head.temperature
        for i, now in enumerate(zip(*modulations, strict=True)):
            flow = partial(self._flow, modulations=now)
            x = x + (flow(x) if guide is None else guide.velocity(flow, x, i / n)) / n
        chunks = x.view_as(noise)
        return chunks if guide is None else guide.frozen(chunks)

    def actions(self, chunks: Tensor) -> Tensor:
        """``chunks`` in the env's units, within its bounds -1..1."""
        return (chunks * self.action_spread + self.action_mean).clamp(-1, 1)

    @property
    def _blocks(self) -> Iterable[Block]:
        return cast("Iterable[Block]", self.blocks)  # torch does not say what a ModuleList holds

    def _condition(self, t: Tensor, known: Tensor, read: Tensor) -> Tensor:
        return self.condition(torch.cat([known, read, self.time(t)], -1))

    def _flow(self, x: Tensor, modulations: Sequence[Tensor]) -> Tensor:
        h = self.inp(x)
        for block, modulation in zip(self._blocks, modulations, strict=True):
            h = block(h, modulation)
        return self.out(h)
