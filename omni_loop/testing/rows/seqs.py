"""F8: observations doubled, late, reordered, stale or missing. Each is answered as the session's table says, and only
what was accepted leaves a trace: a session that was sent just that answers the same, bit for bit."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.random import Generator

from ...config import SessionConfig
from ...errors import OmniLoopError, Reason
from ...loop.request import TickRequest
from ...types import Op, TickResult
from ..board import Broken, expect
from .bed import Bed, Robot, bed, row
from .toys import DIM

_CONFIG = SessionConfig(replies=4)


def measure(seed: int, full: bool) -> float:
    """Requests answered as they must be."""
    return float(asyncio.run(_deliver(seed, 1000 if full else 150)))


@dataclass
class Expected:
    """What has become of every seq, kept apart from the session machine."""

    highest: int = 0
    answers: dict[int, TickResult] = field(default_factory=dict)

    def of(self, seq: int) -> TickResult | Reason | None:
        """The very answer, why it is refused, or None: it is computed."""
        if seq in list(self.answers)[-_CONFIG.replies :]:
            return self.answers[seq]
        return Reason.STALE_SEQ if seq <= self.highest else None


async def _deliver(seed: int, count: int) -> int:
    draw, known, accepted = np.random.default_rng(seed), Expected(), []
    async with bed(config=_CONFIG) as made:
        robot = await made.open(seed)
        for _ in range(count):
            kind = draw.choice(["next", "gap", "doubled", "late", "burst"], p=[0.4, 0.15, 0.2, 0.15, 0.1])
            if kind == "burst":
                accepted += await _burst(made, robot, known, draw)
                continue
            ahead = int(draw.integers(2, 6)) if kind == "gap" else 1
            seq = known.highest + ahead
            if kind in ("doubled", "late") and known.highest:
                back = int(draw.integers(0, 2 if kind == "doubled" else known.highest))
                seq = max(1, known.highest - back)
            request = _observation(robot, seq, draw)
            await _send(made, robot, request, known, accepted)
        await _replayed(made, seed, accepted)
        return made.answered


async def _send(made: Bed, robot: Robot, request: TickRequest, known: Expected, accepted: list[TickRequest]) -> None:
    """One request, its answer held against what is known; nothing but an accepted one changes the session's state."""
    expected, before = known.of(request.seq), await made.state_of(robot.info.id)
    twice = await asyncio.gather(made.core.tick(request), made.core.tick(request), return_exceptions=True)
    made.asked += 2
    made.answered += 2
    expect(twice[0] is twice[1] or isinstance(twice[1], OmniLoopError), f"seq {request.seq} was computed twice")
    outcome = twice[0]
    if expected is None:
        if not isinstance(outcome, TickResult):
            raise Broken(f"seq {request.seq} was refused: {outcome}")
        known.highest, known.answers[request.seq] = request.seq, outcome
        accepted.append(request)
        robot.step = request.step
        return
    if isinstance(expected, TickResult):
        expect(outcome is expected, f"seq {request.seq} was not answered as before")
    else:
        reason = outcome.reason if isinstance(outcome, OmniLoopError) else "an answer"
        expect(reason is expected, f"seq {request.seq}: {reason}, expected {expected}")
    expect(await made.state_of(robot.info.id) == before, f"seq {request.seq} changed the state, which it must not")


async def _burst(made: Bed, robot: Robot, known: Expected, draw: Generator) -> list[TickRequest]:
    """Three observations at once, each of which replaces those that wait: the first, which runs, and the newest are
    answered."""
    first = known.highest + 1
    requests = [replace(_observation(robot, first + i, draw), supersede=True) for i in range(3)]
    requests[2] = replace(requests[2], step=requests[0].step + 1, executed=_executed(1))
    begun = asyncio.ensure_future(made.core.tick(requests[0]))
    machine = made.core._live[robot.info.id].session.machine
    while not begun.done() and machine.running != first:  # noqa: ASYNC110  it begins or ends within a few turns
        await asyncio.sleep(0)
    outcomes = await asyncio.gather(begun, *(made.core.tick(r) for r in requests[1:]), return_exceptions=True)
    made.asked += 3
    made.answered += 3
    for request, outcome, answered in zip(requests, outcomes, (True, False, True), strict=True):
        if answered != isinstance(outcome, TickResult):
            raise Broken(f"seq {request.seq} of a burst of {first} to {first + 2}: {outcome}")
        if isinstance(outcome, TickResult):
            known.answers[request.seq] = outcome
        else:
            replaced = isinstance(outcome, OmniLoopError) and outcome.reason is Reason.SUPERSEDED
            expect(replaced, f"seq {request.seq} was replaced, and answered {outcome}")
    known.highest, robot.step = first + 2, requests[2].step
    return [requests[0], requests[2]]


async def _replayed(made: Bed, seed: int, accepted: list[TickRequest]) -> None:
    """A fresh session of the same seed, sent what was accepted, ends in the same state."""
    other = await made.open(seed)
    results = [await other.send(replace(r, session=other.info.id, token=other.info.token)) for r in accepted]
    expect(all(isinstance(r, TickResult) for r in results), "what was accepted is refused when it is sent alone")
    first = next(iter(made.core._live))
    expect(await made.state_of(first) == await made.state_of(other.info.id), "what was not accepted left a trace")


def _observation(robot: Robot, seq: int, draw: Generator) -> TickRequest:
    step = robot.step + 1
    executed = _executed(1 if robot.step >= 0 else 0)
    arrays = {"x": row(draw)}
    return TickRequest(robot.info.id, robot.info.token, seq, Op.INFER, step=step, arrays=arrays, executed=executed)


def _executed(rows: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return np.full((rows, DIM), 0.25, np.float32)
