"""What the stages of diffusers pipelines share: frames in, chunks of frames out, pass by pass.

A tick that predicts goes through these passes, between which jobs of other sessions may join::

    begin -> encode -> denoise x steps -> decode (one pass or more) -> finish: frames, staged state
               ^          batched             |
               └── another chunk, if frames are still missing (Wan)

Schedulers of diffusers hold a step index and, for multistep ones, the last outputs: every job has a copy of its own,
so that sessions at different steps share the transformer's passes. A model's caches that decide on a batch as a whole
(FirstBlockCache) are never used: sessions would change each other.

Inputs: ``observation`` (``image uint8[n, h, w, 3]`` and ``executed float32[k, action_dim]``) of a Recondition,
``actions float32[n, action_dim]`` of a Predict. Output of a Predict: ``frames uint8[n, h, w, 3]``.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from omni_loop.errors import ConfigError, InvalidInput, TensorError, nearest
from omni_loop.messages import PayloadKind
from omni_loop.stage import Job, Outputs, Payload, StageItem, StateSpec, in_steps
from omni_loop.types import Op, StageKind

from .folder import Folder
from .history import Observed, commit_imagined, commit_observed, history_specs, observe, recent
from .prompts import Prompts
from .shape import DTYPES, Shape


@dataclass(slots=True)
class Chunk:
    """One run of the sampler for one session. ``given`` is what it is conditioned on, in the model's own terms."""

    latents: Tensor  # float32[1, c, t, h, w]
    solver: Any  # a scheduler of its own
    text: Tensor
    given: Mapping[str, Tensor] = field(default_factory=dict)
    step: int = 0

    @property
    def done(self) -> bool:
        return self.step == len(self.solver.timesteps)

    @property
    def time(self) -> Tensor:
        """The scheduler's own time of the step."""
        return self.solver.timesteps[self.step]

    @property
    def sigma(self) -> Tensor:
        """The noise level of the step."""
        return self.solver.sigmas[self.step]


class VideoJob:
    """One tick under way. ``made`` are the new frames ``float[3, h, w]`` so far, ``count`` how many are wanted."""

    def __init__(self, item: StageItem, count: int = 0, actions: Tensor | None = None) -> None:
        self.item, self.count, self.actions = item, count, actions
        self.observed: Observed | None = None
        self.made: list[Tensor] = []
        self.chunk: Chunk | None = None

    @property
    def finished(self) -> bool:
        return len(self.made) >= self.count

    def outputs(self, first: int = 0) -> Outputs:
        """What has been made from frame ``first`` on."""
        frames, meta = to_uint8(torch.stack(self.made[first:])).cpu(), {"first_step": self.item.step + 1 + first}
        return {"frames": Payload(PayloadKind.FRAMES, {"frames": frames}, meta)}

    @property
    def last(self) -> Sequence[Tensor]:
        """The frames to go on from."""
        return [*recent(self.item.state), *self.made]

    @property
    def generator(self) -> torch.Generator:
        """The noise of this tick: a function of the session's seed, epoch and tick. Always on the CPU, as diffusers
        advises for results that do not depend on the device."""
        return torch.Generator().manual_seed(self.item.noise_seed("frames"))


