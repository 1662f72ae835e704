"""Quality of a world model on held-out episodes, in figures that do not use its own readout.

Agent and T are found in decoded frames by their colours. Decibels are of the mean squared error over the
whole set; positions are in pixels of the 96 x 96 frame.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from omni_loop.training.demos import Demos

from .codec import FrameCodec, to_float
from .dit import DiT
from .rollout import DenseRollout

_T_COLOUR = torch.tensor([119.0, 136.0, 153.0]) / 127.5 - 1  # LightSlateGray
_CONTEXT = 5  # real frames before the first prediction


@dataclass(frozen=True)
class Windows:
    """Held-out stretches: frames ``uint8[b, t, h, w, 3]``, actions ``float[b, t, 2]`` in -1..1."""

    frames: Tensor
    actions: Tensor

    @classmethod
    def of(cls, demos: Demos, length: int, per_episode: int = 2) -> Windows:
        """Stretches of ``length`` frames from every framed episode that is long enough."""
        frames, actions = [], []
        for e in demos.episodes("expert", "perturbed", "random", framed=True):
            start, n = int(demos.start[e]), int(demos.length[e])
            for lo in np.linspace(0, n - length, per_episode).astype(int) if n >= length else []:
                rows = slice(start + lo, start + lo + length)
                frames.append(torch.from_numpy(demos.frames[rows]))
                actions.append(torch.from_numpy(demos.action[rows] / 256 - 1).float())
        return cls(torch.stack(frames), torch.stack(actions))


def decibels(square: Tensor) -> float:
    return -10 * float(square.mean().clamp_min(1e-12).log10())


def square_error(a: Tensor, b: Tensor) -> Tensor:
    """Mean squared error ``[b]`` of images ``[b, 3, h, w]`` in -1..1, on the 0..1 scale."""
    return ((a - b) / 2).square().mean((1, 2, 3))


def agent_position(x: Tensor) -> Tensor:
    """Centre of the blue disc ``[b, 2]`` in frame pixels, of images ``[b, 3, h, w]`` in -1..1."""
    red, green, blue = x.unbind(1)
    weight = ((blue - red > 0.5) & (blue - green > 0.3)).float() * (blue - red)
    axis = torch.arange(x.shape[-1], dtype=torch.float32)
    total = weight.sum((1, 2)).clamp_min(1e-3)
    return torch.stack([(weight.sum(1) * axis).sum(1), (weight.sum(2) * axis).sum(1)], 1) / total[:, None]


def t_mask(x: Tensor) -> Tensor:
    """Pixels of the grey T ``bool[b, h, w]``."""
    return ((x - _T_COLOUR.view(1, 3, 1, 1)).abs() < 0.3).all(1)


def iou(a: Tensor, b: Tensor) -> Tensor:
    """Intersection over union ``[b]`` of masks ``bool[b, h, w]``."""
    return (a & b).sum((1, 2)) / (a | b).sum((1, 2)).clamp_min(1)


class Quality:
    """Runs a model over windows; each method is a group of figures."""

    def __init__(self, codec: FrameCodec, model: DiT, windows: Windows, steps: int | None = None) -> None:
        self.codec, self.model, self.windows = codec, model, windows
        self.steps = steps or model.config.denoise_steps
        with torch.no_grad():
            b, t = windows.frames.shape[:2]
            flat = windows.frames.flatten(0, 1)
            z = [codec.patchify(codec.encode(to_float(part))) for part in flat.split(256)]
            self.z = torch.cat(z).view(b, t, *z[0].shape[1:])

    def _image(self, step: int) -> Tensor:
        return to_float(self.windows.frames[:, step])

    @torch.no_grad()
    def _decode(self, z: Tensor) -> Tensor:
        return torch.cat([self.codec.decode(self.codec.unpatchify(p)) for p in z.split(128)]).clamp(-1, 1)

    def _prefilled(self, until: int) -> DenseRollout:
        """Real frames before ``until``, from five frames earlier on."""
        rollout, first = DenseRollout(self.model, len(self.z)), until - _CONTEXT
        for t in range(first, until):
            rollout.observe(self.z[:, t], self.windows.actions[:, t - 1] if t > first else None)
        return rollout

    def one_step(self) -> dict[str, float]:
        """One frame ahead from real context, at several places: against copying, and with other actions."""
        g = torch.Generator().manual_seed(0)
        model, copy, moving, moved = [], [], [], []
        true_px, shuffled_px, overlap = [], [], []
        for t in range(_CONTEXT, self.z.shape[1], 6):
            rollout, noise = self._prefilled(t), torch.randn(self.z[:, 0].shape, generator=g)
            action, real, last = self.windows.actions[:, t - 1], self._image(t), self._image(t - 1)
            image = self._decode(rollout.predict(action, noise, self.steps))
            other = action[torch.randperm(len(action), generator=g)]
            wrong = self._decode(rollout.predict(other, noise, self.steps))
            mask = ((real - last).abs().amax(1, keepdim=True) > 0.1).float()
            model.append(square_error(image, real))
            copy.append(square_error(last, real))
            moving.append((((image - real) / 2).square() * mask).sum() / (3 * mask.sum()))
            moved.append((((last - real) / 2).square() * mask).sum() / (3 * mask.sum()))
            at = agent_position(real)
            true_px.append((agent_position(image) - at).norm(dim=1))
            shuffled_px.append((agent_position(wrong) - at).norm(dim=1))
            overlap.append(iou(t_mask(image), t_mask(real)))
        return {
            "psnr_db": decibels(torch.cat(model)),
            "copy_db": decibels(torch.cat(copy)),
            "moving_db": decibels(torch.stack(moving)),
            "moving_copy_db": decibels(torch.stack(moved)),
            "agent_px": float(torch.cat(true_px).mean()),
            "agent_shuffled_px": float(torch.cat(shuffled_px).mean()),
            "iou": float(torch.cat(overlap).mean()),
        }

    def imagine(self, frames: int, real_every: int = 0) -> Tensor:
        """Images ``[b, frames, 3, h, w]`` imagined after five real frames; every ``real_every`` frames a
        real one takes the imagined one's place in the context."""
        rollout, g, out = self._prefilled(_CONTEXT), torch.Generator().manual_seed(1), []
        for i in range(frames):
            t = _CONTEXT + i
            action = self.windows.actions[:, t - 1]
            z = rollout.predict(action, torch.randn(self.z[:, 0].shape, generator=g), self.steps)
            out.append(self._decode(z))
            rollout.observe(self.z[:, t] if real_every and t % real_every == 0 else z, action)
        return torch.stack(out, 1)

    def horizon(self, frames: int = 16) -> list[dict[str, float]]:
        """One row per imagined frame: dB, dB of copying the last real frame, IoU of the T, agent error."""
        images, last, rows = self.imagine(frames), self._image(_CONTEXT - 1), []
        for h in range(frames):
            real = self._image(_CONTEXT + h)
            rows.append(
                {
                    "frame": h + 1,
                    "psnr_db": decibels(square_error(images[:, h], real)),
                    "copy_db": decibels(square_error(last, real)),
                    "iou": float(iou(t_mask(images[:, h]), t_mask(real)).mean()),
                    "copy_iou": float(iou(t_mask(last), t_mask(real)).mean()),
                    "agent_px": float((agent_position(images[:, h]) - agent_position(real)).norm(dim=1).mean()),
                }
            )
        return rows

    def reconditioned(self, frames: int = 48, real_every: int = 8) -> float:
        """dB at the last of ``frames`` with a real frame every ``real_every``."""
        images = self.imagine(frames, real_every)
        return decibels(square_error(images[:, -1], self._image(_CONTEXT + frames - 1)))


def summarise(quality: Quality) -> dict[str, float]:
    """The gates of a shipped world model."""
    one, curve = quality.one_step(), quality.horizon(16)
    return {
        "one_step_psnr_db": round(one["psnr_db"], 2),
        "one_step_copy_db": round(one["copy_db"], 2),
        "one_step_gain_db": round(one["psnr_db"] - one["copy_db"], 2),
        "one_step_moving_gain_db": round(one["moving_db"] - one["moving_copy_db"], 2),
        "agent_px": round(one["agent_px"], 2),
        "shuffled_action_ratio": round(one["agent_shuffled_px"] / one["agent_px"], 2),
        "iou_1": round(one["iou"], 3),
        "iou_8": round(curve[7]["iou"], 3),
        "copy_iou_8": round(curve[7]["copy_iou"], 3),
        "psnr_16_db": round(curve[15]["psnr_db"], 2),
        "copy_16_db": round(curve[15]["copy_db"], 2),
        "worst_gain_to_16_db": round(min(r["psnr_db"] - r["copy_db"] for r in curve), 2),
    }
