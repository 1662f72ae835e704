"""Text embeddings, a pure function of the prompt: computed once, the latest kept."""

from __future__ import annotations

import html
import re
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .folder import imported
from .guard import Guardrail


class Prompts:
    """``embed`` behind a cache of the ``most`` prompts used last."""

    def __init__(self, embed: Callable[[str], Tensor], most: int) -> None:
        self._embed, self._most = embed, max(most, 1)
        self._known: OrderedDict[str, Tensor] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def __call__(self, prompt: str) -> Tensor:
        """``[1, tokens, width]``"""
        found = self._known.get(prompt)
        if found is None:
            found = self._known[prompt] = self._embed(prompt)
            if len(self._known) > self._most:
                self._known.popitem(last=False)
        self._known.move_to_end(prompt)
        return found


def cosmos_embedder(pipe: Any, length: int, device: str, guard: Guardrail | None) -> Callable[[str], Tensor]:
    """The pipeline's own: T5 of Predict2, Qwen2.5-VL of Predict2.5."""

    def embed(prompt: str) -> Tensor:
        if guard is not None:
            guard.check(prompt)
        given = {"max_sequence_length": length, "device": device, "dtype": pipe.transformer.dtype}
        return pipe.encode_prompt(prompt=prompt, do_classifier_free_guidance=False, **given)[0]

    return embed


def wan_embedder(pipe: Any, length: int, device: str) -> Callable[[str], Tensor]:
    """As the pipeline's ``_get_t5_prompt_embeds``, but without ftfy where a prompt has nothing that it would repair."""

    def embed(prompt: str) -> Tensor:
        tokens = pipe.tokenizer(
            [cleaned(prompt)],
            padding="max_length",
            max_length=length,
            truncation=True,
            add_special_tokens=True,
            return_attention_mask=True,
            return_tensors="pt",
        )
        mask = tokens.attention_mask.to(device)
        states = pipe.text_encoder(tokens.input_ids.to(device), mask).last_hidden_state
        # The model was trained with zeros behind a prompt's last token.
        kept = torch.arange(length, device=states.device) < mask.gt(0).sum()
        return (states * kept[None, :, None]).to(pipe.transformer.dtype)

    return embed


def cleaned(prompt: str) -> str:
    """As Wan's ``prompt_clean``. Raises MissingExtra for text that needs ftfy when that is not installed."""
    if not (prompt.isascii() and prompt.replace("\n", "").isprintable()):
        prompt = imported("ftfy").fix_text(prompt)
    return re.sub(r"\s+", " ", html.unescape(html.unescape(prompt))).strip()
