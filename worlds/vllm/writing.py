"""What the model may write at each place of a tick, told to vLLM's sampler: a progress bin, then no or yes."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

from ..context import layout


def only_written(output: list[int], logits: Tensor) -> Tensor:
    """``logits [vocabulary]`` in which only the tokens that can come after ``output`` are left."""
    if len(output) == 0:
        allowed = slice(layout.PROGRESS, layout.DONE_NO)
    elif len(output) == 1:
        allowed = slice(layout.DONE_NO, layout.VOCABULARY)
    else:  # asked for so that the token before it is computed; nobody reads it
        return logits
    logits[: allowed.start] = float("-inf")
    logits[allowed.stop :] = float("-inf")
    return logits


class WrittenTokens(AdapterLogitsProcessor):  # type: ignore[misc]
    """:func:`only_written` for every request."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: Any) -> Any:
        return only_written
