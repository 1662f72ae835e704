"""The reader of instructions: a small causal transformer, of which the keys and values are what others read.

Keys and values of every layer are written once per session into its paged cache; nobody asks for the last layer's
output, so there is none: that layer is its keys and values alone.

Words are read by what comes behind them, END tokens by nobody but themselves: so each of these sums up the text,
however short it is, and most of the keys and values there are say what the whole text says. Where ENDs read each other,
and begin as large as words, a text makes so small a difference at first that training looks at the scene instead.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn

from .words import END, FIRST_WORD, TOKENS


class TextConfig(BaseModel):
    """``words``: the vocabulary, in the order of its tokens."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    words: tuple[str, ...] = ()
    layers: int = 3
    heads: int = 2
    head_dim: int = 32
    feed_forward: int = 128

    @property
    def width(self) -> int:
        return self.heads * self.head_dim

    @property
    def cache(self) -> tuple[int, int, int, int, int]:
        """Shape of an instruction's keys and values, ``[layers, 2, tokens, heads, head_dim]``."""
        return (self.layers, 2, TOKENS, self.heads, self.head_dim)


class TextLayer(nn.Module):
    """Keys and values of what comes in; unless it is the ``last`` layer, also attention and feed-forward."""

    def __init__(self, config: TextConfig, last: bool) -> None:
        super().__init__()
        d, self.heads, self.e = config.width, config.heads, config.head_dim
        self.norm, self.keys_values = nn.RMSNorm(d, eps=1e-5), nn.Linear(d, 2 * d)
        if not last:
            self.query, self.merge = nn.Linear(d, d), nn.Linear(d, d)
            self.second_norm = nn.RMSNorm(d, eps=1e-5)
            self.up, self.down = nn.Linear(d, config.feed_forward), nn.Linear(config.feed_forward, d)
        self.last = last

    def forward(self, x: Tensor, reads: Tensor) -> tuple[Tensor, Tensor]:
        """``x [b, n, d]``, ``reads bool[b, 1, n, n]`` who reads whom: the next layer's, and ``[b, 2, n, heads, e]``."""
        b, n, d = x.shape
        y = self.norm(x)
        kv = self.keys_values(y).view(b, n, 2, self.heads, self.e).transpose(1, 2)
        if self.last:
            return x, kv
        q = self.query(y).view(b, n, self.heads, self.e).transpose(1, 2)
        keys, values = kv.transpose(2, 3).unbind(1)
        seen = F.scaled_dot_product_attention(q, keys, values, attn_mask=reads)
        x = x + self.merge(seen.transpose(1, 2).reshape(b, n, d))
        return x + self.down(F.silu(self.up(self.second_norm(x)))), kv


class TextModel(nn.Module):
    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(FIRST_WORD + len(config.words), config.width)
        self.position = nn.Parameter(torch.randn(TOKENS, config.width) * 0.05)
        self.layers = nn.ModuleList([TextLayer(config, i + 1 == config.layers) for i in range(config.layers)])
        with torch.no_grad():
            self.embed.weight[END] = 0.0

    def forward(self, tokens: Tensor) -> Tensor:
        """``tokens int64[b, 32]``: keys and values ``[b, layers, 2, 32, heads, head_dim]``."""
        n = tokens.shape[1]
        before = torch.ones(n, n, dtype=torch.bool, device=tokens.device).tril()
        alone = torch.eye(n, dtype=torch.bool, device=tokens.device)
        reads = (before & (tokens != END)[:, None, :] | alone)[:, None]
        x, found = self.embed(tokens) + self.position, []
        for layer in cast("Iterable[TextLayer]", self.layers):  # torch does not say what a ModuleList holds
            x, kv = layer(x, reads)
            found.append(kv)
        return torch.stack(found, 1)
