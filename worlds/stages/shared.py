"""What the world-side stages share: shipped checkpoints, one codec per process, table units."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from omni_loop.errors import TensorError

from ..codec import FrameCodec, to_float
from ..context.perceive import load_codec

SHIPPED = Path(__file__).parent.parent / "checkpoints"
TABLE_HALF = 256.0  # px of the table per unit of -1..1


def checkpoint(name: str, folder: str = "") -> Path:
    """Folder of a part: shipped, or below ``folder`` when a deployment names one."""
    return (Path(folder) if folder else SHIPPED) / name


@lru_cache(maxsize=4)
def codec_of(folder: Path, device: str) -> FrameCodec:
    """Several stages of a process read frames by the same weights: load them once."""
    return load_codec(folder).to(device)


def tensor_of(array: Any) -> Tensor:
    """``array`` as a tensor. What came over the wire is a read-only view of a message: torch wants its own."""
    if isinstance(array, np.ndarray) and not array.flags.writeable:
        array = array.copy()
    return torch.as_tensor(array)


def images_of(codec: FrameCodec, array: Any) -> Tensor:
    """Images ``uint8[n, h, w, 3]`` of the codec's size; raises TensorError for others."""
    images, size = tensor_of(array), codec.config.frame_size
    if images.dtype != torch.uint8 or tuple(images.shape[1:]) != (size, size, 3) or images.ndim != 4:
        raise TensorError(f"images are {images.dtype} {list(images.shape)}, expected uint8 {['n', size, size, 3]}")
    return images


def encode(codec: FrameCodec, images: Any) -> Tensor:
    """``uint8[n, h, w, 3]`` to patchified latents ``float32[n, 16, c]``."""
    return codec.patchify(codec.encode(to_float(tensor_of(images).to(codec.latent_mean.device))))


def to_unit(px: Any) -> Tensor:
    """Table pixels (0..512) to -1..1."""
    return tensor_of(px).float() / TABLE_HALF - 1


def to_px(unit: Tensor) -> Tensor:
    """-1..1 to table pixels."""
    return (unit + 1) * TABLE_HALF
