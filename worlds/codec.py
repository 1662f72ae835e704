"""Frame codec: 96 x 96 frames to 12 x 12 x 8 latents and back, with two readers of the latents.

* :class:`FrameCodec` encodes and decodes; latents come out normalised (zero mean, unit variance).
* :class:`Readout` estimates the scene (agent and the T's eight keypoints) from latents.
* :class:`FrameTokenizer` turns latents into 16 discrete tokens (finite scalar quantisation,
  arXiv 2309.15505) for the autoregressive context model.

The readout's error is part of the codec's loss, so latents keep the pose to a fraction of a pixel.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn


class CodecConfig(BaseModel):
    """Sizes. ``frame_size`` must be a multiple of 24 (8x down, then 3 x 3 patches)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["codec"] = "codec"
    frame_size: int = 96
    latent_channels: int = 8
    width: int = 96
    inner: int = 64
    points: int = 9  # the agent and eight keypoints
    fsq_levels: tuple[int, ...] = (8, 5, 5, 5)

    @property
    def latent_size(self) -> int:
        return self.frame_size // 8

    @property
    def patch(self) -> int:
        return 3

    @property
    def tokens_per_frame(self) -> int:
        return (self.latent_size // self.patch) ** 2

    @property
    def token_dim(self) -> int:
        return self.latent_channels * self.patch**2

    @property
    def codes(self) -> int:
        n = 1
        for level in self.fsq_levels:
            n *= level
        return n


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(8, width)
        self.a = nn.Conv2d(width, width, 3, padding=1)
        self.b = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(F.silu(self.a(F.silu(self.norm(x)))))


class Readout(nn.Module):
    """Points of the scene from latents: ``[b, c, h, w]`` to ``[b, points, 2]`` in -1..1 of the table."""

    def __init__(self, config: CodecConfig, width: int = 96, maps: int = 48) -> None:
        super().__init__()
        self.points = config.points
        self.body = nn.Sequential(
            nn.Conv2d(config.latent_channels, width, 3, padding=1), Residual(width), Residual(width), nn.SiLU()
        )
        self.maps = nn.Conv2d(width, maps, 1)
        self.head = nn.Sequential(
            nn.Linear(2 * maps, 256), nn.SiLU(), nn.Linear(256, 256), nn.SiLU(), nn.Linear(256, 2 * config.points)
        )
        axis = torch.linspace(-1, 1, config.latent_size)
        ys, xs = torch.meshgrid(axis, axis, indexing="ij")
        self.register_buffer("grid", torch.stack([xs.flatten(), ys.flatten()], -1), persistent=False)

    def forward(self, z: Tensor) -> Tensor:
        body = self.body(z)
        # Half precision holds a table position to about a pixel only: coordinates stay in float32.
        with torch.autocast(z.device.type, enabled=False):
            weights = self.maps(body.float()).flatten(2).softmax(-1)  # [b, maps, h * w]
            return self.head((weights @ self.grid).flatten(1)).view(-1, self.points, 2)


class FrameTokenizer(nn.Module):
    """Latents to 16 codes of a frame and back (coarsely)."""

    levels: Tensor  # int64[d]
    basis: Tensor  # int64[d]

    def __init__(self, config: CodecConfig, width: int = 96) -> None:
        super().__init__()
        self.config = config
        c, p, d = config.latent_channels, config.patch, len(config.fsq_levels)
        self.encoder = nn.Sequential(
            nn.Conv2d(c, width, 3, padding=1), Residual(width), nn.Conv2d(width, width, p, stride=p), nn.SiLU(),
            nn.Conv2d(width, d, 1),
        )  # fmt: skip
        self.decoder = nn.Sequential(
            nn.Conv2d(d, width, 3, padding=1), Residual(width), nn.Conv2d(width, c * p * p, 1), nn.PixelShuffle(p)
        )
        side = config.latent_size // p
        self.pose = nn.Sequential(
            nn.Linear(d * side * side, 256),
            nn.SiLU(),
            nn.Linear(256, 256),
            nn.SiLU(),
            nn.Linear(256, 2 * config.points),
        )
        levels = torch.tensor(config.fsq_levels)
        self.register_buffer("levels", levels, persistent=False)
        basis = torch.cumprod(torch.cat([torch.ones(1, dtype=torch.long), levels[:-1]]), 0)
        self.register_buffer("basis", basis, persistent=False)

    def quantise(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """``(values [b, d, s, s] in -1..1 with a straight-through gradient, digits int[b, d, s, s])``."""
        levels = self.levels.view(1, -1, 1, 1)
        scaled = (torch.tanh(self.encoder(z).float()) + 1) / 2 * (levels - 1)
        digits = scaled.round()
        values = scaled + (digits - scaled).detach()
        return values / (levels - 1) * 2 - 1, digits.long()

    def tokens(self, z: Tensor) -> Tensor:
        """Codes ``int64[b, 16]`` of latents, row by row of the 4 x 4 grid."""
        _, digits = self.quantise(z)
        return (digits * self.basis.view(1, -1, 1, 1)).sum(1).flatten(1)

    def values(self, tokens: Tensor) -> Tensor:
        """Quantised values ``[b, 16, d]`` of codes; the inverse of :meth:`tokens` up to quantisation."""
        digits = tokens[..., None] // self.basis % self.levels
        return digits / (self.levels - 1) * 2 - 1


class FrameCodec(nn.Module):
    """See the module's text. Frames are float ``[b, 3, h, w]`` in -1..1."""

    latent_mean: Tensor
    latent_std: Tensor

    def __init__(self, config: CodecConfig) -> None:
        super().__init__()
        self.config = config
        c, w, i = config.latent_channels, config.width, config.inner
        self.encoder = nn.Sequential(
            nn.PixelUnshuffle(4), nn.Conv2d(48, i, 3, padding=1), Residual(i),
            nn.Conv2d(i, w, 3, stride=2, padding=1), Residual(w), Residual(w), nn.GroupNorm(8, w), nn.SiLU(),
            nn.Conv2d(w, c, 1),
        )  # fmt: skip
        self.decoder = nn.Sequential(
            nn.Conv2d(c, w, 3, padding=1), Residual(w), Residual(w), nn.Conv2d(w, i * 4, 1), nn.PixelShuffle(2),
            Residual(i), nn.Conv2d(i, 32 * 4, 1), nn.PixelShuffle(2), nn.SiLU(),
            nn.Conv2d(32, 12, 3, padding=1), nn.PixelShuffle(2),
        )  # fmt: skip
        self.readout = Readout(config)
        self.tokenizer = FrameTokenizer(config)
        self.register_buffer("latent_mean", torch.zeros(1, c, 1, 1))
        self.register_buffer("latent_std", torch.ones(1, c, 1, 1))

    def encode(self, x: Tensor) -> Tensor:
        """Frames ``[b, 3, h, w]`` in -1..1 to normalised latents ``[b, c, h / 8, w / 8]``."""
        return (self.encoder(x) - self.latent_mean) / self.latent_std

    def decode(self, z: Tensor) -> Tensor:
        """Normalised latents to frames in about -1..1 (not clamped)."""
        return self.decoder(z * self.latent_std + self.latent_mean)

    def scene(self, z: Tensor) -> Tensor:
        """Normalised latents to the scene's points ``[b, points, 2]`` in -1..1: agent first."""
        return self.readout(z * self.latent_std + self.latent_mean)

    def tokens(self, z: Tensor) -> Tensor:
        """Normalised latents to frame tokens ``int64[b, 16]``."""
        return self.tokenizer.tokens(z * self.latent_std + self.latent_mean)

    def patchify(self, z: Tensor) -> Tensor:
        """``[b, c, h, w]`` to ``[b, 16, c * 9]``: the DiT's view of a frame."""
        b, c, h, w = z.shape
        p = self.config.patch
        z = z.view(b, c, h // p, p, w // p, p).permute(0, 2, 4, 1, 3, 5)
        return z.reshape(b, (h // p) * (w // p), c * p * p)

    def unpatchify(self, tokens: Tensor) -> Tensor:
        """The inverse of :meth:`patchify`."""
        b = tokens.shape[0]
        p, c, s = self.config.patch, self.config.latent_channels, self.config.latent_size // self.config.patch
        z = tokens.view(b, s, s, c, p, p).permute(0, 3, 1, 4, 2, 5)
        return z.reshape(b, c, s * p, s * p)


def to_float(frames: Tensor) -> Tensor:
    """``uint8[b, h, w, 3]`` to ``float32[b, 3, h, w]`` in -1..1."""
    return frames.permute(0, 3, 1, 2).float().div(127.5).sub(1).contiguous()


def to_uint8(x: Tensor) -> Tensor:
    """``float[b, 3, h, w]`` in -1..1 to ``uint8[b, h, w, 3]``, clipped, never wrapped."""
    return x.clamp(-1, 1).add(1).mul(127.5).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous()
