"""One tick of the context model: read the given tokens, write progress and done."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from . import layout
from .llama import ContextModel


@dataclass(frozen=True, slots=True)
class Reading:
    """``progress [b]`` 0..1 and calibrated probability ``done [b]``; ``tokens int64[b, 32]`` as they now stand (the
    written ones are the plain greedy ones), their last hidden states ``[b, 32, d]`` and un-roped cache
    ``kv [layers, 2, b, 32, g, e]``."""

    progress: Tensor
    done: Tensor
    tokens: Tensor
    hidden: Tensor
    kv: Tensor


@torch.no_grad()
def read_instruction(model: ContextModel, tokens: Tensor) -> Tensor:
    """Cache ``[layers, 2, b, 32, g, e]`` of instructions ``int64[b, 32]``."""
    return model(tokens, model.empty_cache(len(tokens)))[1]


@torch.no_grad()
def read_tick(model: ContextModel, past: Tensor, given: Tensor) -> Reading:
    """Prefill ``given int64[b, 30]`` behind ``past``, then decode the two written tokens greedily."""
    hidden, kv = model(given, past)
    states, caches, tokens = [hidden], [kv], [given]
    logits = model.lm_head(hidden[:, -1])
    progress = layout.progress_values(logits)
    written = _greedy(logits, layout.PROGRESS, layout.PROGRESS_BINS)
    hidden, kv = model(written, torch.cat([past, *caches], 3))
    states, caches, tokens = [*states, hidden], [*caches, kv], [*tokens, written]
    logits = model.lm_head(hidden[:, -1])
    done = layout.done_probability(logits, model.config.done_bias)
    written = _greedy(logits, layout.DONE_NO, 2)
    hidden, kv = model(written, torch.cat([past, *caches], 3))
    return Reading(
        progress, done, torch.cat([*tokens, written], 1), torch.cat([*states, hidden], 1), torch.cat([*caches, kv], 3)
    )


def _greedy(logits: Tensor, start: int, count: int) -> Tensor:
    return logits[:, start : start + count].argmax(-1, keepdim=True) + start


def slide(past: Tensor, fresh: Tensor, window_ticks: int) -> Tensor:
    """``past`` with a tick's cache behind it, keeping the instruction and the last ``window_ticks``."""
    past = torch.cat([past, fresh], 3)
    extra = past.shape[3] - layout.INSTRUCTION - window_ticks * layout.TICK
    if extra <= 0:
        return past
    head, tail = past[:, :, :, : layout.INSTRUCTION], past[:, :, :, layout.INSTRUCTION + extra :]
    return torch.cat([head, tail], 3)
