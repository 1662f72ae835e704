"""F6: more sessions than the KV pools have blocks for. Each tick is answered or refused whole, whoever has to go."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...config import SessionConfig
from ...errors import Code, OmniLoopError, Reason
from ...runner.eviction import Policy
from ...runner.state import Budget
from ..board import Broken, expect
from .bed import Bed, Outcome, Robot, bed, check_alone, nothing_leaks, row, some_actions

SESSIONS, BLOCKS, ROUNDS = 5, 12, 40  # of 5 and 4 blocks that a session holds in the two pools when it is full
POLICIES: tuple[Policy, ...] = ("recomputable", "any", "none")
_SHORT = 20_000  # bytes of a log that soon does not reach back to its beginning


def measure(seed: int, full: bool) -> float:
    """Refusals, evictions and losses survived; three seeds in a row have the three policies."""
    with nothing_leaks():
        return asyncio.run(_crowd(seed))


@dataclass
class _Crowd:
    made: Bed
    draw: np.random.Generator
    seed: int
    policy: Policy
    robots: list[Robot] = field(default_factory=list)
    seeds: dict[str, int] = field(default_factory=dict)
    over: list[Robot] = field(default_factory=list)
    refused: int = 0
    lost: int = 0


async def _crowd(seed: int) -> float:
    policy = POLICIES[seed % 3]
    draw = np.random.default_rng(seed)
    log_bytes = _SHORT if policy == "any" else 1 << 20
    budget = Budget(max_sessions=16, blocks=BLOCKS, rewind_ticks=2, evict=policy)
    settings = {"max_batch": 4, "queue_ms": 10.0}
    async with bed(budget, settings, SessionConfig(log_bytes=log_bytes), threads=seed // 3 % 2 == 1) as made:
        crowd = _Crowd(made, draw, seed, policy)
        for i in range(SESSIONS):
            await _enter(crowd, seed + i)
        for _ in range(ROUNDS):
            await _round(crowd)
        await _empty(crowd)
        evictions = sum(runner.state.stats().evictions for runner in made.runners)
    if policy == "none":
        expect(crowd.refused > 0, "five sessions fitted where two have room")
        expect(evictions == 0, f"{evictions} sessions were evicted, which the policy forbids")
    else:
        expect(evictions > 0, "five sessions fitted where two have room, and none had to go")
    expect(policy == "any" or crowd.lost == 0, f"{crowd.lost} sessions were lost, which the policy forbids")
    for robot in crowd.over:
        await check_alone(crowd.seeds[robot.info.id], robot)
    return float(crowd.refused + evictions + crowd.lost)


async def _enter(crowd: _Crowd, seed: int) -> None:
    robot = await crowd.made.open(seed)
    crowd.robots.append(robot)
    crowd.seeds[robot.info.id] = seed


async def _round(crowd: _Crowd) -> None:
    """Some sessions do something at once; a refused tick leaves its session as it was."""
    made, draw = crowd.made, crowd.draw
    busy = [crowd.robots[i] for i in draw.permutation(len(crowd.robots))[: draw.integers(1, len(crowd.robots) + 1)]]
    watched = busy[0].info.id
    before = None if _evicted(made, watched) else await made.state_of(watched)
    outcomes = await asyncio.gather(*[_something(robot, draw) for robot in busy])
    await made.settled()
    made.check()
    for robot, outcome in zip(busy, outcomes, strict=True):
        error = outcome if isinstance(outcome, OmniLoopError) else outcome.frames_error
        if error is not None:
            await _refused(crowd, robot, error)
    if before is not None and isinstance(outcomes[0], OmniLoopError) and busy[0] in crowd.robots:
        now = None if _evicted(made, watched) else await made.state_of(watched)
        expect(now in (before, None), f"a tick that was refused left a trace: {outcomes[0].text}")
    for robot in crowd.robots:
        if not _evicted(made, robot.info.id):
            await made.state_of(robot.info.id)  # is refused while anything is staged
    if draw.random() < 0.2 and len(crowd.robots) < 2 * SESSIONS:
        await _fork(crowd, crowd.robots[int(draw.integers(len(crowd.robots)))])


def _something(robot: Robot, draw: np.random.Generator) -> Coroutine[Any, Any, Outcome]:
    kind = draw.random()
    if kind < 0.15 and robot.step >= 0:
        return robot.predict(some_actions(draw, int(draw.integers(1, 3))))
    if kind < 0.3:
        return robot.recondition(row(draw, int(draw.integers(1, 3))))
    return robot.infer(row(draw), frames=int(draw.integers(0, 3)))


async def _refused(crowd: _Crowd, robot: Robot, error: OmniLoopError) -> None:
    if error.reason is Reason.SESSION_LOST:
        step = crowd.made.core.session(robot.info.id, robot.info.token).step
        expect(f"last committed step is {step}" in error.text, f"a loss does not name step {step}: {error.text}")
        crowd.lost += 1
        await _leave(crowd, robot)
        await _enter(crowd, crowd.seed + 100 + crowd.lost)
        return
    crowd.refused += 1
    if error.code is not Code.RESOURCE_EXHAUSTED or not error.retryable:
        raise Broken(f"refused otherwise than for want of room: {error.code} {error.reason}: {error.text}")
    expect(error.retry_after_ms > 0, f"a refusal does not say when to come back: {error.text}")
    # Who was crowded out between two stages of one tick cannot say how many bytes the others took.
    crowded = "while it runs" in error.text
    expect(crowded or error.missing_bytes > 0, f"a refusal does not say what is missing: {error.text}")


async def _fork(crowd: _Crowd, robot: Robot) -> None:
    """A child that shares its parent's blocks, and goes its own way."""
    made, info = crowd.made, robot.info
    try:
        child = Robot(made, await made.core.fork(info.id, info.token), robot.seq, robot.step, list(robot.done))
    except OmniLoopError as error:
        await _refused(crowd, robot, error)
        return
    crowd.seeds[child.info.id] = crowd.seeds[info.id]
    crowd.robots.append(child)


async def _leave(crowd: _Crowd, robot: Robot) -> None:
    crowd.robots.remove(robot)
    crowd.over.append(robot)
    await crowd.made.core.close(robot.info.id, robot.info.token)


async def _empty(crowd: _Crowd) -> None:
    """One after another leaves; who is last has all the room, and is answered."""
    while crowd.robots:
        robot = crowd.robots[-1]
        outcome = await robot.infer(row(crowd.draw))
        if isinstance(outcome, OmniLoopError):
            expect(len(crowd.robots) > 1 or outcome.reason is Reason.SESSION_LOST, f"alone, and refused: {outcome}")
            if outcome.reason is not Reason.SESSION_LOST:
                await _refused(crowd, robot, outcome)
        await crowd.made.settled()
        await _leave(crowd, robot)


def _evicted(made: Bed, session: str) -> bool:
    """Whether its state is not there: evicted, or given up by a rebuild that found no room."""
    states = [runner.state for runner in made.runners]
    return any(session not in state.sessions() or state.evicted(session) for state in states)
