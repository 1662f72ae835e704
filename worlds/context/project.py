"""Keys and values of a tick from the hidden states that enter the layers: what an act head reads, made where only
hidden states arrive."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from omni_loop.errors import TensorError

from ..stages.shared import checkpoint
from .llama import Layer
from .perceive import load_context


class KVProjection:
    """Each layer's norm and its key and value projections, of the context checkpoint below ``checkpoints`` (empty: the
    shipped one). No attention is computed: a token's keys and values are a function of its own hidden state."""

    def __init__(self, checkpoints: str = "", device: str = "cpu") -> None:
        model = load_context(checkpoint("context", checkpoints)).to(device)
        c, layers = model.config, cast("Sequence[Layer]", model.model.layers)  # torch does not say what a list holds
        self._heads, self._eps, self._device = (c.num_key_value_heads, c.head_dim), c.rms_norm_eps, device
        self._norm = torch.stack([layer.input_layernorm.weight.detach() for layer in layers])[:, None]  # [layers, 1, d]
        weights = [[layer.self_attn.k_proj.weight, layer.self_attn.v_proj.weight] for layer in layers]
        # [layers, d, 2 g e]
        self._weight = torch.stack([torch.cat(pair).detach().T for pair in weights])

    @torch.no_grad()
    def __call__(self, hidden: Tensor) -> Tensor:
        """``hidden [layers, n, d]`` to un-roped ``float32[layers, 2, n, g, e]``. Raises TensorError for others."""
        layers, d, _ = self._weight.shape
        if hidden.ndim != 3 or hidden.shape[0] != layers or hidden.shape[2] != d:
            raise TensorError(f"'hidden' has shape {list(hidden.shape)}, the act stage takes {[layers, 'n', d]}")
        x = F.rms_norm(hidden.to(self._device).float(), (d,), eps=self._eps) * self._norm
        return (x @ self._weight).unflatten(-1, (2, *self._heads)).transpose(1, 2)
