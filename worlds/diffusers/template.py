"""Pipelines of diffusers folders: ``cosmos`` and ``wan`` in a deployment's ``pipelines``.

Both are one stage, since what a session goes on from is the decoded frame. See docs/diffusers.md.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from omni_loop.errors import ConfigError
from omni_loop.loop.pipeline import CLIENT, Edge, Pipeline, Plan, StageDef
from omni_loop.messages import PayloadKind, Scalar
from omni_loop.types import Op, SessionSpec, StageKind

from .folder import Folder
from .shape import COSMOS2, COSMOS25, WAN, check_options, shape_of, spec_of


def cosmos(
    name: str,
    checkpoint: str,
    height: int = 704,
    width: int = 1280,
    frames: int = 93,
    context: int = 5,
    steps: int = 35,
    guidance: float = 7.0,
    fps: int = 16,
    dtype: str = "bfloat16",
    device: str = "",
    negative_prompt: str = "",
    text_encoder: str = "",
    text_length: int = 512,
    prompts: int = 16,
    action_dim: int = 1,
    history: int = 0,
    guardrail: bool = True,
) -> Pipeline:
    """Cosmos Predict2 or Predict2.5 video-to-world from a diffusers folder.

    A Predict makes up to ``frames - context`` frames in ``steps`` denoise steps, conditioned on the last ``context``
    frames (1 or 5; 1 while fewer are known). ``text_encoder``: another folder that holds ``text_encoder`` and
    ``tokenizer``. An empty ``negative_prompt`` is the pipeline's own. ``prompts``: embeddings kept. ``history``: frames
    held besides the context, so that a Recondition may keep so many more imagined ones.

    Raises:
        CheckpointError: no such folder, or one of another pipeline.
        ConfigError: sizes the model cannot have.
    """
    least: dict[str, tuple[float, float]] = {
        "height": (height, 1), "width": (width, 1), "frames": (frames, 1), "context": (context, 1), "steps": (steps, 1),
        "guidance": (guidance, 0), "fps": (fps, 1), "text_length": (text_length, 1), "prompts": (prompts, 1),
        "action_dim": (action_dim, 1), "history": (history, 0),
    }  # fmt: skip
    check_options(least, frames, context, dtype)
    folder = Folder(checkpoint)
    kind = folder.kind((COSMOS2, COSMOS25))
    shape = shape_of(folder, height, width, frames, context, action_dim)
    if shape.steers and kind != COSMOS25:
        raise ConfigError(f"{folder.name}: only Predict2.5 has transformers that read actions")
    options: dict[str, Scalar] = {
        "checkpoint": checkpoint, "height": height, "width": width, "frames": frames, "context": context,
        "steps": steps, "guidance": guidance, "fps": fps, "dtype": dtype, "negative_prompt": negative_prompt,
        "text_encoder": text_encoder, "text_length": text_length, "prompts": prompts, "action_dim": action_dim,
        "history": history, "guardrail": guardrail,
    }  # fmt: skip
    read = "under the client's actions" if shape.steers else "by the prompt alone: actions only say how many"
    text = f"{folder.name}: the next frames, {read}"
    return _pipeline(name, "cosmos:CosmosStage", options, device, text, partial(spec_of, name, shape, fps, text))


def wan(
    name: str,
    checkpoint: str,
    height: int = 480,
    width: int = 832,
    frames: int = 81,
    steps: int = 50,
    guidance: float = 5.0,
    guidance_2: float = 0.0,
    fps: int = 16,
    dtype: str = "bfloat16",
    device: str = "",
    negative_prompt: str = "",
    text_encoder: str = "",
    text_length: int = 512,
    prompts: int = 16,
    action_dim: int = 1,
) -> Pipeline:
    """Wan 2.1 or 2.2 image-to-video from a diffusers folder.

    The last frame becomes ``frames - 1`` new ones in ``steps`` denoise steps; Predicts show them as they are asked for,
    decoded a latent frame at a time, and the next frame after them begins another such run. ``guidance_2``: of Wan
    2.2's low-noise model; 0: as ``guidance``. For the rest see :func:`cosmos`, and for what is raised.
    """
    least: dict[str, tuple[float, float]] = {
        "height": (height, 1), "width": (width, 1), "frames": (frames, 1), "steps": (steps, 1),
        "guidance": (guidance, 0), "fps": (fps, 1), "text_length": (text_length, 1), "prompts": (prompts, 1),
        "action_dim": (action_dim, 1), "guidance_2": (guidance_2, 0),
    }  # fmt: skip
    check_options(least, frames, 1, dtype)
    folder = Folder(checkpoint)
    folder.kind((WAN,))
    shape = shape_of(folder, height, width, frames, 1, action_dim)
    options: dict[str, Scalar] = {
        "checkpoint": checkpoint, "height": height, "width": width, "frames": frames, "steps": steps,
        "guidance": guidance, "guidance_2": guidance_2, "dtype": dtype, "negative_prompt": negative_prompt,
        "text_encoder": text_encoder, "text_length": text_length, "prompts": prompts, "action_dim": action_dim,
    }  # fmt: skip
    text = f"{folder.name}: the next frames, by the prompt alone: actions only say how many"
    return _pipeline(name, "wan:WanStage", options, device, text, partial(spec_of, name, shape, fps, text))


def _pipeline(
    name: str,
    factory: str,
    options: dict[str, Scalar],
    device: str,
    description: str,
    spec: Callable[[], SessionSpec],
) -> Pipeline:
    if device:  # else the runner's
        options["device"] = device
    return Pipeline(
        name,
        spec,
        (StageDef("frames", StageKind.FRAMES, f"{__package__}.{factory}", options),),
        (
            Edge(CLIENT, "observation", "frames", "observation", PayloadKind.OBSERVATION, optional=True),
            Edge(CLIENT, "actions", "frames", "actions", PayloadKind.ACTIONS, optional=True),
        ),
        {Op.RECONDITION: Plan(answer=("frames",)), Op.PREDICT: Plan(answer=("frames",), frames="frames.frames")},
        description,
    )
