"""Train the causal DiT on codec latents of demonstrations."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from omni_loop.training.checkpoint import revision
from omni_loop.training.demos import Demos
from omni_loop.training.optim import Average, Optimiser, trapezoid
from omni_loop.training.recipe import Recipe, TrainContext, Trained, Trainer, begin

from ..codec import FrameCodec
from ..context.perceive import Seen, load_codec, perceive
from ..dit import DiT, DiTConfig
from ..quality import Quality, Windows, summarise


class WorldRecipe(Recipe):
    """``moving`` weighs tokens that change; ``scene_weight`` scores predicted latents by the readout;
    from ``drift_from`` (part of the steps) on, context frames are the model's own predictions."""

    model: DiTConfig = DiTConfig()
    frames: int = 8
    muon_lr: float = 0.02
    moving: float = 2.0
    scene_weight: float = 2.0
    scene_frames: int = 2
    first_frame: float = 0.2  # part of the sequences that begin without a past
    drift_from: float = 0.5
    drift_share: float = 0.6
    context_noise: float = 0.12
    ema: float = 0.998
    random_share: float = 0.35  # part of the sequences drawn from random pushes


class Sequences:
    """Windows of consecutive frames: latents ``[b, f + 1, p, c]``, actions ``[b, f, 2]``, points."""

    def __init__(self, seen: Seen, demos: Demos, frames: int, random_share: float) -> None:
        self._seen, self._frames, self._share = seen, frames, random_share
        self._starts = {
            name: np.concatenate(
                [
                    np.arange(demos.start[e], demos.start[e] + demos.length[e] - frames)
                    for e in demos.episodes(*kinds, framed=True)
                ]
            )
            for name, kinds in (("skilled", ("expert", "perturbed")), ("random", ("random",)))
        }

    def draw(self, rng: np.random.Generator, batch: int) -> tuple[Tensor, Tensor, Tensor]:
        n = int(batch * self._share)
        starts = np.concatenate([rng.choice(self._starts["random"], n), rng.choice(self._starts["skilled"], batch - n)])
        ix = torch.from_numpy(starts)[:, None] + torch.arange(self._frames + 1)
        return self._seen.latents[ix].float(), self._seen.action[ix[:, :-1]], self._seen.points[ix[:, 1:]]


