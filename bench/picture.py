"""Imagined frames below the real ones: what the figures look like."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from omni_loop.errors import ConfigError
from omni_loop.training.demos import Demos
from omni_loop_worlds.codec import to_uint8
from omni_loop_worlds.quality import Windows

STEPS = (1, 2, 3, 4, 6, 8)
_KINDS = ("expert", "perturbed", "random")
_SCALE, _GAP, _PAIR_GAP, _LEFT, _TOP = 2, 4, 16, 132, 36  # px
_PAPER, _INK, _MUTED = (255, 255, 255), (24, 28, 34), (110, 118, 130)


def choose(demos: Demos, length: int) -> tuple[Windows, list[str]]:
    """One stretch of ``length`` frames of each kind of episode, the T wholly on the table where there is such a one:
    that in which it moves more than in three of four, so that there is something to see and it is no exception."""
    frames, actions, names = [], [], []
    for kind in _KINDS:
        starts = [
            int(demos.start[e]) + at
            for e in demos.episodes(kind, framed=True)
            for at in range(0, int(demos.length[e]) - length + 1, 4)
        ]
        if not starts:
            raise ConfigError(f"no held-out {kind} episode has {length} frames to draw")
        points = demos.points[:, 1:]
        starts = [s for s in starts if np.abs(points[s : s + length]).max() < 1] or starts
        moved = [float(np.abs(points[s + length - 1] - points[s]).mean()) for s in starts]
        start = starts[int(np.argsort(moved)[int(0.75 * (len(moved) - 1))])]
        rows = slice(start, start + length)
        frames.append(torch.from_numpy(demos.frames[rows]))
        actions.append(torch.from_numpy(demos.action[rows] / 256 - 1).float())
        names.append(kind)
    return Windows(torch.stack(frames), torch.stack(actions)), names


def strip(path: Path, real: Tensor, imagined: Tensor, names: Sequence[str]) -> None:
    """Write a PNG: per episode a row of ``real uint8[b, t, h, w, 3]`` and one of ``imagined float[b, t, 3, h, w]``
    in -1..1 at :data:`STEPS`; the first frame of both is step 1."""
    size = real.shape[2] * _SCALE
    width = _LEFT + len(STEPS) * (size + _GAP)
    pair = 2 * (size + _GAP) + _PAIR_GAP
    image = Image.new("RGB", (width, _TOP + len(names) * pair - _PAIR_GAP), _PAPER)
    draw, large, small = ImageDraw.Draw(image), ImageFont.load_default(size=18), ImageFont.load_default(size=15)
    for column, step in enumerate(STEPS):
        middle = _LEFT + column * (size + _GAP) + size / 2
        draw.text((middle, _TOP / 2), f"step {step}", fill=_INK, font=large, anchor="mm")
    for number, name in enumerate(names):
        rows = (("real", real[number]), ("imagined", to_uint8(imagined[number])))
        for line, (label, frames) in enumerate(rows):
            top = _TOP + number * pair + line * (size + _GAP)
            draw.text((12, top + size / 2 - 10), label, fill=_INK, font=large, anchor="lm")
            draw.text((12, top + size / 2 + 12), name, fill=_MUTED, font=small, anchor="lm")
            for column, step in enumerate(STEPS):
                frame = Image.fromarray(frames[step - 1].numpy())
                at = (_LEFT + column * (size + _GAP), top)
                image.paste(frame.resize((size, size), Image.Resampling.BICUBIC), at)
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, optimize=True)
