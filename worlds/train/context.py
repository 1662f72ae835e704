"""Train the context model: next token over sessions of ticks, progress and done weighing most."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from omni_loop.training.checkpoint import revision
from omni_loop.training.demos import Demos
from omni_loop.training.optim import Average, Optimiser, cosine
from omni_loop.training.recipe import Recipe, TrainContext, Trained, Trainer, begin

from ..codec import FrameCodec
from ..context import layout
from ..context.decode import read_instruction, read_tick, slide
from ..context.llama import ContextConfig, ContextModel
from ..context.perceive import INSTRUCTION, STRIDE, Seen, load_codec, perceive, tokens_of

DONE_COVERAGE = 0.95  # the simulator's own threshold


class ContextRecipe(Recipe):
    """``ticks`` of 8 control steps a sequence; shares say where sequences end or come from."""

    model: ContextConfig = ContextConfig()
    ticks: int = 6
    stride: int = STRIDE
    muon_lr: float = 0.02
    end_share: float = 0.35  # sequences that end with the episode's last row
    pose_share: float = 0.2  # sequences of unrelated drawn scenes: what is seen must decide
    estimate_share: float = 0.7  # scenes as the readout estimates them, else the true ones
    progress_noise: float = 0.06
    instruction: str = INSTRUCTION
    ema: float = 0.998
    calibration_episodes: int = 120


def tick_rows(start: int, end: int, ticks: int, stride: int) -> NDArray[np.int64]:
    """Rows of up to ``ticks`` ticks that end at ``end``, ``stride`` apart, none before ``start``; -1 pads
    in front."""
    rows = np.arange(end, start - 1, -stride)[:ticks][::-1]
    return np.concatenate([np.full(ticks - len(rows), -1), rows])


class Sessions:
    """Draws batches of token sequences ``int64[b, 32 + 32 t]`` with their targets."""

    def __init__(self, seen: Seen, demos: Demos, recipe: ContextRecipe) -> None:
        self.seen, self.recipe = seen, recipe
        chosen = demos.episodes("expert", "perturbed", "random", framed=True)
        self._spans = [(int(demos.start[e]), int(demos.start[e] + demos.length[e] - 1)) for e in chosen]
        self._weights = np.array([b - a + 1 for a, b in self._spans], np.float64)
        self._weights /= self._weights.sum()
        self._won = [s for s, e in zip(self._spans, chosen, strict=True) if demos.success[e]]
        self._poses = demos.rows(demos.episodes("poses", framed=True))
        self._instruction = layout.instruction_tokens(recipe.instruction)

    def _rows(self, rng: np.random.Generator) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        r = self.recipe
        if rng.random() < r.pose_share:
            rows = rng.choice(self._poses, r.ticks)
            return rows, np.full(r.ticks, -1)
        if rng.random() < r.end_share and self._won:
            start, end = self._won[rng.integers(len(self._won))]
        else:
            start, last = self._spans[rng.choice(len(self._spans), p=self._weights)]
            end = int(rng.integers(start, last + 1))
        stride = r.stride if rng.random() < 0.7 else int(rng.integers(3, r.stride + 1))
        if end - start > r.ticks * stride or rng.random() < 0.5:
            rows = tick_rows(start, end, r.ticks, stride)
        else:  # from the episode's first row on, as it is served; the last tick may be short
            rows = np.unique(np.append(np.arange(start, end, stride), end))[-r.ticks :]
            rows = np.concatenate([np.full(r.ticks - len(rows), -1), rows])
        return rows, np.concatenate([[-1], rows[:-1]])

    def draw(self, rng: np.random.Generator, batch: int) -> tuple[Tensor, Tensor, Tensor]:
        """``(tokens, coverage [b, t], valid bool[b, t])``; invalid ticks come last."""
        drawn = [self._rows(rng) for _ in range(batch)]
        rows = torch.from_numpy(np.stack([np.roll(r, -(r < 0).sum()) for r, _ in drawn]))
        before = torch.from_numpy(np.stack([np.roll(p, -(r < 0).sum()) for r, p in drawn]))
        at = rows.clamp_min(0)
        estimated = torch.from_numpy(rng.random((batch, 1, 1, 1)) < self.recipe.estimate_share)
        points = torch.where(estimated, self.seen.estimate[at], self.seen.points[at])
        given = tokens_of(self.seen, rows, before, points)
        coverage = self.seen.coverage[at]
        # Past progress tokens are the model's own when served: noise keeps it from copying them.
        noise = torch.from_numpy(rng.normal(0, self.recipe.progress_noise, coverage.shape)).float()
        written = torch.stack(
            [
                layout.progress_tokens(coverage + noise),
                torch.where(coverage > DONE_COVERAGE, layout.DONE_YES, layout.DONE_NO),
            ],
            -1,
        )
        ticks = torch.cat([given, written], -1).flatten(1)
        head = self._instruction.expand(batch, -1)
        return torch.cat([head, ticks], 1), coverage, rows >= 0


def window_mask(ticks: int, window: int) -> Tensor:
    """``bool[n, n]``, n = 32 + 32 ticks: causal; a tick sees the instruction and ``window`` ticks before."""
    n = layout.INSTRUCTION + ticks * layout.TICK
    tick = (torch.arange(n) - layout.INSTRUCTION).div(layout.TICK, rounding_mode="floor")
    mask = torch.ones(n, n, dtype=torch.bool).tril()
    return mask & ((tick[None] < 0) | (tick[:, None] - tick[None] <= window))


def _loss(model: ContextModel, tokens: Tensor, coverage: Tensor, valid: Tensor, mask: Tensor) -> dict[str, Tensor]:
    b, t = coverage.shape
    with torch.autocast("cpu", torch.bfloat16):
        hidden, _ = model(tokens, model.empty_cache(b), mask)
        ticks = hidden[:, layout.INSTRUCTION :].view(b, t, layout.TICK, -1)[valid]  # [k, 32, d]
        logits = model.lm_head(ticks).float()
    target = tokens[:, layout.INSTRUCTION :].view(b, t, layout.TICK)[valid]
    cov = coverage[valid]
    # Progress is ordinal: its target is a narrow bell over the bins around the true coverage.
    bins = torch.arange(layout.PROGRESS_BINS)
    bell = torch.exp(-0.5 * (bins - cov[:, None] * (layout.PROGRESS_BINS - 1)) ** 2)
    span = logits[:, layout.QUERY_AT].log_softmax(-1)[:, layout.PROGRESS : layout.PROGRESS + layout.PROGRESS_BINS]
    progress = -(bell / bell.sum(-1, keepdim=True) * span).sum(-1)
    done = F.cross_entropy(logits[:, layout.PROGRESS_AT], target[:, layout.DONE_AT], reduction="none")
    rest = F.cross_entropy(logits[:, :-1].flatten(0, 1), target[:, 1:].flatten(), reduction="none")
    rest = rest.view(-1, layout.TICK - 1)
    return {
        "progress": progress.mean(),
        "done": done.mean(),
        "action": rest[:, layout.ACTIONS_AT.start - 1 : layout.ACTIONS_AT.stop - 1].mean(),
        "other": rest[:, : layout.ACTIONS_AT.start - 1].mean(),
    }


@torch.no_grad()
def _start_values(model: ContextModel, codec: FrameCodec) -> None:
    """Ordinal tokens begin as smooth functions of their value, frame codes as functions of their levels."""
    table, d = model.model.embed_tokens.weight, model.config.hidden_size
    table.normal_(0, 0.5)

    def waves(n: int) -> Tensor:
        x = torch.linspace(0, 1, n)[:, None]
        rate = 2.0 ** torch.arange(d // 2 // 12 + 8)[None] * math.pi
        basis = torch.cat([(x * rate).sin(), (x * rate).cos()], 1)
        decay = torch.cat([rate, rate], 1) ** -0.5
        return (basis * decay) @ torch.randn(basis.shape[1], d)

    for start, count in ((layout.PLACE, layout.PLACES), (layout.PROGRESS, layout.PROGRESS_BINS)):
        table[start : start + count] = waves(count) * 0.5
    values = codec.tokenizer.values(torch.arange(layout.FRAME_CODES))
    rich = torch.cat([values, values.square(), (values * math.pi).sin()], 1)
    table[layout.FRAME : layout.FRAME + layout.FRAME_CODES] = rich @ torch.randn(rich.shape[1], d) * 0.4


def roll(model: ContextModel, given: Tensor, instruction: Tensor) -> tuple[Tensor, Tensor]:
    """Serve one session's ticks ``given int64[t, 30]`` as the runner does (its own written tokens, a sliding
    window); returns progress and done probability ``[t]``."""
    past, progress, done = read_instruction(model, instruction[None]), [], []
    for tokens in given:
        reading = read_tick(model, past, tokens[None])
        past = slide(past, reading.kv, model.config.window_ticks)
        progress.append(reading.progress[0])
        done.append(reading.done[0])
    return torch.stack(progress), torch.stack(done)


@dataclass(frozen=True)
class Judged:
    """What the model said of the ticks of episodes, and what was true: each ``[ticks]``."""

    progress: Tensor
    done: Tensor  # probability
    coverage: Tensor

    @property
    def true_done(self) -> Tensor:
        return self.coverage > DONE_COVERAGE


#: Serves a session's ticks as :func:`roll` does.
Roll = Callable[[ContextModel, Tensor, Tensor], tuple[Tensor, Tensor]]


def judge(
    model: ContextModel, seen: Seen, demos: Demos, recipe: ContextRecipe, episodes: Iterable[int], serve: Roll = roll
) -> Judged:
    """Serve ``episodes`` tick by tick from their first row on; the last row is a tick too."""
    progress, done, coverage = [], [], []
    for e in episodes:
        start, end = int(demos.start[e]), int(demos.start[e] + demos.length[e] - 1)
        rows = torch.from_numpy(np.unique(np.append(np.arange(start, end, recipe.stride), end)))[None]
        before = torch.cat([torch.tensor([[-1]]), rows[:, :-1]], 1)
        given = tokens_of(seen, rows, before, seen.estimate[rows])[0]
        p, d = serve(model, given, layout.instruction_tokens(recipe.instruction))
        progress.append(p)
        done.append(d)
        coverage.append(seen.coverage[rows[0]])
    return Judged(torch.cat(progress), torch.cat(done), torch.cat(coverage))


def done_scores(said: Tensor, true: Tensor) -> tuple[float, float, float]:
    """F1, precision and recall of ``bool[n]`` against ``bool[n]``."""
    hits = int((said & true).sum())
    precision, recall = hits / max(1, int(said.sum())), hits / max(1, int(true.sum()))
    return 2 * hits / max(1, int(said.sum()) + int(true.sum())), precision, recall


def calibrate(model: ContextModel, seen: Seen, demos: Demos, recipe: ContextRecipe) -> float:
    """The bias on the log odds of done that scores best on training episodes as they are served."""
    chosen = demos.episodes("expert", "perturbed", framed=True)
    chosen = chosen[np.linspace(0, len(chosen) - 1, min(len(chosen), recipe.calibration_episodes)).astype(int)]
    judged = judge(model, seen, demos, recipe, chosen)
    odds = judged.done.clamp(1e-6, 1 - 1e-6).logit() + model.config.done_bias
    biases = [step / 5 for step in range(26)]
    scores = torch.tensor([done_scores(odds > b, judged.true_done)[0] for b in biases])
    # Neighbouring biases share their noise: the best of the smoothed scores is the steadier choice.
    smooth = torch.nn.functional.avg_pool1d(scores[None, None], 5, 1, 2, count_include_pad=False)[0, 0]
    return biases[int(smooth.argmax())]


def evaluate(
    model: ContextModel, seen: Seen, demos: Demos, recipe: ContextRecipe, serve: Roll = roll
) -> dict[str, float]:
    """Held-out episodes tick by tick: Pearson r of progress, F1 of done at probability 0.5."""
    judged = judge(model, seen, demos, recipe, demos.episodes("expert", "perturbed", "random", framed=True), serve)
    p, t = judged.progress, judged.coverage
    f1, precision, recall = done_scores(judged.done > 0.5, judged.true_done)
    return {
        "progress_pearson": round(float(torch.corrcoef(torch.stack([p, t]))[0, 1]), 4),
        "progress_mae": round(float((p - t).abs().mean()), 4),
        "done_f1": round(f1, 4),
        "done_precision": round(precision, 4),
        "done_recall": round(recall, 4),
        "ticks": len(p),
        "done_ticks": int(judged.true_done.sum()),
    }


def train(recipe: ContextRecipe, context: TrainContext) -> Trained:
    """Train from scratch on what the shipped codec sees."""
    begin(recipe)
    rng = np.random.default_rng(recipe.seed)
    codec = load_codec(context.checkpoints / "codec")
    version = revision(context.checkpoints / "codec")
    seen = perceive(codec, version, context.train, context.log)
    context.log(f"{len(seen.frame)} frames read, {context.spent()}")
    sessions, model = Sessions(seen, context.train, recipe), ContextModel(recipe.model)
    _start_values(model, codec)
    mask = window_mask(recipe.ticks, recipe.model.window_ticks)
    optimiser = Optimiser(
        model.named_parameters(), recipe.lr, betas=(0.9, 0.95), muon=("model.layers.",), muon_lr=recipe.muon_lr
    )
    average, sums = Average(model, recipe.ema), {"progress": 0.0, "done": 0.0, "action": 0.0, "other": 0.0}
    weights = {"progress": 1.0, "done": 1.0, "action": 0.15, "other": 0.05}
    for step in range(recipe.steps):
        losses = _loss(model, *sessions.draw(rng, recipe.batch), mask)
        optimiser.step(
            torch.stack([weights[k] * v for k, v in losses.items()]).sum(), cosine(step, recipe.steps, 60, 0.02)
        )
        average.update(model)
        sums = {k: v + losses[k].item() for k, v in sums.items()}
        if (step + 1) % 50 == 0:
            shown = " ".join(f"{k} {v / 50:.4f}" for k, v in sums.items())
            context.log(f"step {step + 1}/{recipe.steps} {shown} {context.spent()['wall_minutes']} min")
            sums = dict.fromkeys(sums, 0.0)
    bias = calibrate(average.module, seen, context.train, recipe)
    context.log(f"log odds of done are lowered by {bias:.1f}")
    final = ContextModel(recipe.model.model_copy(update={"done_bias": bias}))
    final.load_state_dict(average.module.state_dict())
    unseen = perceive(codec, version, context.test, context.log, exact=True)
    metrics = evaluate(final.eval(), unseen, context.test, recipe)
    return Trained(
        "context",
        final.config.model_dump(mode="json"),
        final.state_dict(),
        metrics,
        "instruction, 96 x 96 frames (codes and the readout's estimate), agent position, executed actions",
        "expert, perturbed and random episodes and drawn scenes; held-out episodes for the figures",
    )


#: Seeds differ by less than this.
SPREAD = {"progress_pearson": -0.01, "done_f1": -0.06}
TRAINER = Trainer(ContextRecipe, train, SPREAD)
