"""Instructions as tokens: one per word of a vocabulary that lies in the checkpoint.

::

    BEGIN | words ... | END END END ...                  32 tokens, two blocks of the paged cache

Every END stands behind the whole text and reads all of it. A word that is in no vocabulary is UNKNOWN: it says that
there was a word, and the rest of the text still counts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import Tensor

from omni_loop.errors import InvalidInput

TOKENS = 32
BEGIN, END, UNKNOWN, FIRST_WORD = 0, 1, 2, 3
MOST_WORDS = TOKENS - 2  # BEGIN before them, and at least one END


def words_of(text: str) -> list[str]:
    """Words in lower case, without punctuation."""
    return re.findall(r"[^\W_]+", text.casefold())


class Vocabulary:
    """Words and their tokens; ``words`` in the order of their tokens, from :data:`FIRST_WORD` on."""

    def __init__(self, words: Sequence[str]) -> None:
        self._tokens = {word: FIRST_WORD + i for i, word in enumerate(words)}

    def tokens(self, text: str) -> Tensor:
        """``int64[32]`` of an instruction.

        Raises:
            InvalidInput: no word at all, or more than 30.
        """
        words = words_of(text)
        if not words:
            raise InvalidInput("the instruction is empty: this policy learns from it, and only from it, what to do")
        if len(words) > MOST_WORDS:
            raise InvalidInput(f"the instruction has {len(words)} words; at most {MOST_WORDS} are read")
        tokens = torch.full((TOKENS,), END)
        tokens[0] = BEGIN
        tokens[1 : 1 + len(words)] = torch.tensor([self._tokens.get(word, UNKNOWN) for word in words])
        return tokens