class VideoStage(ABC):
    """See the module's text; ``pipe`` is the diffusers pipeline, whose own ``__call__`` is never used."""

    kind = StageKind.FRAMES
    revision: str

    def __init__(self, shape: Shape, pipe: Any, solver: Any, prompts: Prompts, guidance: float, device: str) -> None:
        self.shape, self.pipe, self.prompts = shape, pipe, prompts
        self.guidance, self.device = guidance, device
        self._solver = solver  # with its timesteps set

    # What models differ in.

    @abstractmethod
    def encode(self, job: VideoJob) -> Chunk:
        """The chunk that goes on from ``job.last``."""

    @abstractmethod
    def group(self, chunk: Chunk) -> Hashable:
        """Chunks of equal keys may share a pass."""

    @abstractmethod
    def passed(self, chunks: Sequence[Chunk]) -> Tensor:
        """One pass of the transformer at each chunk's step: what the schedulers take, ``float32[b, c, t, h, w]``."""

    @abstractmethod
    def decode(self, job: VideoJob) -> None:
        """Add frames of the finished chunk to ``job.made``."""

    # The stage.

    def state_specs(self) -> Mapping[str, StateSpec]:
        dtype = str(self.pipe.vae.dtype).removeprefix("torch.")
        s = self.shape
        return history_specs(s.context, s.history, s.height, s.width, dtype)

    def run(self, items: Sequence[StageItem]) -> Sequence[Outputs | Exception]:
        return in_steps(self, items)

    def begin(self, item: StageItem) -> VideoJob:
        if item.op is Op.RECONDITION:
            return self._recondition(item)
        job = self._predict(item)
        recent(item.state)
        return job

    @torch.no_grad()
    def advance(self, jobs: Sequence[Job]) -> Sequence[Exception | None]:
        """One pass each: those at the same kind of denoise step together, all others alone."""
        errors: list[Exception | None] = [None] * len(jobs)
        groups: dict[Hashable, list[Chunk]] = {}
        for i, job in enumerate(cast("Sequence[VideoJob]", jobs)):
            if job.finished:
                continue
            try:
                if job.chunk is not None and not job.chunk.done:
                    groups.setdefault(self.group(job.chunk), []).append(job.chunk)
                else:
                    self._alone(job)
            except Exception as e:  # the runner answers that item with it
                errors[i] = e
        for chunks in groups.values():
            outputs = self.passed(chunks)
            for chunk, output in zip(chunks, outputs.split(1), strict=True):
                chunk.latents = chunk.solver.step(output, chunk.time, chunk.latents, return_dict=False)[0]
                chunk.step += 1
        return errors

    def _alone(self, job: VideoJob) -> None:
        if job.chunk is None:
            job.chunk = self.encode(job)
        else:
            self.decode(job)

    def finish(self, job: Job) -> Outputs:
        """Stage the frames; raises what the state refuses."""
        made = cast("VideoJob", job)
        state = made.item.state
        if made.observed is not None:
            commit_observed(state, made.observed)
            return {}
        commit_imagined(state, made.made)
        return made.outputs()

    @torch.no_grad()
    def warm_up(self) -> None:
        """One pass of each part."""
        chunk = self.first_chunk(self.prompts(""))
        self.passed([chunk])

    @abstractmethod
    def first_chunk(self, text: Tensor) -> Chunk:
        """A chunk from a black frame, for warming up."""

    def solver(self) -> Any:
        """A scheduler at its first step, for one chunk."""
        return copy.deepcopy(self._solver)

    def _recondition(self, item: StageItem) -> VideoJob:
        arrays = item.inputs["observation"].arrays if "observation" in item.inputs else {}
        if "image" not in arrays:
            raise InvalidInput("recondition needs the observation 'image': uint8[n, h, w, 3]")
        first = int(item.params.get("first_step", item.step))
        images, most = self._images(arrays["image"]), self.shape.frames
        if not 0 < len(images) <= most:
            raise InvalidInput(f"{len(images)} frames at once, between 1 and {most} can be observed")
        executed = self._actions("executed", arrays.get("executed", np.zeros((0, self.shape.action_dim), np.float32)))
        job = VideoJob(item)
        job.observed = observe(item.state, self.shape.context, first, images, len(executed))
        return job

    def _predict(self, item: StageItem) -> VideoJob:
        count = int(item.params.get("frames", 0) or item.params.get("steps", 0))
        actions = None
        if "actions" in item.inputs:
            actions = self._actions("actions", item.inputs["actions"].arrays["actions"])
            count = count or len(actions)
            if count > len(actions):
                raise InvalidInput(f"{count} frames asked for with {len(actions)} actions: each leads to one frame")
            actions = actions[:count]
        elif self.shape.steers:
            raise InvalidInput(f"predict needs the 'actions' to predict under: float32[n, {self.shape.action_dim}]")
        if not 0 < count <= self.shape.most:
            raise InvalidInput(f"{count} frames asked for, between 1 and {self.shape.most} can be predicted")
        if self.shape.steers and count % self.shape.ratio:
            raise InvalidInput(
                f"{count} actions: a latent frame takes {self.shape.ratio}, so send a multiple of {self.shape.ratio}"
            )
        return VideoJob(item, count, actions if self.shape.steers else None)

    def _actions(self, name: str, array: Any) -> Tensor:
        actions, width = owned(array), self.shape.action_dim
        if actions.ndim != 2 or actions.shape[1] != width:
            raise TensorError(f"{name!r} has shape {list(actions.shape)}, expected [n, {width}]")
        return actions.to(self.device, torch.float32)

    def _images(self, array: Any) -> list[Tensor]:
        """Images as the models see them: ``[3, h, w]`` in -1..1."""
        images, want = owned(array), (self.shape.height, self.shape.width, 3)
        if images.dtype != torch.uint8 or images.ndim != 4 or tuple(images.shape[1:]) != want:
            raise TensorError(f"'image' is {images.dtype} {list(images.shape)}, expected uint8 {['n', *want]}")
        floats = 2.0 * (images.to(self.device).float() / 255.0) - 1.0
        return list(floats.permute(0, 3, 1, 2).to(self.pipe.vae.dtype).unbind())


def owned(array: Any) -> Tensor:
    """``array`` as a tensor. What came over the wire is a read-only view of a message: torch wants its own."""
    if isinstance(array, np.ndarray) and not array.flags.writeable:
        array = array.copy()
    return torch.as_tensor(array)


def to_uint8(frames: Tensor) -> Tensor:
    """Frames ``[n, 3, h, w]`` in -1..1 to ``uint8[n, h, w, 3]``, rounded as diffusers does for images."""
    return (((frames.float() / 2 + 0.5).clamp(0, 1)) * 255).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous()


def dtype_of(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise ConfigError(f"dtype is {name!r}.{nearest(name, DTYPES)}")
    return getattr(torch, name)


def text_folder(folder: Folder, text_encoder: str) -> Folder:
    """Where the text encoder and its tokenizer are."""
    return Folder(text_encoder, part_of=folder) if text_encoder else folder
