"""A small Llama whose weights are in Hugging Face's format, run on a paged cache of un-roped keys.

The same folder loads in ``transformers`` and vLLM. Here keys are kept before the rotary embedding and get
their position when they are gathered, so that a session's window slides without end.

Shapes: ``b`` batch, ``n`` new tokens, ``s`` cached tokens, ``h`` heads, ``g`` key/value heads, ``e`` head
size. A cache is ``[layers, 2, b, s, g, e]``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, cast

import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn

from .layout import VOCABULARY


class ContextConfig(BaseModel):
    """Named as Hugging Face names them. ``window_ticks`` are the past ticks a tick sees; ``done_bias`` is
    subtracted from the log odds of *done*: training shows the end of episodes more often than they end."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    architectures: tuple[str, ...] = ("LlamaForCausalLM",)
    model_type: Literal["llama"] = "llama"
    vocab_size: int = VOCABULARY
    hidden_size: int = 192
    num_hidden_layers: int = 6
    num_attention_heads: int = 6
    num_key_value_heads: int = 2
    head_dim: int = 32
    intermediate_size: int = 512
    hidden_act: Literal["silu"] = "silu"
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    bos_token_id: int = 1
    eos_token_id: int | None = None
    torch_dtype: str = "float32"
    window_ticks: int = 4
    done_bias: float = 0.0


class Norm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


def rotate_half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Llama's rotary embedding; ``cos`` and ``sin`` are ``[n, e]`` and broadcast over ``[.., n, e]``."""
    a, b = x.chunk(2, -1)
    return (x * cos + torch.cat([-b, a], -1) * sin).to(x.dtype)


