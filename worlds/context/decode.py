"""One tick of the context model: read the given tokens, write progress and done."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from . import layout
from .llama import Cache, ContextModel


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
    """Prefill ``given int64[b, 30]`` behind ``past``, then decode the two written tokens greedily.

    Two passes: the second reads the first written token and, as alternatives, both answers that can follow it; the one
    that is not given is dropped.
    """
    answers = torch.tensor([layout.DONE_NO, layout.DONE_YES], device=given.device).expand(len(given), 2)
    cache = Cache(past, given.shape[1] + 3, model.frequencies)
    hidden, kv = model.serve(given, cache)
    logits = written_logits(model, hidden[:, -1])
    progress = layout.progress_values(logits)
    bins = logits[:, : layout.PROGRESS_BINS]
    written = torch.cat([bins.argmax(-1, keepdim=True) + layout.PROGRESS, answers], 1)
    after, after_kv = model.serve(written, cache, alternatives=True)
    logits = written_logits(model, after[:, 0])
    done = layout.done_probability(logits, model.config.done_bias)
    answer = 1 + logits[:, layout.PROGRESS_BINS :].argmax(-1)
    rows = torch.arange(len(given), device=given.device)
    picked = torch.stack([torch.zeros_like(answer), answer], 1)
    return Reading(
        progress,
        done,
        torch.cat([given, written.gather(1, picked)], 1),
        torch.cat([hidden, after[rows[:, None], picked]], 1),
        torch.cat([kv, after_kv[:, :, rows[:, None], picked]], 3),
    )


def written_logits(model: ContextModel, hidden: Tensor) -> Tensor:
    """Logits ``[b, 66]`` of the tokens that the model writes, progress bins, then no and yes, of normed last hidden
    states ``[b, d]``."""
    return F.linear(hidden, model.lm_head.weight[layout.PROGRESS :])


def slide(past: Tensor, fresh: Tensor, window_ticks: int) -> Tensor:
    """``past`` with a tick's cache behind it, keeping the instruction and the last ``window_ticks``."""
    past = torch.cat([past, fresh], 3)
    extra = past.shape[3] - layout.INSTRUCTION - window_ticks * layout.TICK
    if extra <= 0:
        return past
    head, tail = past[:, :, :, : layout.INSTRUCTION], past[:, :, :, layout.INSTRUCTION + extra :]
    return torch.cat([head, tail], 3)
