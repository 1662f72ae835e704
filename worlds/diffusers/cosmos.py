"""Cosmos Predict2 and Predict2.5 video-to-world (https://github.com/nvidia-cosmos/cosmos-predict2.5), as diffusers'
``Cosmos2VideoToWorldPipeline`` and ``Cosmos2_5_PredictBasePipeline`` compute it.

There is no memory but pixels: a chunk is conditioned on the last 1 or 5 frames, which become its first 1 or 2 latent
frames. Those are reconstructed, too; they are not shown again.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .folder import Folder, imported, ready
from .guard import Guardrail
from .prompts import Prompts, cosmos_embedder
from .shape import COSMOS2, COSMOS25, shape_of
from .stage import Chunk, VideoJob, VideoStage, dtype_of, text_folder

_CONDITION_SIGMA = 1e-4  # how noisy the model is told that conditioning frames are; both pipelines' default


class CosmosStage(VideoStage):
    """The stage of :func:`.template.cosmos`, which has the options' meaning."""

    def __init__(
        self,
        checkpoint: str,
        height: int = 704,
        width: int = 1280,
        frames: int = 93,
        context: int = 5,
        steps: int = 35,
        guidance: float = 7.0,
        fps: int = 16,
        dtype: str = "bfloat16",
        device: str = "cpu",
        negative_prompt: str = "",
        text_encoder: str = "",
        text_length: int = 512,
        prompts: int = 16,
        action_dim: int = 1,
        history: int = 0,
        guardrail: bool = True,
    ) -> None:
        folder = Folder(checkpoint)
        self._old = folder.kind((COSMOS2, COSMOS25)) == COSMOS2
        shape = replace(shape_of(folder, height, width, frames, context, action_dim), history=history)
        text = text_folder(folder, text_encoder)
        pipe = _pipeline(folder, text, shape.steers, dtype_of(dtype), device)
        guard = self._guard = Guardrail(device) if guardrail else None
        embed = Prompts(cosmos_embedder(pipe, text_length, device, guard), prompts)
        super().__init__(shape, pipe, _schedule(pipe, steps, self._old, device), embed, guidance, device)
        self.fps = fps
        self.revision = folder.revision(text, f"{steps} {guidance} {negative_prompt} {text_length} {dtype} {shape}")
        self._negative = self._negative_text(negative_prompt, text_length) if guidance > 1 else None

    @torch.no_grad()
    def _negative_text(self, prompt: str, length: int) -> Tensor:
        return self.pipe.encode_prompt(
            prompt=None,
            prompt_embeds=self.prompts(""),
            negative_prompt=prompt or None,
            do_classifier_free_guidance=True,
            max_sequence_length=length,
            device=self.device,
            dtype=self.pipe.transformer.dtype,
        )[1]

    def encode(self, job: VideoJob) -> Chunk:
        known, context = job.last, self.shape.context
        frames = known[-context:] if len(known) >= context else known[-1:]
        frames = [frame.to(self.device) for frame in frames]
        return self._chunk(frames, job.count, self.prompts(job.item.prompt), job.generator, job.actions)

    def first_chunk(self, text: Tensor) -> Chunk:
        s = self.shape
        black = torch.full((3, s.height, s.width), -1.0, dtype=self.pipe.vae.dtype, device=self.device)
        actions = torch.zeros(s.ratio, s.action_dim, device=self.device) if s.steers else None
        return self._chunk([black], s.ratio, text, torch.Generator().manual_seed(0), actions)

    def _chunk(
        self, frames: Sequence[Tensor], count: int, text: Tensor, generator: torch.Generator, actions: Tensor | None
    ) -> Chunk:
        s, pipe = self.shape, self.pipe
        # An unsteered chunk always is as long as the model was trained for: a frame does not depend on how many follow.
        length = (s.context + count - 1) // s.ratio + 1 if s.steers else s.latent_frames
        size = (
            1,
            pipe.vae.config.z_dim,
            length,
            *(side // pipe.vae_scale_factor_spatial for side in (s.height, s.width)),
        )
        posterior = pipe.vae.encode(torch.stack(list(frames), 1)[None].to(pipe.vae.dtype)).latent_dist
        # Noise is drawn in the order and the shapes of the pipelines, so that one generator means one video.
        real = self._sampled(posterior, size, generator) if self._old else posterior.mode()
        real = self._scaled(real.float())
        latents = _noise(size, generator, self.device, torch.float32)
        if self._old:
            latents = latents * pipe.scheduler.config.sigma_max
        known = torch.zeros(1, 1, length, 1, 1, device=self.device)
        known[:, :, : real.shape[2]] = 1.0
        condition = torch.zeros(size, device=self.device)
        condition[:, :, : real.shape[2]] = real
        given = {"known": known, "condition": condition, "velocity": (latents - condition) * known}
        if actions is not None:
            given["actions"] = actions[None]
        return Chunk(latents, self.solver(), text, given)

    def group(self, chunk: Chunk) -> Hashable:
        return tuple(chunk.latents.shape)

    def passed(self, chunks: Sequence[Chunk]) -> Tensor:
        latents = torch.cat([chunk.latents for chunk in chunks])
        known, condition = (torch.cat([chunk.given[name] for chunk in chunks]) for name in ("known", "condition"))
        sigma = torch.stack([chunk.sigma for chunk in chunks]).to(self.device, torch.float32).view(-1, 1, 1, 1, 1)
        predict = self._predicted_2 if self._old else self._predicted_25
        output = predict(chunks, latents, known, condition, sigma, torch.cat([chunk.text for chunk in chunks]))
        if self._negative is not None:
            negative = self._negative.expand(len(chunks), -1, -1)
            without = predict(chunks, latents, known, condition, sigma, negative)
            output = output + self.guidance * (output - without)
        return (latents - output) / sigma if self._old else output

    def _predicted_25(
        self, chunks: Sequence[Chunk], latents: Tensor, known: Tensor, condition: Tensor, sigma: Tensor, text: Tensor
    ) -> Tensor:
        """The velocity of rectified flow; that of the conditioning frames is known."""
        dtype = self.pipe.transformer.dtype
        mask = known.expand(-1, -1, -1, *latents.shape[3:]).to(dtype)
        # Transformers that read actions were trained with one time for all frames.
        told = -1.0 if self.shape.steers else _CONDITION_SIGMA
        time = known * told + (1 - known) * sigma if told >= 0 else sigma.expand_as(known)
        seen = (mask * condition + (1 - mask) * latents).to(dtype)
        given = {"action": torch.cat([chunk.given["actions"] for chunk in chunks])} if self.shape.steers else {}
        output = self._transformed(seen, time, text, mask, **given)
        velocity = torch.cat([chunk.given["velocity"] for chunk in chunks])
        return velocity + output * (1 - mask)

    def _predicted_2(
        self, chunks: Sequence[Chunk], latents: Tensor, known: Tensor, condition: Tensor, sigma: Tensor, text: Tensor
    ) -> Tensor:
        """The clean latents, in the preconditioning of EDM (https://arxiv.org/abs/2206.00364)."""
        dtype = self.pipe.transformer.dtype
        mask = known.expand(-1, -1, -1, *latents.shape[3:]).to(dtype)
        time = sigma / (sigma + 1)
        told = torch.tensor(_CONDITION_SIGMA, dtype=torch.float32, device=self.device)
        seen = (known * condition + (1 - known) * (latents * (1 - time))).to(dtype)
        times = (known * (told / (told + 1)) + (1 - known) * time).to(dtype)
        output = self._transformed(seen, times, text, mask, fps=self.fps)
        clean = ((1 - time) * latents - time * output.float()).to(dtype)
        return known * condition + (1 - known) * clean

    def _transformed(self, latents: Tensor, time: Tensor, text: Tensor, mask: Tensor, **more: Any) -> Tensor:
        padding = latents.new_zeros(1, 1, self.shape.height, self.shape.width)
        return self.pipe.transformer(
            hidden_states=latents,
            timestep=time,
            encoder_hidden_states=text,
            condition_mask=mask,
            padding_mask=padding,
            return_dict=False,
            **more,
        )[0]

    def decode(self, job: VideoJob) -> None:
        assert job.chunk is not None
        video = self.pipe.vae.decode(self._unscaled(job.chunk.latents).to(self.pipe.vae.dtype), return_dict=False)[0][0]
        known = (int(job.chunk.given["known"].sum()) - 1) * self.shape.ratio + 1
        video = video[:, known : known + job.count]
        job.made.extend((video if self._guard is None else self._guard.checked(video)).unbind(1))

    def _sampled(self, posterior: Any, size: tuple[int, ...], generator: torch.Generator) -> Tensor:
        noise = _noise(size, generator, self.device, posterior.parameters.dtype)
        return posterior.mean + posterior.std * noise[:, :, : posterior.mean.shape[2]]

    def _scaled(self, latents: Tensor) -> Tensor:
        mean, std = self._statistics()
        if self._old:
            return (latents - mean) / std * self.pipe.scheduler.config.sigma_data
        return (latents - mean) * (1.0 / std)

    def _unscaled(self, latents: Tensor) -> Tensor:
        mean, std = self._statistics()
        if self._old:
            return latents * std / self.pipe.scheduler.config.sigma_data + mean
        return latents / (1.0 / std) + mean

    def _statistics(self) -> tuple[Tensor, Tensor]:
        config = self.pipe.vae.config
        mean, std = (
            torch.tensor(values, device=self.device).view(1, -1, 1, 1, 1)
            for values in (config.latents_mean, config.latents_std)
        )
        return mean, std


def _noise(size: tuple[int, ...], generator: torch.Generator, device: str, dtype: torch.dtype) -> Tensor:
    from diffusers.utils.torch_utils import randn_tensor

    return randn_tensor(size, generator=generator, device=torch.device(device), dtype=dtype)


def _pipeline(folder: Folder, text: Folder, steers: bool, dtype: torch.dtype, device: str) -> Any:
    for library in ("torchvision", "transformers"):  # diffusers itself says less well what is missing
        imported(library)
    kind = getattr(imported("diffusers"), folder.kind((COSMOS2, COSMOS25)))
    if steers:
        from .actions import ActionCosmosTransformer3DModel

        options = {"torch_dtype": dtype, "use_safetensors": True}
        transformer = ready(folder.load_as(ActionCosmosTransformer3DModel, "transformer", **options), device)
    else:
        transformer = folder.weights("transformer", dtype, device)
    return kind(
        text_encoder=text.weights("text_encoder", dtype, device),
        tokenizer=text.load("tokenizer"),
        transformer=transformer,
        vae=folder.weights("vae", dtype, device),
        scheduler=folder.load("scheduler"),
        safety_checker=_Elsewhere(),
    )


class _Elsewhere:
    """The pipelines insist on a guardrail object at their construction; the stage does that itself."""


def _schedule(pipe: Any, steps: int, old: bool, device: str) -> Any:
    """The pipeline's scheduler with its times set as the pipeline sets them."""
    scheduler = copy.deepcopy(pipe.scheduler)
    if not old:
        scheduler.set_timesteps(steps, device=device)
        return scheduler
    scheduler.set_timesteps(sigmas=torch.linspace(0, 1, steps, dtype=torch.float64), device=device)
    if scheduler.config.final_sigmas_type == "sigma_min":
        scheduler.sigmas[-1] = scheduler.sigmas[-2]
    return scheduler
