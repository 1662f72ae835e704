"""The frames stage on its paged pool, against the same model on other caches; one session, one thread."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor

from omni_loop import registry
from omni_loop.messages import PayloadKind
from omni_loop.runner.state import Budget, StateManager
from omni_loop.stage import Payload, StageItem
from omni_loop.types import Op
from omni_loop_worlds.dit import DiT, band_mask, denoise, noise_levels
from omni_loop_worlds.stages.frames import FramesStage
from omni_loop_worlds.stages.shared import to_px

FRAMES = 8  # predicted per tick
_FILL = 2  # ticks in which windows fill
_STAGE, _SESSION = "bench/frames", "bench"


@dataclass(frozen=True, slots=True)
class Milliseconds:
    """CPU time per frame."""

    paged: float
    dense: float
    recompute: float


class Paged:
    """The stage as a runner drives it: typed state in transactions, blocks of the pool."""

    def __init__(self, stage: FramesStage, first: Tensor) -> None:
        self._stage, self._first = stage, first
        self._state = StateManager({_STAGE: stage.state_specs()}, Budget(max_sessions=1))
        self._state.open(_SESSION)

    def frames(self, tick: int, actions: Tensor) -> Tensor:
        """The next latents ``[n, 16, c]`` under ``actions [n, 2]`` in -1..1; in tick 0 those after the first frame."""
        inputs = {"actions": Payload(PayloadKind.ACTIONS, {"actions": to_px(actions)})}
        if tick == 0:
            inputs["latents"] = Payload(PayloadKind.LATENTS, {"latents": self._first})
        view = self._state.begin(_SESSION, _STAGE, tick)
        result = self._stage.run([_item(view, tick, Op.PREDICT if tick else Op.INFER, inputs)])[0]
        if isinstance(result, Exception):
            raise result
        self._state.seal(_SESSION, _STAGE)
        self._state.commit(_SESSION, tick, [_STAGE])
        latents: Tensor = result["latents"].arrays["latents"]
        return latents


def _item(state: Any, tick: int, op: Op, inputs: dict[str, Payload]) -> StageItem:
    return StageItem(_SESSION, 0, 0, tick, op, tick * FRAMES, "", inputs, {}, state)


def _noise(tick: int) -> torch.Generator:
    """What the stage draws its noise from in ``tick``."""
    return torch.Generator().manual_seed(_item(None, tick, Op.PREDICT, {}).noise_seed("frames"))


class Dense:
    """One tensor, concatenated with every frame's keys and values and cut to the window."""

    def __init__(self, model: DiT, steps: int, first: Tensor) -> None:
        c = model.config
        self._model, self._steps, self._last = model, steps, first[:, None]
        self._kv = torch.zeros(c.layers, 2, 1, 0, c.heads, c.head_dim)
        self._write(self._last, None, model.roped_context(self._kv))

    def frames(self, tick: int, actions: Tensor) -> Tensor:
        """As :meth:`Paged.frames`."""
        noise = _noise(tick)
        return torch.cat([self._next(noise, action[None, None]) for action in actions])

    def _next(self, noise: torch.Generator, action: Tensor) -> Tensor:
        context = self._model.roped_context(self._kv)
        drawn = torch.randn(self._last.shape, generator=noise)
        known = torch.ones(1, 1, dtype=torch.bool)
        latents = denoise(self._model, self._last, action, known, context, drawn, self._steps)
        self._write(latents, action, context)
        return latents[0]

    def _write(self, latents: Tensor, action: Tensor | None, context: Tensor) -> None:
        c, known = self._model.config, torch.tensor([[action is not None]])
        led = torch.zeros(1, 1, c.action_dim) if action is None else action
        _, fresh = self._model.frame(latents, self._last, torch.zeros(1, 1), led, known, context)
        self._kv = torch.cat([self._kv, fresh], 3)[:, :, :, -(c.window - 1) * c.tokens :]
        self._last = latents


class Recompute:
    """No cache: every denoise step runs the window's frames. Until the window is full this is the same function;
    then its oldest frames have lost what they saw."""

    def __init__(self, model: DiT, steps: int, first: Tensor) -> None:
        self._model, self._steps = model, steps
        self._frames, self._actions = first[:, None], torch.zeros(1, 1, model.config.action_dim)
        self._known = torch.zeros(1, 1, dtype=torch.bool)

    def frames(self, tick: int, actions: Tensor) -> Tensor:
        """As :meth:`Paged.frames`."""
        noise = _noise(tick)
        return torch.cat([self._next(noise, action[None, None]) for action in actions])

    def _next(self, noise: torch.Generator, action: Tensor) -> Tensor:
        c = self._model.config
        past = slice(-(c.window - 1), None)
        frames = self._frames[:, past]
        led = torch.cat([self._actions[:, past], action], 1)
        known = torch.cat([self._known[:, past], torch.ones(1, 1, dtype=torch.bool)], 1)
        n = led.shape[1]
        # The oldest frame's predecessor has left the window: it stands in for itself, as a first frame does.
        previous = torch.cat([frames[:, :1], frames], 1)
        mask, position = band_mask(n, c.tokens, c.window), torch.arange(n)
        x, levels = torch.randn(frames[:, -1:].shape, generator=noise), noise_levels(self._steps)
        for now, then in pairwise(levels):
            level = torch.zeros(1, n)
            level[:, -1] = now
            out = self._model.streams(torch.cat([frames, x], 1), previous, level, led, known, position, mask)
            clean = frames[:, -1:] + out[:, -1:]
            x = clean + (then / now) * (x - clean)
        self._frames, self._actions, self._known = torch.cat([frames, x], 1), led, known
        return x[0]


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch on the calling thread alone, whose CPU time then is all there is."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def compare(checkpoints: str, rounds: int) -> Milliseconds:
    """Medians over ``rounds`` ticks of 8 frames; the three take turns, so that all meet the same machine."""
    options = {"checkpoints": checkpoints} if checkpoints else {}
    stage: FramesStage = registry.build(registry.STAGES, "frames", options)
    c, g = stage.model.config, torch.Generator().manual_seed(0)
    first = torch.randn(1, c.tokens, c.token_dim, generator=g)
    with one_thread(), torch.no_grad():
        rollouts: dict[str, Paged | Dense | Recompute] = {
            "paged": Paged(stage, first),
            "dense": Dense(stage.model, stage.steps, first),
            "recompute": Recompute(stage.model, stage.steps, first),
        }
        spent: dict[str, list[float]] = {name: [] for name in rollouts}
        for tick in range(rounds + _FILL):
            actions = torch.rand(FRAMES, c.action_dim, generator=g) * 2 - 1
            for name, rollout in rollouts.items():
                begin = time.thread_time()
                rollout.frames(tick, actions)
                spent[name].append((time.thread_time() - begin) * 1e3 / FRAMES)
    return Milliseconds(**{name: median(values[_FILL:]) for name, values in spent.items()})
