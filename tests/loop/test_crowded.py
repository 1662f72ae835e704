"""Random lives of several sessions in the room of one: they answer as they do where there is room for all."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from omni_loop.config import SessionConfig
from omni_loop.errors import OmniLoopError
from omni_loop.loop.request import SessionInfo

from .toy import DIM, Toy, infer, predict, recondition, toy
from .walker import ONE, TIGHT, TWO, WALKER, plan

OPS = (*["infer"] * 6, "predict", "plan", "fork", "rewind", "recondition", "reset", "open", "close")


async def live(t: Toy, seed: int, length: int) -> list[object]:
    """What was answered in a life drawn from ``seed``; refusals count too, by their text."""
    rng = random.Random(seed)
    infos: list[SessionInfo] = [await t.core.open("walker", seed=0)]
    said: list[object] = []
    for number in range(1, length + 1):
        at, op, draw = rng.randrange(len(infos)), rng.choice(OPS), rng.randrange(1 << 16)
        try:
            said.append(await act(t, infos, at, op, draw, number))
        except OmniLoopError as error:
            said.append((op, error.reason, error.text))
    return said


async def act(t: Toy, infos: list[SessionInfo], at: int, op: str, draw: int, number: int) -> object:
    info = infos[at]
    step = t.core.session(info.id, info.token).step
    observed = t.core._live[info.id].session.machine.position.observed
    seq = 10_000 + number
    if op == "infer":
        new = max(step, observed) + 1
        executed = np.full((new - observed if observed >= 0 else 0, DIM), 0.5, np.float32)
        return told(await t.core.tick(infer(info, seq, new, mark=draw % 7, executed=executed)))
    if op == "predict":
        return told(await t.core.tick(predict(info, seq, steps=1 + draw % 3)))
    if op == "plan":
        return told(await t.core.tick(plan(info, seq, horizon=4)))
    if op == "recondition":
        first = max(step - draw % 3, 1)
        return told(await t.core.tick(recondition(info, seq, first, n=1, rows=1)))
    if op == "reset":
        return await t.core.reset(info.id, info.token, seed=draw if draw % 2 else None)
    if op == "rewind":
        return await t.core.rewind(info.id, info.token, max(step - draw % 12, 0))
    if op == "close":
        if len(infos) > 1:
            await t.core.close(info.id, info.token)
            infos.pop(at)
        return None
    if len(infos) >= 4:
        return None
    if op == "open":
        infos.append(await t.core.open("walker", seed=draw))
        return None
    infos.append(await t.core.fork(info.id, info.token, seed=draw if draw % 2 else None))
    return infos[-1].step


def told(result: object) -> object:
    chunk, frames = result.chunk, result.frames  # type: ignore[attr-defined]
    return (
        result.epoch,  # type: ignore[attr-defined]
        None if chunk is None else chunk.actions.tolist(),
        None if frames is None else (frames.first_step, frames.frames[:, 0, 0, 0].tolist()),
    )


@pytest.mark.parametrize("placement", [ONE, TWO], ids=["one-runner", "two-runners"])
@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_crowded_sessions_answer_like_others(seed: int, placement: Sequence[Sequence[str]]) -> None:
    config = SessionConfig(rewind_ticks=3)
    async with toy(WALKER, placement, config=config) as t:
        expected = await live(t, seed, 120)
        least = t.script.count("walk")
    async with toy(WALKER, placement, settings=TIGHT, config=config) as t:
        assert await live(t, seed, 120) == expected
        assert t.script.count("walk") > least  # some were rebuilt
