"""Wan 2.1 and 2.2 image-to-video (https://github.com/Wan-Video/Wan2.2), as diffusers' ``WanImageToVideoPipeline``
computes it.

The last frame becomes a chunk of latents in one run of the sampler. What of it has been shown, and what is still to
be, is the session's state: a Predict decodes as many latent frames as it needs and keeps the frames left over, so that
two Predicts of two frames are one of four. When a chunk is used up, its last frame begins the next one.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from omni_loop.stage import CounterSpec, Job, Outputs, RingSpec, StageItem, StateSpec, StateView, TensorSpec

from .folder import Folder, imported
from .prompts import Prompts, wan_embedder
from .shape import WAN, shape_of
from .stage import Chunk, VideoJob, VideoStage, dtype_of, text_folder, to_uint8
from .vae_stream import Stream, cache_specs, commit, restored


class WanJob(VideoJob):
    """``latents`` are those of the chunk being shown, ready to be decoded; ``left`` its frames that are not wanted
    yet."""

    def __init__(self, item: StageItem, count: int, latents: Tensor | None, stream: Stream | None) -> None:
        super().__init__(item, count)
        self.latents, self.stream = latents, stream
        self.left: list[Tensor] = []
        self.fresh = False  # whether the latents are this tick's
        self._told = 0  # frames that parts have shown

    def show(self, frames: Sequence[Tensor]) -> None:
        wanted = self.count - len(self.made)
        self.made.extend(frames[:wanted])
        self.left = list(frames[wanted:])

    def part(self) -> Outputs | None:
        """The frames since the last call."""
        first, self._told = self._told, len(self.made)
        return self.outputs(first) if self._told > first else None


class WanStage(VideoStage):
    """The stage of :func:`.template.wan`, which has the options' meaning."""

    def __init__(
        self,
        checkpoint: str,
        height: int = 480,
        width: int = 832,
        frames: int = 81,
        steps: int = 50,
        guidance: float = 5.0,
        guidance_2: float = 0.0,
        dtype: str = "bfloat16",
        device: str = "cpu",
        negative_prompt: str = "",
        text_encoder: str = "",
        text_length: int = 512,
        prompts: int = 16,
        action_dim: int = 1,
    ) -> None:
        folder = Folder(checkpoint)
        folder.kind((WAN,))
        shape = shape_of(folder, height, width, frames, 1, action_dim)
        text = text_folder(folder, text_encoder)
        pipe = _pipeline(folder, text, dtype_of(dtype), device)
        solver = copy.deepcopy(pipe.scheduler)
        solver.set_timesteps(steps, device=device)
        embed = Prompts(wan_embedder(pipe, text_length, device), prompts)
        super().__init__(shape, pipe, solver, embed, guidance, device)
        self._guidance_2 = guidance_2 or guidance
        ratio = pipe.config.boundary_ratio
        self._boundary = None if ratio is None else ratio * pipe.scheduler.config.num_train_timesteps
        self._size = tuple(side // pipe.vae_scale_factor_spatial for side in (height, width))
        self._caches = cache_specs(pipe.vae, *self._size)
        self._negative = self._embedded(negative_prompt) if guidance > 1 else None
        self.revision = folder.revision(
            text, f"{steps} {guidance} {guidance_2} {negative_prompt} {text_length} {dtype} {shape}"
        )

    @torch.no_grad()
    def _embedded(self, prompt: str) -> Tensor:
        return self.prompts(prompt)

    def state_specs(self) -> Mapping[str, StateSpec]:
        s, vae = self.shape, self.pipe.vae
        dtype = str(vae.dtype).removeprefix("torch.")
        return {
            **super().state_specs(),
            **self._caches,
            "latents": TensorSpec((vae.config.z_dim, s.latent_frames, *self._size), dtype),
            "left": RingSpec((3, s.height, s.width), s.ratio, dtype),
            "decoded": CounterSpec(),  # latent frames of the chunk; 0: there is none
        }

    def begin(self, item: StageItem) -> VideoJob:
        job = super().begin(item)
        if job.observed is not None:
            return job
        state = item.state
        latents, stream = None, None
        if decoded := state.counter("decoded").get():
            latents = state.tensor("latents").get()[None].to(self.device)
            stream = restored(self.pipe.vae, state, tuple(self._caches), decoded)
        made = WanJob(item, job.count, latents, stream)
        made.show([frame.to(self.device) for frame in state.ring("left").items()])
        return made

    def _alone(self, job: VideoJob) -> None:
        assert isinstance(job, WanJob)
        if job.chunk is not None:  # the sampler is done
            job.latents, job.stream, job.fresh = self._unscaled(job.chunk), Stream(self.pipe.vae), True
            job.chunk = None
        if job.stream is not None and job.stream.count < self.shape.latent_frames:
            self.decode(job)
        else:
            job.chunk = self.encode(job)

    def decode(self, job: VideoJob) -> None:
        """One latent frame more; with the first, which shows what is known, the second."""
        assert isinstance(job, WanJob)
        assert job.stream is not None
        assert job.latents is not None
        if job.stream.count == 0:
            job.stream.decode(job.latents[:, :, :1])
        at = job.stream.count
        job.show(job.stream.decode(job.latents[:, :, at : at + 1])[0].unbind(1))

    def finish(self, job: Job) -> Outputs:
        outputs = super().finish(job)
        state = job.item.state  # type: ignore[attr-defined]
        left = state.ring("left")
        left.clear()
        if isinstance(job, WanJob) and job.stream is not None:
            self._keep(job, state)
        else:
            state.counter("decoded").set(0)
        return outputs

    def parts(self, job: Job) -> Sequence[Outputs]:
        """Each latent frame's frames as soon as they are decoded."""
        part = job.part() if isinstance(job, WanJob) else None
        return () if part is None else (part,)

    def _keep(self, job: WanJob, state: StateView) -> None:
        assert job.stream is not None
        for frame in job.left:
            state.ring("left").push(frame)
        if job.fresh and job.latents is not None:
            state.tensor("latents").set(job.latents[0])
        if job.stream.count != state.counter("decoded").get() or job.fresh:
            commit(job.stream, state, tuple(self._caches))
            state.counter("decoded").set(job.stream.count)

    def encode(self, job: VideoJob) -> Chunk:
        return self._chunk(job.last[-1].to(self.device), self.prompts(job.item.prompt), job.generator)

    def first_chunk(self, text: Tensor) -> Chunk:
        s = self.shape
        black = torch.full((3, s.height, s.width), -1.0, dtype=self.pipe.vae.dtype, device=self.device)
        return self._chunk(black, text, torch.Generator().manual_seed(0))

    def _chunk(self, frame: Tensor, text: Tensor, generator: torch.Generator) -> Chunk:
        s, pipe = self.shape, self.pipe
        latents, condition, *mask = pipe.prepare_latents(
            frame[None].float(),
            1,
            pipe.vae.config.z_dim,
            s.height,
            s.width,
            s.frames,
            torch.float32,
            torch.device(self.device),
            generator,
        )
        given = {"condition": condition}
        if mask:
            given["free"] = mask[0]
        if pipe.transformer is not None and pipe.transformer.config.image_dim is not None:
            from PIL import Image

            image = Image.fromarray(to_uint8(frame[None])[0].cpu().numpy())
            given["image"] = pipe.encode_image(image, self.device).to(self._dtype)
        return Chunk(latents, self.solver(), text, given)

    @property
    def _dtype(self) -> torch.dtype:
        return (self.pipe.transformer or self.pipe.transformer_2).dtype

    def _late(self, chunk: Chunk) -> bool:
        """Whether the step is one of the low-noise model's."""
        return self._boundary is not None and bool(chunk.time < self._boundary)

    def group(self, chunk: Chunk) -> Hashable:
        return self._late(chunk)

    def passed(self, chunks: Sequence[Chunk]) -> Tensor:
        late = self._late(chunks[0])
        model = self.pipe.transformer_2 if late else self.pipe.transformer
        guidance = self._guidance_2 if late else self.guidance
        latents, condition = _joined(chunks, lambda c: c.latents), _joined(chunks, lambda c: c.given["condition"])
        times = torch.stack([chunk.time for chunk in chunks]).to(self.device)
        if "free" in chunks[0].given:  # Wan 2.2 5B tells the model the time of every token
            free = chunks[0].given["free"]
            seen = (1 - free) * condition + free * latents
            times = (free[0, 0, :, ::2, ::2].flatten() * times[:, None]).expand(len(chunks), -1)
        else:
            seen = torch.cat([latents, condition], dim=1)
        given = {
            "hidden_states": seen.to(self._dtype),
            "timestep": times,
            "encoder_hidden_states_image": _joined(chunks, lambda c: c.given["image"])
            if "image" in chunks[0].given
            else None,
            "return_dict": False,
        }
        output = model(encoder_hidden_states=_joined(chunks, lambda c: c.text), **given)[0]
        if self._negative is None:
            return output
        without = model(encoder_hidden_states=self._negative.expand(len(chunks), -1, -1), **given)[0]
        return without + guidance * (output - without)

    def _unscaled(self, chunk: Chunk) -> Tensor:
        """The latents as the decoder takes them."""
        config, latents = self.pipe.vae.config, chunk.latents
        if "free" in chunk.given:
            free = chunk.given["free"]
            latents = (1 - free) * chunk.given["condition"] + free * latents
        latents = latents.to(self.pipe.vae.dtype)
        mean, std = (
            torch.tensor(values).view(1, -1, 1, 1, 1).to(latents.device, latents.dtype)
            for values in (config.latents_mean, config.latents_std)
        )
        return latents / (1.0 / std) + mean


def _joined(chunks: Sequence[Chunk], part: Any) -> Tensor:
    return torch.cat([part(chunk) for chunk in chunks])


def _pipeline(folder: Folder, text: Folder, dtype: torch.dtype, device: str) -> Any:
    imported("transformers")  # diffusers itself says less well what is missing
    parts: dict[str, Any] = {
        "tokenizer": text.load("tokenizer"),
        "text_encoder": text.weights("text_encoder", dtype, device),
        "vae": folder.weights("vae", dtype, device),
        "scheduler": folder.load("scheduler"),
    }
    for name in ("transformer", "transformer_2", "image_encoder"):
        if folder.has(name):
            parts[name] = folder.weights(name, dtype, device)
    if folder.has("image_processor"):
        parts["image_processor"] = folder.load("image_processor")
    settings = {name: folder.setting(name) for name in ("boundary_ratio",) if folder.setting(name) is not None}
    expand = bool(folder.setting("expand_timesteps", False))
    return imported("diffusers").WanImageToVideoPipeline(**parts, **settings, expand_timesteps=expand)
