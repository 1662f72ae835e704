"""The context model as vLLM runs it: ``LlamaForCausalLM`` that keeps what enters its layers.

vLLM has a way of its own to extract hidden states, the speculative method ``extract_hidden_states``. In 0.24 it does
not start on CPUs (the rejection sampler's CPU kernel lacks an argument), and it computes every written token twice.
Here a table lies beside the KV cache, with a row for each of its slots: whatever the cache holds, from whichever
request, its hidden states are there as well.

"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm import ModelRegistry
from vllm.forward_context import get_forward_context
from vllm.model_executor.models.llama import LlamaForCausalLM

ARCHITECTURE = "OmniLoopContextForCausalLM"


class HiddenTable:
    """``float[slots, layers + 1, hidden]``: what entered each layer, and what left the last one."""

    def __init__(self) -> None:
        self._rows: Tensor | None = None

    def allocate(self, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> None:
        self._rows = torch.zeros(shape, dtype=dtype, device=device)

    def write(self, slots: Tensor, states: list[Tensor]) -> None:
        """``states`` of tokens ``[n, hidden]`` each, at ``slots int64[>= n]``; those below 0 are padding."""
        if self._rows is None:  # profiling: there is no cache yet
            return
        slots = slots[: len(states[0])]
        kept = slots >= 0
        self._rows[slots[kept]] = torch.stack([state[: len(slots)] for state in states], 1)[kept]

    def read(self, slots: Tensor) -> Tensor:
        """``float32[layers + 1, n, hidden]`` on the CPU."""
        assert self._rows is not None
        return self._rows[slots.to(self._rows.device)].transpose(0, 1).float().cpu().contiguous()


#: Of this process: its engine has one model.
TABLE = HiddenTable()


class OmniLoopContextForCausalLM(LlamaForCausalLM):  # type: ignore[misc]
    """See the module's text."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.model.aux_hidden_state_layers = tuple(range(len(self.model.layers) + 1))
        self._first = self.model.layers[0].self_attn.attn.layer_name

    def forward(
        self, input_ids: Any, positions: Any, intermediate_tensors: Any = None, inputs_embeds: Any = None
    ) -> Tensor:
        hidden, states = self.model(input_ids, positions, intermediate_tensors, inputs_embeds)
        slots = get_forward_context().slot_mapping
        if isinstance(slots, dict) and self._first in slots:
            TABLE.write(slots[self._first], states)
        return hidden


def register() -> None:
    """Make the architecture known to vLLM in this process."""
    if ARCHITECTURE not in ModelRegistry.get_supported_archs():
        ModelRegistry.register_model(ARCHITECTURE, OmniLoopContextForCausalLM)
