"""What a context stage senses of an observation, real or imagined, whichever engine reads it then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from omni_loop.errors import InvalidInput, StateError, TensorError
from omni_loop.messages import PayloadKind
from omni_loop.stage import Payload, StageItem

from ..codec import FrameCodec
from ..context import layout
from ..scene import pose_points
from .shared import encode, images_of, tensor_of, to_unit


@dataclass(slots=True)
class Glance:
    """One tick's senses in -1..1. ``latents [n, 16, c]`` are those of ``image uint8[96, 96, 3]``, or the imagined ones
    to look at; ``points [9, 2]``, partly measured; ``agent_before [2]`` and whether it is known; actions ``executed
    [k, 2]`` since the tick before. What is None here is read from latents, of all glances together."""

    executed: Tensor
    image: Tensor | None = None
    latents: Tensor | None = None
    agent: Tensor | None = None  # [2, 2]: before and now
    keypoints: Tensor | None = None
    scene: Tensor | None = None  # [n, 9, 2] as read from latents

    @property
    def imagined(self) -> bool:
        return self.image is None

    @property
    def last(self) -> Tensor:
        """``[16, c]``."""
        assert self.latents is not None
        return self.latents[-1]

    @property
    def points(self) -> Tensor:
        keypoints = self._read[-1, 1:] if self.keypoints is None else self.keypoints
        agent = self._read[-1, :1] if self.agent is None else self.agent[1:]
        return torch.cat([agent, keypoints])

    @property
    def agent_before(self) -> Tensor:
        return self._read[0, 0] if self.agent is None else self.agent[0]

    @property
    def history(self) -> float:
        return float(self.agent is not None or len(self._read) == 2)

    @property
    def _read(self) -> Tensor:
        assert self.scene is not None
        return self.scene

    def outputs(self) -> dict[str, Payload]:
        """``scene`` (points and the agent's position before) and ``latents`` (of the frame seen)."""
        scene = {"points": self.points, "agent_before": self.agent_before}
        return {
            "scene": Payload(PayloadKind.SCENE, scene, {"history": self.history}),
            "latents": Payload(PayloadKind.LATENTS, {"latents": self.last[None]}),
        }


def glance_of(codec: FrameCodec, item: StageItem) -> Glance:
    """What ``item`` gives to look at, checked; raises the item's own error."""
    if seen := item.inputs.get("observation"):
        return _real(codec, seen)
    if imagined := item.inputs.get("imagined"):
        return _imagined(codec, imagined)
    raise StateError("nothing to look at: this session has had no observation yet; call Infer first")


def given_tokens(codec: FrameCodec, glances: Sequence[Glance]) -> Tensor:
    """The read part of the ticks, ``int64[b, 30]``, and what it takes: latents of all images and the scene of all
    frames of which it is not known, each in one pass."""
    _read_frames(codec, glances)
    last = torch.stack([glance.last for glance in glances])
    codes = codec.tokens(codec.unpatchify(last)).cpu()
    points = torch.stack([glance.points for glance in glances])
    executed, known = zip(*(layout.pick_executed(glance.executed) for glance in glances), strict=True)
    return layout.given_tokens(codes, points, torch.stack(executed), torch.tensor(known))


def _read_frames(codec: FrameCodec, glances: Sequence[Glance]) -> None:
    images = {i: glance.image for i, glance in enumerate(glances) if glance.image is not None}
    if images:
        for i, latents in zip(images, encode(codec, torch.stack(list(images.values()))), strict=True):
            glances[i].latents = latents[None]
    unknown = [glance for glance in glances if glance.keypoints is None]
    frames = [glance.latents for glance in unknown if glance.latents is not None]
    if frames:
        scenes = codec.scene(codec.unpatchify(torch.cat(frames))).cpu()
        for glance, scene in zip(unknown, scenes.split([len(part) for part in frames]), strict=True):
            glance.scene = scene


def _real(codec: FrameCodec, payload: Payload) -> Glance:
    """The client measures the agent; the T is read from the frame unless its pose is given."""
    arrays = payload.arrays
    return Glance(
        _positions("executed", arrays["executed"]) if "executed" in arrays else torch.zeros(0, 2),
        image=images_of(codec, arrays["image"][None])[0],
        agent=_positions("agent_pos", arrays["agent_pos"], 2),
        keypoints=_keypoints(arrays["block_pose"]) if "block_pose" in arrays else None,
    )


def _imagined(codec: FrameCodec, payload: Payload) -> Glance:
    """All is read from the last two imagined frames."""
    latents = torch.as_tensor(payload.arrays["latents"], device=codec.latent_mean.device).float()
    c = codec.config
    if tuple(latents.shape[1:]) != (c.tokens_per_frame, c.token_dim):
        want = ["n", c.tokens_per_frame, c.token_dim]
        raise TensorError(f"'latents' has shape {list(latents.shape)}, the context stage takes {want}")
    if len(latents) == 0:
        raise InvalidInput("the tick before imagined no frames: nothing to look at")
    executed = torch.as_tensor(payload.arrays["actions"], dtype=torch.float32).cpu()
    if executed.ndim != 2 or executed.shape[1] != 2:
        raise TensorError(f"'actions' has shape {list(executed.shape)}, expected [k, 2]")
    return Glance(executed, latents=latents[-2:])


def _keypoints(array: Any) -> Tensor:
    """Keypoints ``[8, 2]`` in -1..1 of the T's pose."""
    pose = tensor_of(array).float()
    if tuple(pose.shape) != (3,):
        raise TensorError(f"'block_pose' has shape {list(pose.shape)}, expected [3]")
    return to_unit(pose_points(pose))


def _positions(name: str, px: Any, n: int | None = None) -> Tensor:
    """Positions ``[n, 2]`` in -1..1; any number when ``n`` is None."""
    array = to_unit(px)
    if array.ndim != 2 or array.shape[1] != 2 or len(array) != (n or len(array)):
        raise TensorError(f"{name!r} has shape {list(array.shape)}, expected {[n or 'n', 2]}")
    return array
