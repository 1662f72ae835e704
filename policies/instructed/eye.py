"""What the policy from pixels sees: four convolutions, then where each of 32 features is, and how strong around it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn


class EyeConfig(BaseModel):
    """``size`` of the square image in pixels, a multiple of 16; ``out`` numbers are what is seen."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    size: int = 64
    channels: tuple[int, int, int, int] = (24, 48, 96, 128)
    points: int = 32
    out: int = 128


class Eye(nn.Module):
    """``image uint8[b, size, size, 3]`` to ``[b, out]``."""

    grid: Tensor

    def __init__(self, config: EyeConfig) -> None:
        super().__init__()
        side = config.size // 16
        layers: list[nn.Module] = []
        before = 3
        for i, n in enumerate(config.channels):
            kernel = 5 if i == 0 else 3
            layers += [nn.Conv2d(before, n, kernel, 2, kernel // 2), nn.GroupNorm(8, n), nn.SiLU()]
            before = n
        self.look = nn.Sequential(*layers, nn.Conv2d(before, config.points, 1))
        self.out = nn.Linear(config.points * (2 + side * side), config.out)
        line = torch.linspace(-1, 1, side)
        grid = torch.stack(torch.meshgrid(line, line, indexing="ij")).flatten(1)  # [2, side * side]
        self.register_buffer("grid", grid, persistent=False)

    def forward(self, image: Tensor) -> Tensor:
        seen = self.look(image.permute(0, 3, 1, 2).float() / 127.5 - 1).flatten(2)  # [b, points, side * side]
        where = seen.softmax(-1) @ self.grid.T  # [b, points, 2]
        return self.out(torch.cat([where.flatten(1), F.silu(seen).flatten(1)], -1))
