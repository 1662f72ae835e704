"""The decode stage: latents to frames and to the scene's points."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from omni_loop.messages import PayloadKind
from omni_loop.stage import Outputs, Payload, StageItem, StateSpec, one_by_one
from omni_loop.training.checkpoint import revision
from omni_loop.types import StageKind

from ..codec import to_uint8
from .shared import checkpoint, codec_of, to_px


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
        return one_by_one(self._decode, items)

    @torch.no_grad()
    def _decode(self, item: StageItem) -> Outputs:
        payload = item.inputs["latents"]
        z = self.codec.unpatchify(torch.as_tensor(payload.arrays["latents"], device=self.device))
        arrays = {"frames": to_uint8(self.codec.decode(z)).cpu(), "scene": to_px(self.codec.scene(z)).cpu()}
        return {"frames": Payload(PayloadKind.FRAMES, arrays, payload.meta)}

    def warm_up(self) -> None:
        c = self.codec.config
        z = torch.zeros(1, c.latent_channels, c.latent_size, c.latent_size, device=self.device)
        with torch.no_grad():
            self.codec.scene(z)
            self.codec.decode(z)


#: Factory registered as ``decode``.
decode = DecodeStage
