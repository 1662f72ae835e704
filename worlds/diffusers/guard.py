"""NVIDIA's guardrail for Cosmos (the package ``cosmos_guardrail``), which its model license asks to keep on."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from omni_loop.errors import InvalidInput, Reason, StageFailed

from .folder import imported


class Guardrail:
    """Refuses prompts and frames; blurs faces. Its weights come from its own package."""

    def __init__(self, device: str) -> None:
        self._checker: Any = imported("cosmos_guardrail").CosmosSafetyChecker().to(device)

    def check(self, prompt: str) -> None:
        """Raises InvalidInput for a prompt that may not be used."""
        if prompt and not self._checker.check_text_safety(prompt):
            raise InvalidInput("the prompt was refused by the Cosmos guardrail")

    def checked(self, video: Tensor) -> Tensor:
        """Frames ``[3, n, h, w]`` in -1..1 as they may be shown. Raises StageFailed for those that may not."""
        shown = ((video.float() / 2 + 0.5).clamp(0, 1) * 255).to(torch.uint8).permute(1, 2, 3, 0)
        safe = self._checker.check_video_safety(shown.cpu().numpy())
        if safe is None:
            raise StageFailed("the frames were refused by the Cosmos guardrail", reason=Reason.BAD_OUTPUT)
        frames = torch.from_numpy(np.ascontiguousarray(safe)).to(video.device).permute(3, 0, 1, 2)
        return (frames.float() / 255.0 * 2 - 1).to(video.dtype)
