"""Train the frame codec, its readout and its tokenizer together."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from omni_loop.training.demos import Demos
from omni_loop.training.optim import Average, Optimiser, cosine
from omni_loop.training.recipe import Recipe, TrainContext, Trained, Trainer, begin

from ..codec import CodecConfig, FrameCodec, to_float

Draw = Callable[[], tuple[Tensor, Tensor]]  # frames [b, 3, h, w] and the points they show [b, p, 2]

TABLE_HALF = 256.0  # px of the 512 px table per unit of a scene point


class CodecRecipe(Recipe):
    """``scene_weight`` pulls poses into the latents; ``pose_share`` is the part of single drawn scenes;
    ``decoder_steps`` follow with all but the decoder frozen."""

    model: CodecConfig = CodecConfig()
    scene_weight: float = 2.0
    token_weight: float = 0.3
    pose_share: float = 0.35
    latent_noise: float = 0.02
    ema: float = 0.998
    decoder_steps: int = 0
    decoder_lr: float = 1e-3


def _sampler(demos: Demos, share: float, rng: np.random.Generator, batch: int) -> Draw:
    poses = demos.rows(demos.episodes("poses", framed=True))
    rest = demos.rows(demos.episodes("expert", "perturbed", "random", framed=True))
    n = int(batch * share)

    def draw() -> tuple[Tensor, Tensor]:
        rows = np.sort(np.concatenate([rng.choice(poses, n), rng.choice(rest, batch - n)]))
        return to_float(torch.from_numpy(demos.frames[rows])), torch.from_numpy(demos.points[rows])

    return draw


def _losses(model: FrameCodec, x: Tensor, points: Tensor, recipe: CodecRecipe) -> dict[str, Tensor]:
    with torch.autocast(x.device.type, torch.bfloat16):
        z = model.encode(x)
        noisy = z + recipe.latent_noise * torch.randn_like(z)
        y = model.decode(noisy).float()
        scene = model.readout(noisy)
        fixed = z.detach()
        values, _ = model.tokenizer.quantise(fixed)
        coarse = model.tokenizer.decoder(values)
    # Anything that is not white table weighs more: agent, T and goal are a tenth of the pixels.
    weight = 1 + 3 * (x.mean(1, keepdim=True) < 0.95).float()
    error = (y - x) ** 2 + 0.1 * (y - x).abs()
    from_tokens = model.tokenizer.pose(values.flatten(1)).view_as(points)
    return {
        "image": (weight * error).mean(),
        "scene": (scene - points).abs().mean(),
        "token": F.mse_loss(coarse.float(), fixed.float()),
        "token_scene": (from_tokens - points).abs().mean(),
        "size": z.float().pow(2).mean(),
    }


@torch.no_grad()
def evaluate(model: FrameCodec, demos: Demos, stride: int = 3) -> dict[str, float]:
    """Reconstruction in dB (of the mean error), readout error in table pixels, on unseen frames."""
    out: dict[str, float] = {}
    for name, kinds in (("episodes", ("expert", "perturbed", "random")), ("poses", ("poses",))):
        rows = demos.rows(demos.episodes(*kinds, framed=True))[::stride]
        square, scene, tokens, near = [], [], [], []
        for part in np.array_split(rows, max(1, len(rows) // 128)):
            x = to_float(torch.from_numpy(demos.frames[part]))
            points = torch.from_numpy(demos.points[part])
            z = model.encode(x)
            square.append((((model.decode(z).clamp(-1, 1) - x) / 2) ** 2).mean((1, 2, 3)))
            error = (model.scene(z) - points).abs()
            scene.append(error.mean((1, 2)))
            near.append(torch.from_numpy(demos.coverage[part] > 0.8))
            values, _ = model.tokenizer.quantise(z * model.latent_std + model.latent_mean)
            guess = model.tokenizer.pose(values.flatten(1)).view_as(points)
            tokens.append((guess - points).abs().mean((1, 2)))
        close = torch.cat(near)
        out[f"psnr_db_{name}"] = -10 * float(torch.cat(square).mean().log10())
        out[f"readout_px_{name}"] = TABLE_HALF * float(torch.cat(scene).mean())
        out[f"readout_px_{name}_near_goal"] = TABLE_HALF * float(torch.cat(scene)[close].mean())
        out[f"token_pose_px_{name}"] = TABLE_HALF * float(torch.cat(tokens).mean())
    return {k: round(v, 3) for k, v in out.items()}


@torch.no_grad()
def _normalise(model: FrameCodec, draw: Draw) -> None:
    z = torch.cat([model.encode(draw()[0]) for _ in range(20)])
    model.latent_mean.copy_(z.mean((0, 2, 3), keepdim=True))
    model.latent_std.copy_(z.std((0, 2, 3), keepdim=True))


def sharpen(model: FrameCodec, draw: Draw, recipe: CodecRecipe, log: Callable[[str], None]) -> FrameCodec:
    """Train the decoder alone for ``decoder_steps`` more: latents and all that reads them stay as they are."""
    model.requires_grad_(False)
    model.decoder.requires_grad_(True)
    optimiser = Optimiser(model.named_parameters(), recipe.decoder_lr)
    average = Average(model, recipe.ema)
    for step in range(recipe.decoder_steps):
        x, _ = draw()
        with torch.autocast(x.device.type, torch.bfloat16):
            with torch.no_grad():
                z = model.encode(x)
            y = model.decode(z + recipe.latent_noise * torch.randn_like(z)).float()
        loss = ((y - x) ** 2 + 0.02 * (y - x).abs()).mean()
        optimiser.step(loss, cosine(step, recipe.decoder_steps, 50, 0.01))
        average.update(model)
        if (step + 1) % 100 == 0:
            log(f"decoder step {step + 1}/{recipe.decoder_steps} image {loss.item():.5f}")
    return average.module


def train(recipe: CodecRecipe, context: TrainContext) -> Trained:
    """Train from scratch; see configs/train for the shipped recipe."""
    begin(recipe)
    draw = _sampler(context.train, recipe.pose_share, np.random.default_rng(recipe.seed), recipe.batch)
    model = FrameCodec(recipe.model)
    optimiser = Optimiser(model.named_parameters(), recipe.lr)
    average = Average(model, recipe.ema)
    weights = {
        "image": 1.0,
        "scene": recipe.scene_weight,
        "token": recipe.token_weight,
        "token_scene": recipe.token_weight,
        "size": 1e-3,
    }
    for step in range(recipe.steps):
        x, points = draw()
        losses = _losses(model, x, points, recipe)
        total = torch.stack([weights[k] * v for k, v in losses.items()]).sum()
        optimiser.step(total, cosine(step, recipe.steps, 100, 0.01))
        average.update(model)
        if (step + 1) % 100 == 0:
            shown = " ".join(f"{k} {v.item():.4f}" for k, v in losses.items())
            context.log(f"step {step + 1}/{recipe.steps} {shown}")
    _normalise(average.module, draw)
    final = sharpen(average.module, draw, recipe, context.log) if recipe.decoder_steps else average.module
    metrics = evaluate(final, context.test)
    return Trained(
        "codec",
        recipe.model.model_dump(mode="json"),
        final.state_dict(),
        metrics,
        "96 x 96 frames; the readout and the tokenizer see the latents only",
        "frames of expert, perturbed and random episodes and of drawn scenes",
    )


#: Seeds differ by less than this.
SPREAD = {"psnr_db_episodes": -1.5, "readout_px_episodes": 1.0, "token_pose_px_episodes": 1.5}
TRAINER = Trainer(CodecRecipe, train, SPREAD)
