"""The frames stage on its paged pool, against the same model on other caches: CPU time per frame on one thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import cast

import numpy as np
import torch
from torch import Tensor

from omni_loop import registry
from omni_loop.messages import PayloadKind
from omni_loop.stage import Payload, StageItem, StateView
from omni_loop.types import Op
from omni_loop_envs.pusht.simulator import PushTSimulator
from omni_loop_worlds.stages.frames import FramesStage
from omni_loop_worlds.stages.shared import encode, to_px

from .caches import Cat, Dense, Recompute, Ring, Rollout
from .sessions import Sessions, one_thread

FRAMES = 8  # predicted per tick
FILL = 2  # ticks in which windows fill


@dataclass(frozen=True, slots=True)
class Comparison:
    """Medians of CPU milliseconds per frame of all sessions together, by cache, and the largest difference of any
    cache's latents from the paged one's, of their largest, while windows fill and begin to slide."""

    ms: dict[str, float]
    difference: float


class Paged:
    """The stage as it is served: on a runner, through its batcher, with state in transactions."""

    def __init__(self, stage: FramesStage, first: Tensor) -> None:
        self._first, self._sessions = first, Sessions(stage, len(first))

    def frames(self, tick: int, actions: Tensor) -> Tensor:
        """The next latents ``[b, n, 16, c]`` under ``actions [b, n, 2]`` in -1..1; in tick 0 those after the first."""
        inputs = [{"actions": Payload(PayloadKind.ACTIONS, {"actions": to_px(a)})} for a in actions]
        if tick == 0:
            for given, latents in zip(inputs, self._first, strict=True):
                given["latents"] = Payload(PayloadKind.LATENTS, {"latents": latents})
        made = self._sessions.tick(tick, Op.PREDICT if tick else Op.INFER, inputs, step=tick * FRAMES)
        return torch.stack([outputs["latents"].arrays["latents"] for outputs in made])


class Other:
    """Rollouts on another cache, one after the other: one of all sessions, or one a session, as peers run them."""

    def __init__(self, rollouts: Sequence[Rollout]) -> None:
        self._rollouts = rollouts

    def frames(self, tick: int, actions: Tensor) -> Tensor:
        """As :meth:`Paged.frames`."""
        generators = [_noise(session, tick) for session in range(len(actions))]
        size = len(actions) // len(self._rollouts)
        starts = range(0, len(actions), size)
        made = [
            rollout.frames(generators[at : at + size], actions[at : at + size])
            for rollout, at in zip(self._rollouts, starts, strict=True)
        ]
        return torch.cat(made)


def _noise(session: int, tick: int) -> torch.Generator:
    """What the stage draws the session's noise from in ``tick``."""
    item = StageItem(str(session), session, 0, tick, Op.PREDICT, 0, "", {}, {}, cast(StateView, None))
    return torch.Generator().manual_seed(item.noise_seed("frames"))


def rollouts(stage: FramesStage, first: Tensor) -> dict[str, Paged | Other]:
    """Every cache at the same first frames ``[b, 1, 16, c]``."""
    model, steps = stage.model, stage.steps

    def alone(kind: Callable[..., Rollout]) -> Other:
        return Other([kind(model, steps, first[i : i + 1]) for i in range(len(first))])

    return {
        "paged": Paged(stage, first),
        "dense": Other([Dense(model, steps, first)]),
        "recompute": Other([Recompute(model, steps, first)]),
        "cat": alone(Cat),
        "ring": alone(Ring),
    }


def first_frames(stage: FramesStage, sessions: int) -> Tensor:
    """Latents ``[b, 1, 16, c]`` of real frames."""
    simulator, images = PushTSimulator(), []
    for seed in range(sessions):
        simulator.reset(seed)
        images.append(simulator.frame())
    return encode(stage.codec, np.stack(images))[:, None]


class Hands:
    """Actions ``[b, n, 2]`` in -1..1 that wander, as an agent's do."""

    def __init__(self, sessions: int, seed: int = 0) -> None:
        self._at, self._g = torch.zeros(sessions, 2), torch.Generator().manual_seed(seed)

    def __call__(self, n: int = FRAMES) -> Tensor:
        steps = []
        for _ in range(n):
            self._at = (self._at + 0.1 * torch.randn(self._at.shape, generator=self._g)).clamp(-0.9, 0.9)
            steps.append(self._at)
        return torch.stack(steps, 1)


def compare(checkpoints: str, sessions: int, rounds: int) -> Comparison:
    """Over ``rounds`` ticks of 8 frames; caches take turns, so that all meet the same machine."""
    options = {"checkpoints": checkpoints} if checkpoints else {}
    stage: FramesStage = registry.build(registry.STAGES, "frames", options)
    with one_thread(), torch.no_grad():
        caches = rollouts(stage, first_frames(stage, sessions))
        spent: dict[str, list[float]] = {name: [] for name in caches}
        hands, difference = Hands(sessions), 0.0
        for tick in range(rounds + FILL):
            actions, made = hands(), {}
            for name, cache in caches.items():
                begin = time.thread_time()
                made[name] = cache.frames(tick, actions)
                spent[name].append((time.thread_time() - begin) * 1e3 / FRAMES)
            if tick < FILL:  # later, rounding errors have grown over frames that come of frames
                difference = max(difference, _difference(made, stage.model.config.window if tick == 0 else 0))
    return Comparison({name: median(values[FILL:]) for name, values in spent.items()}, difference)


def _difference(made: dict[str, Tensor], window: int) -> float:
    """``window``: frames, the first included, within which recomputing is the same function."""
    ours, largest = made["paged"], 0.0
    for name, other in made.items():
        same = max(window - 1, 0) if name == "recompute" else FRAMES
        if same:
            largest = max(largest, float((other - ours)[:, :same].abs().max()))
    return largest / float(ours.abs().max())
