"""The decode stage: latents to frames and to the scene's points."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from omni_loop.errors import TensorError
from omni_loop.messages import PayloadKind
from omni_loop.stage import Outputs, Payload, StageItem, StateSpec, in_one
from omni_loop.training.checkpoint import revision
from omni_loop.types import StageKind

from ..codec import to_uint8
from .shared import checkpoint, codec_of, to_px

_AT_ONCE = 32  # frames: more of them only take more memory


class DecodeStage:
    """Input ``latents [n, 16, c]``; output ``frames``: ``frames uint8[n, h, w, 3]``, ``scene
    float32[n, 9, 2]`` in table pixels. Keeps no state."""

    kind = StageKind.DECODE

    def __init__(self, checkpoints: str = "", device: str = "cpu") -> None:
        folder = checkpoint("codec", checkpoints)
        self.codec, self.revision = codec_of(folder, device), revision(folder)
        self.device = device

    def state_specs(self) -> Mapping[str, StateSpec]:
        return {}

    def run(self, items: Sequence[StageItem]) -> Sequence[Outputs | Exception]:
        return in_one(self._given, self._decode, items)

    def _given(self, item: StageItem) -> Payload:
        payload, c = item.inputs["latents"], self.codec.config
        latents = torch.as_tensor(payload.arrays["latents"], device=self.device).float()
        if latents.ndim != 3 or tuple(latents.shape[1:]) != (c.tokens_per_frame, c.token_dim):
            want = ["n", c.tokens_per_frame, c.token_dim]
            raise TensorError(f"'latents' has shape {list(latents.shape)}, the decode stage takes {want}")
        return Payload(PayloadKind.FRAMES, {"latents": latents}, payload.meta)

    @torch.no_grad()
    def _decode(self, given: Sequence[Payload]) -> list[Outputs]:
        latents = [payload.arrays["latents"] for payload in given]
        z = self.codec.unpatchify(torch.cat(latents))
        frames = torch.cat([to_uint8(self.codec.decode(part)) for part in z.split(_AT_ONCE)]).cpu()
        scenes = torch.cat([to_px(self.codec.scene(part)) for part in z.split(_AT_ONCE)]).cpu()
        lengths = [len(part) for part in latents]
        made = zip(given, frames.split(lengths), scenes.split(lengths), strict=True)
        return [
            {"frames": Payload(PayloadKind.FRAMES, {"frames": frames, "scene": scene}, payload.meta)}
            for payload, frames, scene in made
        ]

    def warm_up(self) -> None:
        c = self.codec.config
        z = torch.zeros(1, c.latent_channels, c.latent_size, c.latent_size, device=self.device)
        with torch.no_grad():
            self.codec.scene(z)
            self.codec.decode(z)


#: Factory registered as ``decode``.
decode = DecodeStage
