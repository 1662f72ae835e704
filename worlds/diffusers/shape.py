"""What a video world is like, known before its weights are: from options and the folder's JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from omni_loop.errors import ConfigError, nearest
from omni_loop.types import ArraySpec, Op, SessionSpec

from .folder import Folder

COSMOS2, COSMOS25 = "Cosmos2VideoToWorldPipeline", "Cosmos2_5_PredictBasePipeline"
WAN = "WanImageToVideoPipeline"
DTYPES = ("float32", "bfloat16", "float16")
_SIDE = 16  # pixels: what the pipelines themselves ask for, whatever the model
_STEERS = "what leads from one frame to the next, in the units the checkpoint was trained with"
_COUNTS = "not read: this model follows the prompt. n actions ask for n frames; send steps instead where you like"


@dataclass(frozen=True, slots=True)
class Shape:
    """Frames ``uint8[height, width, 3]``; a run of the model makes ``frames`` of them, of which the first ``context``
    repeat what it is conditioned on and are not shown. A latent frame stands for ``ratio`` frames, the first for 1."""

    height: int
    width: int
    frames: int
    context: int
    ratio: int
    action_dim: int
    steers: bool  # whether actions are read
    history: int = 0  # frames held besides the context

    @property
    def most(self) -> int:
        """New frames of one pass."""
        return self.frames - self.context

    @property
    def latent_frames(self) -> int:
        return (self.frames - 1) // self.ratio + 1


def check_options(least: Mapping[str, tuple[float, float]], frames: int, context: int, dtype: str) -> None:
    """What no folder can make right, so that it is said wherever its weights are: ``least`` has an option's value and
    the least it may be. Raises ConfigError."""
    for name, (value, lowest) in least.items():
        if not math.isfinite(value) or value < lowest:
            raise ConfigError(f"{name} is {value:g}; it must be at least {lowest:g}")
        if name in ("height", "width") and value % _SIDE:
            raise ConfigError(f"{name} is {value:g}; video models make multiples of {_SIDE}")
    if frames <= context:
        raise ConfigError(f"frames is {frames}; it must be more than {context}")
    if dtype not in DTYPES:
        raise ConfigError(f"dtype is {dtype!r}; it must be one of {', '.join(DTYPES)}.{nearest(dtype, DTYPES)}")


def shape_of(folder: Folder, height: int, width: int, frames: int, context: int, action_dim: int) -> Shape:
    """Raises ConfigError for sizes that the model cannot have. ``action_dim`` counts only where actions are not read;
    else the folder says how wide they are."""
    vae, transformer = folder.config("vae"), folder.config("transformer")
    if folder.setting("_class_name") == WAN:  # each as its pipeline reads it
        ratio, down = int(vae.get("scale_factor_temporal") or 4), int(vae.get("scale_factor_spatial") or 8)
    else:
        halves = vae.get("temperal_downsample", (False, True, True))
        ratio, down = 2 ** sum(map(bool, halves)), 2 ** len(halves)
    step = math.lcm(_SIDE, down * int((transformer.get("patch_size") or (1, 2, 2))[1]))
    for name, size in (("height", height), ("width", width)):
        if size < 1 or size % step:
            raise ConfigError(f"{name} is {size}; {folder.name} makes multiples of {step}")
    if context not in (1, 1 + ratio):
        raise ConfigError(f"context is {context}; {folder.name} is conditioned on 1 or {1 + ratio} frames")
    if frames <= context or frames % ratio != 1:
        raise ConfigError(f"frames is {frames}; it must be 1 more than a multiple of {ratio}, and more than {context}")
    steers = transformer.get("action_dim") is not None
    if steers and context != 1:
        raise ConfigError(f"context is {context}; {folder.name} reads actions, and is conditioned on 1 frame")
    if not steers and action_dim < 1:
        raise ConfigError(f"action_dim is {action_dim}; it must be at least 1")
    width_of = int(transformer["action_dim"]) if steers else action_dim
    return Shape(height, width, frames, context, ratio, width_of, steers)


def spec_of(name: str, shape: Shape, fps: float, description: str) -> SessionSpec:
    image = (shape.height, shape.width, 3)
    return SessionSpec(
        pipeline=name,
        observations=(ArraySpec("image", "uint8", image, "RGB", description="the frame to go on from"),),
        action=ArraySpec("action", "float32", (shape.action_dim,), description=_STEERS if shape.steers else _COUNTS),
        horizon=shape.most,
        execution_horizon=shape.most,
        control_hz=fps,
        ops=(Op.RECONDITION, Op.PREDICT),
        frame=ArraySpec("frame", "uint8", image, "RGB"),
        max_predict=shape.most,
        prompt=True,
        description=description,
    )
