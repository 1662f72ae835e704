"""What vLLM's streaming input would save: a tick as a chunk of a request that stays open, or as a request of its own.

The open request gives no hidden states, which leave with a finished one: this says what they cost to have this way.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from statistics import median
from typing import Any

import numpy as np

from omni_loop_worlds.context import layout
from omni_loop_worlds.vllm.engine import Answer, Engine

_TICKS = 4  # of a session: until its window is full


def in_turns(engine: Engine, sessions: int) -> tuple[float, float]:
    """Median milliseconds of a tick, of sessions in turns: as chunks of an open request, and as requests."""
    draw, opened, closed = np.random.default_rng(0), [], []
    for _ in range(sessions):
        closed += _requests(engine, draw)
        opened += engine.call(_stream(engine, draw))
    return median(opened) * 1e3, median(closed) * 1e3


def _requests(engine: Engine, draw: np.random.Generator) -> list[float]:
    spent, past = [], _instruction(draw)
    for _ in range(_TICKS):
        prompt = [*past, *_given(draw)]
        begin = time.perf_counter()
        (answer,) = engine.ask([prompt])
        spent.append(time.perf_counter() - begin)
        if not isinstance(answer, Answer):
            raise answer
        past = [*prompt, *answer.tokens]
    return spent


async def _stream(engine: Engine, draw: np.random.Generator) -> list[float]:
    from vllm.engine.protocol import StreamingInput
    from vllm.sampling_params import RequestOutputKind

    params = engine.params.clone()
    params.output_kind = RequestOutputKind.DELTA
    chunks: asyncio.Queue[list[int] | None] = asyncio.Queue()

    async def feed() -> AsyncGenerator[Any, None]:
        while (tokens := await chunks.get()) is not None:
            yield StreamingInput(prompt={"type": "token", "prompt_token_ids": tokens}, sampling_params=params)

    outputs = engine.llm.generate(feed(), params, f"stream-{draw.integers(1 << 62)}")
    spent = []
    for tick in range(_TICKS):
        begin = time.perf_counter()
        await chunks.put([*([] if tick else _instruction(draw)), *_given(draw)])
        written = 0
        while written < params.max_tokens:  # vLLM drops the last one when the next chunk comes
            written += len((await anext(outputs)).outputs[0].token_ids)
        spent.append(time.perf_counter() - begin)
    await chunks.put(None)
    async for _ in outputs:
        pass
    return spent


def _instruction(draw: np.random.Generator) -> list[int]:
    return [layout.BEGIN, *(int(t) for t in draw.integers(layout.BYTES, layout.FRAME, layout.INSTRUCTION - 1))]


def _given(draw: np.random.Generator) -> list[int]:
    frame = draw.integers(layout.FRAME, layout.PLACE, 16)
    places = draw.integers(layout.PLACE, layout.PROGRESS, 12)
    return [*(int(t) for t in frame), layout.TICK_MARK, *(int(t) for t in places), layout.QUERY]