class Cache:
    """Roped keys and values that ``b`` sessions' new tokens attend to, with room for ``n`` more of them: ``room
    [layers, 2, b, s + n, g, e]``. Roped and copied once for all passes of a tick; a pass writes its tokens in place."""

    def __init__(self, past: Tensor, n: int, frequencies: Tensor) -> None:
        """``past [layers, 2, b, s, g, e]`` un-roped; positions count from its oldest token."""
        layers, _, b, s, g, e = past.shape
        angle = torch.arange(s + n, device=past.device).float()[:, None] * frequencies
        cos, sin = angle.cos(), angle.sin()
        # For x cos + roll(x, e / 2) sin.
        self._cos, self._sin = torch.cat([cos, cos], -1)[:, None], torch.cat([-sin, sin], -1)[:, None]  # [s + n, 1, e]
        self.room = past.new_empty(layers, 2, b, s + n, g, e)
        self.room[:, 1, :, :s] = past[:, 1]
        keys = past[:, 0]
        torch.addcmul(keys * self._cos[:s], keys.roll(e // 2, -1), self._sin[:s], out=self.room[:, 0, :, :s])
        self.length = s

    def turn(self, position: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Cosines and sines ``[n, 1, e]`` of positions."""
        return self._cos[position], self._sin[position]


class Attention(nn.Module):
    def __init__(self, config: ContextConfig) -> None:
        super().__init__()
        self.h, self.g, self.e = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        d = config.hidden_size
        self.q_proj = nn.Linear(d, self.h * self.e, bias=False)
        self.k_proj = nn.Linear(d, self.g * self.e, bias=False)
        self.v_proj = nn.Linear(d, self.g * self.e, bias=False)
        self.o_proj = nn.Linear(self.h * self.e, d, bias=False)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries ``[b, h, n, e]``, un-roped keys and values ``[b, g, n, e]``."""
        b, n, _ = x.shape

        def split(y: Tensor, heads: int) -> Tensor:
            return y.view(b, n, heads, self.e).transpose(1, 2)

        return split(self.q_proj(x), self.h), split(self.k_proj(x), self.g), split(self.v_proj(x), self.g)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        b, _, n, _ = q.shape
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).reshape(b, n, -1))

    def serve(
        self, x: Tensor, turn: tuple[Tensor, Tensor], room: Tensor, at: slice, mask: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """New tokens ``[b, n, d]`` whose roped keys and values are written to ``room [2, b, s + n, g, e]`` at ``at``:
        what they see of all of it under ``mask float[h / g * n, s + n]``, and their un-roped keys and values."""
        b, n, _ = x.shape
        q, k, v = (w(x).view(b, n, -1, self.e) for w in (self.q_proj, self.k_proj, self.v_proj))
        room[0, :, at], room[1, :, at] = _turned(k, turn), v
        # Heads that share a key follow each other as more queries of it: no key is read twice.
        q = _turned(q, turn).view(b, n, self.g, -1, self.e).permute(0, 2, 3, 1, 4).reshape(b, self.g, -1, self.e)
        keys, values = room.transpose(2, 3)
        seen = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
        seen = seen.view(b, self.h, n, self.e).transpose(1, 2).reshape(b, n, -1)
        return self.o_proj(seen), k, v


def _turned(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """``x [b, n, heads, e]`` at its tokens' positions."""
    return torch.addcmul(x * turn[0], x.roll(x.shape[-1] // 2, -1), turn[1])


class FeedForward(nn.Module):
    def __init__(self, config: ContextConfig) -> None:
        super().__init__()
        d, m = config.hidden_size, config.intermediate_size
        self.gate_proj, self.up_proj = nn.Linear(d, m, bias=False), nn.Linear(d, m, bias=False)
        self.down_proj = nn.Linear(m, d, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, config: ContextConfig) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(config), FeedForward(config)
        self.input_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = Norm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, past: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """``past [2, b, s, g, e]``; ``cos``/``sin`` cover the s cached and n new positions."""
        q, k, v = self.self_attn.project(self.input_layernorm(x))
        s, n = past.shape[2], x.shape[1]
        keys = torch.cat([past[0].transpose(1, 2).to(k.dtype), k], 2)
        values = torch.cat([past[1].transpose(1, 2).to(v.dtype), v], 2)
        roped_q, roped_k = rotate_half(q, cos[s : s + n], sin[s : s + n]), rotate_half(keys, cos[: s + n], sin[: s + n])
        x = x + self.self_attn.attend(roped_q, roped_k, values, mask)
        x = x + self.mlp(self.post_attention_layernorm(x))
        return x, torch.stack([k, v]).transpose(2, 3)

    def serve(
        self, x: Tensor, turn: tuple[Tensor, Tensor], room: Tensor, at: slice, mask: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As :meth:`Attention.serve`."""
        seen, k, v = self.self_attn.serve(self.input_layernorm(x), turn, room, at, mask)
        x = x + seen
        return x + self.mlp(self.post_attention_layernorm(x)), k, v


class Body(nn.Module):
    def __init__(self, config: ContextConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([Layer(config) for _ in range(config.num_hidden_layers)])
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)


class ContextModel(nn.Module):
    """``LlamaForCausalLM`` by another road; see the module's text."""

    frequencies: Tensor

    def __init__(self, config: ContextConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Body(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        half = torch.arange(0, config.head_dim, 2).float() / config.head_dim
        self.register_buffer("frequencies", config.rope_theta**-half, persistent=False)

    def empty_cache(self, batch: int = 1) -> Tensor:
        c = self.config
        return self.frequencies.new_zeros(c.num_hidden_layers, 2, batch, 0, c.num_key_value_heads, c.head_dim)

    def forward(self, tokens: Tensor, past: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """New tokens ``int64[b, n]`` behind a cache of un-roped keys.

        Positions count from the oldest cached token. Returns the normed last hidden states ``[b, n, d]`` and
        the new tokens' cache ``[layers, 2, b, n, g, e]``. ``mask bool[n, s + n]`` defaults to causal.
        """
        n = tokens.shape[1]
        s = past.shape[3]
        angle = torch.arange(s + n, device=tokens.device).float()[:, None] * self.frequencies
        angle = torch.cat([angle, angle], -1)
        if mask is None and n > 1:
            mask = torch.ones(n, s + n, dtype=torch.bool, device=tokens.device).tril(s)
        x, fresh, cos, sin = self.model.embed_tokens(tokens), [], angle.cos(), angle.sin()
        for layer, cached in zip(self.model.layers, past, strict=True):
            x, kv = layer(x, cached, cos, sin, mask)
            fresh.append(kv)
        return self.model.norm(x), torch.stack(fresh)

    @property
    def _layers(self) -> Iterable[Layer]:
        return cast("Iterable[Layer]", self.model.layers)  # torch does not say what a ModuleList holds

    def serve(self, tokens: Tensor, cache: Cache, alternatives: bool = False) -> tuple[Tensor, Tensor]:
        """New tokens ``int64[b, n]`` behind all of ``cache``, which takes them in: hidden states and cache as
        :meth:`forward`. ``alternatives``: all tokens but the first are one next token, each as if it were alone."""
        n, s = tokens.shape[1], cache.length
        at, position = slice(s, s + n), list(range(s, s + n))
        mask = torch.full((n, s + n), float("-inf"), device=tokens.device)
        if alternatives:
            position = [s, *[s + 1] * (n - 1)]
            mask[:, : s + 1] = 0
            mask[:, s:].fill_diagonal_(0)
        else:
            mask.triu_(s + 1)
        mask = mask.repeat(self.config.num_attention_heads // self.config.num_key_value_heads, 1)
        x, turn, keys, values = self.model.embed_tokens(tokens), cache.turn(position), [], []
        for layer, room in zip(self._layers, cache.room[:, :, :, : s + n], strict=True):
            x, k, v = layer.serve(x, turn, room, at, mask)
            keys.append(k)
            values.append(v)
        cache.length += n
        return self.model.norm(x), torch.stack([torch.stack(keys), torch.stack(values)], 1)
