"""Train the action-chunk head on the experts' labels, reading the shipped context model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from omni_loop import registry
from omni_loop.training.demos import Demos
from omni_loop.training.optim import Average, Optimiser, cosine
from omni_loop.training.recipe import Recipe, TrainContext, Trained, Trainer, begin

from .flow import ActConfig, ActHead, features_of


class ContextReader(Protocol):
    """How the trainer gets context, from whoever registered it: the cache of the present tick
    ``float16[n, layers, 2, s, g, e]`` and the estimated scene ``float32[n, 9, 2]`` of every framed row."""

    def tick_kv(self, demos: Demos, log: Callable[[str], None]) -> tuple[Tensor, Tensor]: ...


class PolicyRecipe(Recipe):
    """``context_drop`` and ``history_drop`` are parts of the samples that go without, so that the head
    also works (and can be ablated) without them. Noise is in table pixels. ``name``: folder of the checkpoint."""

    name: str = "act"
    model: ActConfig = ActConfig()
    context: str = "context"
    framed_share: float = 0.5  # samples from framed episodes, which have a context
    context_drop: float = 0.25
    history_drop: float = 0.2
    shared_noise_px: float = 0.8
    point_noise_px: float = 0.8
    weight_decay: float = 1e-4
    ema: float = 0.999


class Samples:
    """Rows with their chunk ``[n, horizon, 2]`` relative to the agent, mask, features and context."""

    def __init__(self, demos: Demos, horizon: int) -> None:
        episodes = demos.episodes("expert", "perturbed", successful=True)
        self.rows = demos.rows(episodes)
        self.points = torch.from_numpy(demos.points)
        label, action = demos.label / 256 - 1, demos.action / 256 - 1
        self.label = torch.from_numpy(label).float()
        end = np.concatenate([np.full(demos.length[e], demos.start[e] + demos.length[e] - 1) for e in episodes])
        first = np.concatenate([np.full(demos.length[e], demos.start[e]) for e in episodes])
        has_action = self.rows < end  # an episode's last row has no action of its own
        self.rows, end, first = self.rows[has_action], end[has_action], first[has_action]
        self.before = torch.from_numpy(np.maximum(self.rows - 1, first))
        ahead = self.rows[:, None] + np.arange(horizon)
        valid = ahead < end[:, None]
        self.ahead = torch.from_numpy(np.minimum(ahead, end[:, None] - 1))
        # Labels behind a burst of noise answer to something the policy cannot foresee: they end the chunk.
        noisy = np.abs(label - action).max(1) > 1e-6
        foreseen = np.cumsum(noisy[self.ahead.numpy()], axis=1) - noisy[self.ahead.numpy()] == 0
        self.mask = torch.from_numpy(valid & foreseen).float()
        self.framed = np.flatnonzero(self.rows < len(demos.frames))

    def chunk(self, at: Tensor) -> Tensor:
        """Labels relative to the agent ``[b, horizon, 2]`` in -1..1 units."""
        return self.label[self.ahead[at]] - self.points[torch.from_numpy(self.rows)[at], 0][:, None]


def _loss(
    model: ActHead, chunk: Tensor, mask: Tensor, features: Tensor, history: Tensor, kv: Tensor, present: Tensor
) -> Tensor:
    noise, t = torch.randn_like(chunk), torch.rand(len(chunk))
    if torch.rand(()) < 0.5:
        t = 1 - t**1.5
    x = (1 - t)[:, None, None] * noise + t[:, None, None] * chunk
    error = (model.velocity(x, t, features, history, kv, present) - (chunk - noise)).square().mean(-1) * mask
    return error.sum() / mask.sum()


def train(recipe: PolicyRecipe, context: TrainContext) -> Trained:
    """Train from scratch; figures in closed loop come from ``omni-loop eval``."""
    begin(recipe)
    rng = np.random.default_rng(recipe.seed)
    reader: ContextReader = registry.load("omni_loop.context_readers", recipe.context)(context.checkpoints)
    kv, estimate = reader.tick_kv(context.train, context.log)
    context.log(f"context of {len(kv)} rows, {context.spent()}")
    samples = Samples(context.train, recipe.model.horizon)
    sample = samples.chunk(torch.arange(0, len(samples.rows), 7))
    config = recipe.model.model_copy(update={"scale": round(float(sample.std()), 5)})
    model = ActHead(config)
    optimiser = Optimiser(model.named_parameters(), recipe.lr, weight_decay=recipe.weight_decay)
    average, total, rows = Average(model, recipe.ema), 0.0, torch.from_numpy(samples.rows)
    n = int(recipe.batch * recipe.framed_share)
    none = torch.zeros(recipe.batch - n, *kv.shape[1:])
    for step in range(recipe.steps):
        framed = torch.from_numpy(rng.choice(samples.framed, n))
        at = torch.cat([framed, torch.from_numpy(rng.integers(0, len(rows), recipe.batch - n))])
        points = samples.points[rows[at]].clone()
        points[: n // 2, 1:] = estimate[rows[at[: n // 2]], 1:]  # half of the framed ones as the readout sees
        shared = torch.randn(recipe.batch, 1, 2) * recipe.shared_noise_px / 256
        keypoints = points[:, 1:] + shared + torch.randn(recipe.batch, 8, 2) * recipe.point_noise_px / 256
        history = (torch.rand(recipe.batch) >= recipe.history_drop).float()
        features = features_of(samples.points[samples.before[at], 0], points[:, 0], keypoints, history)
        present = torch.cat([(torch.rand(n) >= recipe.context_drop).float(), torch.zeros(recipe.batch - n)])
        seen = torch.cat([kv[rows[framed]].float(), none])
        loss = _loss(model, samples.chunk(at) / config.scale, samples.mask[at], features, history, seen, present)
        optimiser.step(loss, cosine(step, recipe.steps, 200))
        average.update(model)
        total += loss.item()
        if (step + 1) % 250 == 0:
            context.log(f"step {step + 1}/{recipe.steps} loss {total / 250:.4f} {context.spent()['wall_minutes']} min")
            total = 0.0
    return Trained(
        recipe.name,
        config.model_dump(mode="json"),
        average.module.state_dict(),
        {"final_loss": round(loss.item(), 4)},
        "agent position (before and now) and eight keypoints: given, or estimated from a 96 x 96 image",
        f"{len(samples.rows)} rows of successful expert and perturbed episodes",
    )


#: Seeds differ by less than this.
SPREAD = {"final_loss": 0.02}
TRAINER = Trainer(PolicyRecipe, train, SPREAD)
