"""Train an instructed policy from scratch: reader of the instruction, eye and head together, on the experts' labels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from pydantic import model_validator
from torch import Tensor

from omni_loop.training.demos import Demos
from omni_loop.training.optim import Average, Optimiser, cosine
from omni_loop.training.recipe import Recipe, TrainContext, Trained, Trainer, begin

from .model import HeadConfig, Instructed, InstructedConfig
from .phrases import task
from .samples import Lessons, Samples, tasks_of, vocabulary
from .text import TextConfig
from .words import Vocabulary

_SMALLEST_SPREAD = 1e-2  # of a number of the state: what hardly moves is not blown up


class InstructedRecipe(Recipe):
    """``texts`` instructions a step. ``hold_share``: the part of them that ask for what a scene does not offer, or for
    none of the tasks; told so the policy learns to hold still, so that a scene alone never says what to do.
    ``state_noise`` in units of the spread, ``shift`` in pixels of the image. ``bfloat16``: convolutions are."""

    text: TextConfig = TextConfig()
    head: HeadConfig = HeadConfig()
    texts: int = 12
    hold_share: float = 0.15
    state_noise: float = 0.01
    shift: int = 2
    bfloat16: bool = False
    warmup: int = 200
    weight_decay: float = 1e-4
    ema: float = 0.999

    @model_validator(mode="after")
    def _rows_for_every_text(self) -> InstructedRecipe:
        if self.batch < self.texts:
            raise ValueError(f"batch: {self.batch} rows are less than one for each of {self.texts} texts")
        return self


def train(recipe: InstructedRecipe, context: TrainContext) -> Trained:
    """Figures in closed loop come from ``omni-loop eval``."""
    begin(recipe)
    rng = np.random.default_rng(recipe.seed)
    tasks = tasks_of(context.train)
    samples = _samples(recipe, context.train)
    lessons = Lessons(tasks, samples.task, recipe.texts, recipe.hold_share)
    model = _model(recipe, tasks, samples)
    optimiser = Optimiser(model.named_parameters(), recipe.lr, weight_decay=recipe.weight_decay)
    average, total = Average(model, recipe.ema), 0.0
    for step in range(recipe.steps):
        lesson = lessons.draw(recipe.batch, rng)
        at, kv = lesson.at, model.text(lesson.tokens)
        state, image = _noisy(samples.states(at), model, recipe), _shifted(samples.images(at), recipe.shift, rng)
        with torch.autocast("cpu", torch.bfloat16, enabled=recipe.bfloat16):
            known = model.known(state, image).float()
        chunk = samples.chunk(at)
        chunk[torch.from_numpy(lesson.holds)] = 0.0
        loss = _loss(model, (chunk - model.action_mean) / model.action_spread, samples.mask[at], known, kv)
        optimiser.step(loss, cosine(step, recipe.steps, recipe.warmup))
        average.update(model)
        total += loss.item()
        if (step + 1) % 250 == 0:
            context.log(
                f"step {step + 1}/{recipe.steps} loss {total / 250:.4f} {context.spent()['cpu_minutes']} CPU min"
            )
            total = 0.0
    trained = average.module
    names = ", ".join(tasks)
    return Trained(
        recipe.demos,
        trained.config.model_dump(mode="json"),
        trained.state_dict(),
        {"final_loss": round(loss.item(), 4), **_figures(trained, _samples(recipe, context.test), tasks)},
        ("the simulator's state" if trained.eye is None else "one 64 x 64 image and the gripper's state")
        + ", and the instruction in words",
        f"{len(samples.rows)} rows of successful expert and perturbed episodes of {names}",
    )


def _samples(recipe: InstructedRecipe, demos: Demos) -> Samples:
    head = recipe.head
    return Samples(demos, head.horizon, head.features, images=head.eye is not None)


def _model(recipe: InstructedRecipe, tasks: Sequence[str], samples: Samples) -> Instructed:
    text = recipe.text.model_copy(update={"words": vocabulary()})
    model = Instructed(InstructedConfig(tasks=tuple(tasks), text=text, head=recipe.head))
    state, label = samples.state[samples.rows], samples.label[samples.rows]
    with torch.no_grad():
        model.state_mean.copy_(state.mean(0))
        model.state_spread.copy_(state.std(0).clamp_min(_SMALLEST_SPREAD))
        model.action_mean.copy_(label.mean(0))
        model.action_spread.copy_(label.std(0).clamp_min(_SMALLEST_SPREAD))
    return model


def _noisy(state: Tensor, model: Instructed, recipe: InstructedRecipe) -> Tensor:
    return state + torch.randn_like(state) * recipe.state_noise * model.state_spread


def _shifted(images: Tensor | None, most: int, rng: np.random.Generator) -> Tensor | None:
    """Each of 16 groups of ``images uint8[b, h, w, 3]`` moved by up to ``most`` pixels, its border repeated."""
    if images is None or most == 0:
        return images
    h, w = images.shape[1:3]
    wide = F.pad(images.permute(0, 3, 1, 2).float(), (most,) * 4, mode="replicate").to(torch.uint8).permute(0, 2, 3, 1)
    moved = []
    for group in wide.tensor_split(16):
        y, x = rng.integers(0, 2 * most + 1, 2)
        moved.append(group[:, y : y + h, x : x + w])
    return torch.cat(moved)


def _loss(model: Instructed, chunk: Tensor, mask: Tensor, known: Tensor, kv: Tensor) -> Tensor:
    noise, t = torch.randn_like(chunk), torch.rand(len(chunk))
    if torch.rand(()) < 0.5:
        t = 1 - t**1.5
    x = (1 - t)[:, None, None] * noise + t[:, None, None] * chunk
    error = (model.velocity(x, t, known, kv) - (chunk - noise)).square().mean(-1) * mask
    return error.sum() / mask.sum()


@torch.no_grad()
def _figures(model: Instructed, samples: Samples, tasks: Sequence[str]) -> dict[str, float]:
    """On test episodes, told in words that were never learned from: mean error of the actions that would be executed,
    and mean motion where another scene's instruction is given, both in -1..1 of an action."""
    rng = np.random.default_rng(0)
    rows = rng.permutation(len(samples.rows))[:1024]
    own = samples.task[rows]
    elsewhere = [[j for j, b in enumerate(tasks) if not task(b).possible(task(a))] for a in tasks]
    right, error = _told(model, samples, rows, own, tasks), 0.0
    n = model.config.head.execution_horizon
    mask = samples.mask[rows][:, :n, None]
    error = float(((right - samples.chunk(rows)).abs()[:, :n] * mask).sum() / (mask.sum() * right.shape[-1]))
    figures = {"action_error": round(error, 4)}
    if all(elsewhere):
        wrong = np.array([rng.choice(elsewhere[i]) for i in own])
        moved = _told(model, samples, rows, wrong, tasks)[:, :n, :3].abs().mean()
        figures["motion_when_told_another_scenes_task"] = round(float(moved), 4)
    return figures


def _told(
    model: Instructed, samples: Samples, rows: NDArray[np.int64], told: NDArray[np.int64], tasks: Sequence[str]
) -> Tensor:
    """Chunks of actions for ``rows`` under held-out instructions for the tasks ``told``."""
    vocabulary, made = Vocabulary(model.config.text.words), []
    for at, which in zip(np.array_split(rows, 8), np.array_split(told, 8), strict=True):
        texts = [task(tasks[j]).held_out[i % len(task(tasks[j]).held_out)] for i, j in enumerate(which)]
        kv = model.text(torch.stack([vocabulary.tokens(text) for text in texts]))
        known = model.known(samples.states(at), samples.images(at))
        noise = torch.randn(len(at), model.config.head.horizon, model.config.head.action_dim)
        made.append(model.actions(model.sample(noise, known, kv)))
    return torch.cat(made)


#: Seeds differ by less than this.
SPREAD = {"action_error": 0.02, "motion_when_told_another_scenes_task": 0.02}
TRAINER = Trainer(InstructedRecipe, train, SPREAD)
