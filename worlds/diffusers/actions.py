"""Cosmos Predict2.5 under actions: the transformer of NVIDIA's ``robot/action-cond`` checkpoints
(https://github.com/nvidia-cosmos/cosmos-predict2.5, ``ActionChunkConditionedMinimalV1LVGDiT``) on diffusers' own.

The actions of a latent frame (4 of them at the published temporal ratio), side by side, go through two MLPs: one is
added to the sinusoids of the time embedding, the other to what modulates the layers. The latent frames that the model
is conditioned on get none. Parameters have the published names, ``action_embedder_B_D`` and ``action_embedder_B_3D``.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from diffusers import CosmosTransformer3DModel
from diffusers.configuration_utils import register_to_config
from diffusers.models.transformers.transformer_cosmos import CosmosEmbedding
from torch import Tensor, nn


class ActionMLP(nn.Module):
    """``[b, t, i]`` to ``[b, t, o]``."""

    def __init__(self, inputs: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(inputs, hidden), nn.Linear(hidden, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


class ActionTimeEmbedding(CosmosEmbedding):  # type: ignore[misc]
    """Adds ``offsets``, of the sinusoids ``[b * t, d]`` and of the modulation ``[b * t, 3 d]``."""

    offsets: tuple[Tensor, Tensor] | None = None

    def forward(self, hidden_states: Tensor, timestep: Tensor) -> tuple[Tensor, Tensor]:
        waves = self.time_proj(timestep).type_as(hidden_states)
        modulation = self.t_embedder(waves)
        if self.offsets is not None:
            waves, modulation = waves + self.offsets[0], modulation + self.offsets[1]
        return modulation, self.norm(waves)


class ActionCosmosTransformer3DModel(CosmosTransformer3DModel):  # type: ignore[misc]
    """``action_dim`` wide actions, ``temporal_compression_ratio`` of them a latent frame; all else is the base's."""

    @register_to_config  # type: ignore[untyped-decorator]
    def __init__(
        self,
        in_channels: int = 17,
        out_channels: int = 16,
        num_attention_heads: int = 16,
        attention_head_dim: int = 128,
        num_layers: int = 28,
        mlp_ratio: float = 4.0,
        text_embed_dim: int = 1024,
        adaln_lora_dim: int = 256,
        max_size: tuple[int, int, int] = (128, 240, 240),
        patch_size: tuple[int, int, int] = (1, 2, 2),
        rope_scale: tuple[float, float, float] = (1.0, 1.0, 1.0),
        concat_padding_mask: bool = True,
        extra_pos_embed_type: str | None = None,
        use_crossattn_projection: bool = True,
        crossattn_proj_in_channels: int = 100352,
        encoder_hidden_states_channels: int = 1024,
        controlnet_block_every_n: int | None = None,
        img_context_dim_in: int | None = None,
        img_context_num_tokens: int = 256,
        img_context_dim_out: int = 2048,
        action_dim: int = 7,
        temporal_compression_ratio: int = 4,
        hidden_dim_in_action_embedder: int | None = None,
    ) -> None:
        super().__init__(
            in_channels=in_channels,
            out_channels=out_channels,
            num_attention_heads=num_attention_heads,
            attention_head_dim=attention_head_dim,
            num_layers=num_layers,
            mlp_ratio=mlp_ratio,
            text_embed_dim=text_embed_dim,
            adaln_lora_dim=adaln_lora_dim,
            max_size=max_size,
            patch_size=patch_size,
            rope_scale=rope_scale,
            concat_padding_mask=concat_padding_mask,
            extra_pos_embed_type=extra_pos_embed_type,
            use_crossattn_projection=use_crossattn_projection,
            crossattn_proj_in_channels=crossattn_proj_in_channels,
            encoder_hidden_states_channels=encoder_hidden_states_channels,
            controlnet_block_every_n=controlnet_block_every_n,
            img_context_dim_in=img_context_dim_in,
            img_context_num_tokens=img_context_num_tokens,
            img_context_dim_out=img_context_dim_out,
        )
        width = num_attention_heads * attention_head_dim
        hidden = hidden_dim_in_action_embedder or 4 * width
        self.time_embed = ActionTimeEmbedding(width, width)
        self.action_embedder_B_D = ActionMLP(action_dim * temporal_compression_ratio, hidden, width)
        self.action_embedder_B_3D = ActionMLP(action_dim * temporal_compression_ratio, hidden, 3 * width)

    def forward(self, *args: Any, action: Tensor, condition_mask: Tensor, timestep: Tensor, **more: Any) -> Any:
        """As the base, with ``action float[b, n, action_dim]`` for the ``n / ratio`` latent frames after the first and
        ``timestep [b, 1, t, 1, 1]``."""
        b, n, _ = action.shape
        grouped = action.reshape(b, n // self.config.temporal_compression_ratio, -1).to(self.dtype)
        free = 1 - condition_mask[:, 0, :, 0, 0, None].to(self.dtype)
        offsets = [
            (F.pad(embed(grouped), (0, 0, 1, 0)) * free).flatten(0, 1)  # no action leads to the first frame
            for embed in (self.action_embedder_B_D, self.action_embedder_B_3D)
        ]
        self.time_embed.offsets = offsets[0], offsets[1]
        try:
            return super().forward(*args, condition_mask=condition_mask, timestep=timestep, **more)
        finally:
            self.time_embed.offsets = None