class WorldLoss:
    """One training step's loss; holds what does not change between steps."""

    def __init__(self, recipe: WorldRecipe, codec: FrameCodec) -> None:
        f = recipe.frames
        self.recipe, self.codec = recipe, codec
        self.position = torch.cat([torch.arange(f)] * 2)

    def _pass(
        self, model: DiT, clean: Tensor, prev: Tensor, noisy: Tensor, levels: Tensor, action: Tensor, known: Tensor
    ) -> Tensor:
        """Predicted clean latents of the noisy stream ``[b, f, p, c]``."""
        f = self.recipe.frames
        with torch.autocast("cpu", torch.bfloat16):
            out = model.streams(
                torch.cat([clean, noisy], 1),
                torch.cat([prev, prev], 1),
                levels,
                torch.cat([action, action], 1),
                torch.cat([known, known], 1),
                self.position,
            )[:, f:]
        return prev + out.float()

    @torch.no_grad()
    def _drift(self, model: DiT, clean: Tensor, first: Tensor, action: Tensor, known: Tensor, rounds: int) -> Tensor:
        """Replace context frames by the model's own one-step predictions, ``rounds`` times over."""
        b, f = known.shape
        levels = torch.cat([torch.zeros(b, f), torch.ones(b, f)], 1)
        context = clean
        for _ in range(rounds):
            prev = torch.cat([first, context[:, :-1]], 1)
            guess = self._pass(model, context, prev, torch.randn_like(clean), levels, action, known)
            imagined = (torch.rand(b, 1) * f).ceil() <= torch.arange(f)  # a suffix is imagined
            context = torch.where(imagined[..., None, None], guess, clean)
        return context

    def __call__(self, model: DiT, z: Tensor, action: Tensor, points: Tensor, drift: bool) -> dict[str, Tensor]:
        r = self.recipe
        x, first = z[:, 1:], z[:, :1]
        b, f, p, c = x.shape
        known = torch.rand(b, f) > 0.03
        starts = torch.rand(b) < r.first_frame
        first = torch.where(starts[:, None, None, None], x[:, :1], first)
        known[:, 0] &= ~starts
        context = self._drift(model, x, first, action, known, int(torch.randint(1, 4, ()))) if drift else x
        soft = torch.where(torch.rand(b, 1) < 0.5, 0.0, torch.rand(b, f) * r.context_noise)
        clean = (1 - soft[..., None, None]) * context + soft[..., None, None] * torch.randn_like(x)
        prev = torch.cat([first, clean[:, :-1]], 1)
        u = torch.sigmoid(torch.randn(b, f) + 0.6)
        u = torch.where(torch.rand(b, f) < 0.35, 1.0, u).clamp_min(0.02)
        noisy = (1 - u[..., None, None]) * x + u[..., None, None] * torch.randn_like(x)
        guess = self._pass(model, clean, prev, noisy, torch.cat([soft, u], 1), action, known)
        change = (x - torch.cat([z[:, :1], x[:, :-1]], 1)).pow(2).mean(-1, keepdim=True).sqrt()
        weight = 1 + r.moving * change.clamp_max(1)
        error = ((guess - x).pow(2) * weight).mean((2, 3)) / (u**2 + 0.15)
        keep = torch.ones(b, f)
        keep[:, 0] = (~starts).float()  # a first frame is its own past: nothing to predict
        losses = {"latent": (error * keep).sum() / keep.sum()}
        at = torch.randint(1, f, (r.scene_frames,))
        with torch.autocast("cpu", torch.bfloat16):
            seen = self.codec.scene(self.codec.unpatchify(guess[:, at].reshape(-1, p, c)))
        miss = (seen.view(b, len(at), -1, 2) - points[:, at]).abs().mean((2, 3))
        losses["scene"] = (miss / (u[:, at] + 0.3)).mean()
        return losses


def train(recipe: WorldRecipe, context: TrainContext) -> Trained:
    """Train from scratch on the shipped codec's latents."""
    begin(recipe)
    rng = np.random.default_rng(recipe.seed)
    codec = load_codec(context.checkpoints / "codec")
    seen = perceive(codec, revision(context.checkpoints / "codec"), context.train, context.log)
    data = Sequences(seen, context.train, recipe.frames, recipe.random_share)
    model = DiT(recipe.model)
    optimiser = Optimiser(
        model.named_parameters(), recipe.lr, betas=(0.9, 0.95), muon=("blocks.",), muon_lr=recipe.muon_lr
    )
    average, loss_of, sums = Average(model, recipe.ema), WorldLoss(recipe, codec), {"latent": 0.0, "scene": 0.0}
    for step in range(recipe.steps):
        drift = step >= recipe.drift_from * recipe.steps and rng.random() < recipe.drift_share
        losses = loss_of(model, *data.draw(rng, recipe.batch), drift=drift)
        optimiser.step(losses["latent"] + recipe.scene_weight * losses["scene"], trapezoid(step, recipe.steps, 50))
        average.update(model)
        sums = {k: v + losses[k].item() for k, v in sums.items()}
        if (step + 1) % 100 == 0:
            shown = " ".join(f"{k} {v / 100:.4f}" for k, v in sums.items())
            context.log(f"step {step + 1}/{recipe.steps} {shown} {context.spent()['wall_minutes']} min")
            sums = dict.fromkeys(sums, 0.0)
    return Trained(
        "world",
        recipe.model.model_dump(mode="json"),
        average.module.state_dict(),
        summarise(Quality(codec, average.module, Windows.of(context.test, 29))),
        "96 x 96 frames and executed actions",
        "frames of expert, perturbed and random episodes",
    )


#: Seeds differ by less than this.
SPREAD = {
    "one_step_gain_db": -0.3,
    "shuffled_action_ratio": -4.0,
    "iou_1": -0.03,
    "iou_8": -0.05,
    "worst_gain_to_16_db": -0.6,
}
TRAINER = Trainer(WorldRecipe, train, SPREAD)
