"""Hands a finished request's hidden states back with its answer.

vLLM calls this a KV connector: what ``request_finished`` returns leaves the engine process as the answer's
``kv_transfer_params``. Scheduler and worker are in one process here, so the table that the model wrote is at hand and
the bytes go over the socket the tokens take: no file, no second call.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)

from ..context.layout import TICK
from .model import TABLE


class HiddenConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """``kv_transfer_params`` of an answer: ``hidden``, the bytes of ``float32[layers + 1, 32, hidden]``, and their
    ``shape``: of the last 32 tokens that were computed."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        (group,) = kv_cache_config.kv_cache_groups
        self._block = group.kv_cache_spec.block_size
        model = vllm_config.model_config
        states = model.get_num_layers(vllm_config.parallel_config) + 1
        self._shape = (kv_cache_config.num_blocks * self._block, states, model.get_hidden_size())
        self._dtype = model.dtype

    # Of the worker.

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        TABLE.allocate(self._shape, self._dtype, next(iter(kv_caches.values())).device)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass  # this one only gives

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        pass  # the model has written its hidden states itself

    def wait_for_save(self) -> None:
        pass

    # Of the scheduler.

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        pass

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        computed = request.num_computed_tokens
        if computed < TICK:  # aborted before it was computed: nobody waits for it
            return False, None
        at = torch.arange(computed - TICK, computed)
        hidden = TABLE.read(torch.tensor(block_ids)[at // self._block] * self._block + at % self._block)
        return False, {"hidden": hidden.numpy().tobytes(), "shape": list(hidden.shape)}
