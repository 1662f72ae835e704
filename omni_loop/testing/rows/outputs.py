"""F7: a model gives what cannot be, in any stage, alone or inside a batch. Nobody but its session may notice."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...errors import OmniLoopError, Reason
from ...stage import Outputs, Payload, StageItem
from ...types import Op, TickResult
from ..board import Broken, expect
from .bed import Bed, Outcome, Robot, bed, check_alone, nothing_leaks, row, some_actions
from .toys import CONTEXT_KV, FRAMES_KV, MAX_FRAMES, WIDTH, Spoil

SESSIONS, IN_CI = 4, 48  # faults of the catalogue per seed
_REASONS = (Reason.BAD_OUTPUT, Reason.STAGE_FAILED)
_OF_STATE = (*_REASONS, Reason.BAD_TENSOR, Reason.BAD_REQUEST, Reason.UNKNOWN_NAME, Reason.OUT_OF_BLOCKS)
Change = Callable[[Tensor], Any]


@dataclass(frozen=True, slots=True)
class Fault:
    """``stage`` goes wrong during ``op``; ``besides``: after the answer, of which only the frames are lost."""

    name: str
    stage: str
    op: Op
    spoil: Spoil
    besides: bool = False
    reasons: tuple[Reason, ...] = _REASONS


def measure(seed: int, full: bool) -> float:
    """Faults survived: every kind, in every stage and operation, in the order of the seed; in CI a third of them."""
    with nothing_leaks():
        return asyncio.run(_all(seed, full))


async def _all(seed: int, full: bool) -> float:
    draw = np.random.default_rng(seed)
    faults = catalogue()
    order = [faults[i] for i in draw.permutation(len(faults))[: None if full else IN_CI]]
    settings = {"max_batch": SESSIONS, "max_wait_ms": 50.0}
    companies: list[int] = []
    async with bed(settings=settings, threads=seed % 2 == 1) as made:
        robots = [await made.open(seed + i) for i in range(SESSIONS)]
        await _gather([robot.infer(row(draw), frames=1) for robot in robots])
        for fault in order:
            victim = robots[int(draw.integers(SESSIONS))]
            companies.append(await _one(made, robots, victim, fault, draw))
        await _gather([robot.infer(row(draw), frames=2) for robot in robots])
        await made.settled()
        made.check()
    expect(max(companies) == SESSIONS, "no fault ever met a whole batch")
    for i, robot in enumerate(robots):
        await check_alone(seed + i, robot)
    return float(len(order))


async def _one(made: Bed, robots: list[Robot], victim: Robot, fault: Fault, draw: np.random.Generator) -> int:
    """One fault in one session, while the others do the same operation. How many were in its batch."""
    what, mine = f"{fault.name} in {fault.stage} of {fault.op}", victim.info.id
    core, token = made.core, victim.info.token
    before, info = await made.state_of(mine), core.session(mine, token)
    made.faults.plant(fault.stage, mine, fault.spoil)
    calls = [_ask(robot, fault, draw) for robot in robots]
    outcomes = dict(zip([r.info.id for r in robots], await asyncio.gather(*calls), strict=True))
    await made.settled()
    made.check()
    company = made.faults.lift(fault.stage, mine)
    expect(company > 0, f"{what}: the fault never happened")
    for session, outcome in outcomes.items():
        if session != mine and (isinstance(outcome, OmniLoopError) or outcome.frames_error is not None):
            raise Broken(f"{what}: another session of the batch was refused: {outcome}")
    after, now, outcome = await made.state_of(mine), core.session(mine, token), outcomes[mine]
    if fault.besides:
        expect(isinstance(outcome, TickResult), f"{what}: the answer was lost with what was asked besides: {outcome}")
        assert isinstance(outcome, TickResult)
        expect(outcome.frames is None, f"{what}: frames left the server")
        _typed(what, outcome.frames_error, fault.reasons)
        before, after = (_of(state, "frames", "decode") for state in (before, after))
    else:
        _typed(what, outcome, fault.reasons)
        expect((now.epoch, now.step) == (info.epoch, info.step), f"{what}: the session moved on")
    expect(before == after, f"{what}: the state is not as before the tick")
    return company


def _ask(robot: Robot, fault: Fault, draw: np.random.Generator) -> Coroutine[Any, Any, Outcome]:
    if fault.op is Op.PREDICT:
        return robot.predict(some_actions(draw, 2))
    if fault.op is Op.RECONDITION:
        return robot.recondition(row(draw, 2))
    return robot.infer(row(draw), frames=2 if fault.besides else 0)


def _typed(what: str, error: object, reasons: tuple[Reason, ...]) -> None:
    if not isinstance(error, OmniLoopError):
        raise Broken(f"{what}: it was answered: {error}")
    expect(error.reason in reasons, f"{what}: the reason is {error.reason}: {error.text}")
    expect("Traceback" not in error.text and "/" not in error.text.replace("board-toy/", ""), f"{what}: {error.text}")


def _of(state: dict[str, Any], *stages: str) -> dict[str, Any]:
    return {name: value for name, value in state.items() if name.partition("/")[2] in stages}


async def _gather(calls: list[Coroutine[Any, Any, Outcome]]) -> None:
    for outcome in await asyncio.gather(*calls):
        if isinstance(outcome, OmniLoopError):
            raise Broken(f"nothing was planted, and a tick failed: {outcome.text}")


# What can be wrong with an output -----------------------------------------------------------------------------


def catalogue() -> list[Fault]:
    """Every fault of every output, in every operation that gives it."""
    found: list[Fault] = []
    for stage, output, array, ops in _OUTPUTS:
        for op, besides in ops:
            for name, change in _CHANGES.items():
                if name in _SKIPPED.get(array, ()):
                    continue
                spoil = _changed(output, array, change)
                # What has no spec is found where it is used, which may be where it is written to state.
                reasons = _OF_STATE if output in ("hidden", "latents") else _REASONS
                found.append(Fault(f"{output}.{array} {name}", stage, op, spoil, besides, reasons))
            found.append(Fault(f"{output} missing", stage, op, _without(output), besides))
            found.append(Fault(f"{output} is no payload", stage, op, _instead(output, None), besides))
    for stage, ops in _RUNS.items():
        for op, besides in ops:
            for name, spoil in _WHOLE.items():
                if name == "no outputs" and (stage, op) == ("frames", Op.RECONDITION):
                    continue  # it has none that anybody needs
                found.append(Fault(name, stage, op, spoil, besides))
            for name, spoil in _STATE.get(stage, {}).items():
                found.append(Fault(name, stage, op, spoil, besides, _OF_STATE))
    return found


def _poisoned(value: float) -> Change:
    def change(tensor: Tensor) -> Tensor:
        spoilt = tensor.clone()
        spoilt.reshape(-1)[-1] = value
        return spoilt

    return change


def _longer(tensor: Tensor) -> Tensor:
    flat = tensor.reshape(-1) if tensor.ndim == 0 else tensor
    return torch.cat([flat, flat[-1:]])


_CHANGES: dict[str, Change] = {
    "NaN": _poisoned(float("nan")),
    "inf": _poisoned(float("inf")),
    "-inf": _poisoned(float("-inf")),
    "out of range": lambda t: t.clone() + 1000.0,
    "too long": _longer,
    "too flat": lambda t: t.reshape(-1) if t.ndim > 1 else t.reshape(1, 1, -1).expand(1, 3, -1),
    "of complex": lambda t: torch.complex(t.double(), t.double()),
    "of float64": lambda t: t.double(),
    "of text": lambda t: "a string",
    "of objects": lambda t: np.array([object()]),
}
# A hidden state or a latent has no range, frames are no floats; a scalar may be of any float, whose value is read.
_SKIPPED = {
    "hidden": ("out of range",),
    "latents": ("out of range", "too long"),  # one latent more is one frame more, which is another row
    "frames": ("NaN", "inf", "-inf", "out of range"),
    "progress": ("of float64", "too flat"),
    "done": ("of float64", "too flat"),
}
_INFER, _BESIDES = (Op.INFER, False), (Op.INFER, True)
_PREDICT, _RECONDITION = (Op.PREDICT, False), (Op.RECONDITION, False)
_Runs = tuple[tuple[Op, bool], ...]  # operations, and whether the stage runs besides their answer
_OUTPUTS: tuple[tuple[str, str, str, _Runs], ...] = (
    ("context", "hidden", "hidden", (_INFER,)),
    ("context", "progress", "progress", (_INFER, _RECONDITION)),
    ("context", "progress", "done", (_INFER,)),
    ("act", "actions", "actions", (_INFER,)),
    ("frames", "latents", "latents", (_PREDICT, _BESIDES)),
    ("decode", "frames", "frames", (_PREDICT, _BESIDES)),
)
_RUNS: dict[str, _Runs] = {
    "context": (_INFER, _RECONDITION),
    "act": (_INFER,),
    "frames": (_PREDICT, _RECONDITION, _BESIDES),
    "decode": (_PREDICT, _BESIDES),
}


def _changed(output: str, array: str, change: Change) -> Spoil:
    def spoil(item: StageItem, outputs: dict[str, Payload]) -> Outputs:
        payload = outputs[output]
        value = change(torch.as_tensor(payload.arrays[array]))
        return {**outputs, output: replace(payload, arrays={**payload.arrays, array: value})}

    return spoil


def _without(output: str) -> Spoil:
    return lambda item, outputs: {name: payload for name, payload in outputs.items() if name != output}


def _instead(output: str, value: Any) -> Spoil:
    return lambda item, outputs: {**outputs, output: value}


def _raises(error: BaseException) -> Spoil:
    def spoil(item: StageItem, outputs: dict[str, Payload]) -> Outputs:
        raise error

    return spoil


def _writes(write: Callable[[StageItem], None]) -> Spoil:
    def spoil(item: StageItem, outputs: dict[str, Payload]) -> Outputs:
        write(item)
        return outputs

    return spoil


_WHOLE: dict[str, Spoil] = {
    "a foreign error": _raises(RuntimeError("the secret lies in /home/somebody")),
    "an exit": _raises(SystemExit(3)),
    "no outputs by name": lambda item, outputs: 7,  # type: ignore[return-value, dict-item]
    "no outputs": lambda item, outputs: {},
}
_NAN = float("nan")
_STATE: dict[str, dict[str, Spoil]] = {
    "context": {
        "NaN into KV": _writes(lambda i: i.state.kv("kv").append(torch.full((2, 2, 2, 1, WIDTH), _NAN))),
        "half a block of KV": _writes(lambda i: i.state.kv("kv").append(torch.zeros(2, 2, 1, 1, WIDTH))),
        "too many blocks of KV": _writes(
            lambda i: i.state.kv("kv").append(torch.zeros(2, 2, CONTEXT_KV.block_size * (MAX_FRAMES + 1), 1, WIDTH))
        ),
        "NaN into a tensor": _writes(lambda i: i.state.tensor("mean").set(torch.full((WIDTH,), _NAN))),
        "a tensor of another shape": _writes(lambda i: i.state.tensor("mean").set(torch.zeros(WIDTH + 1))),
        "inf into a ring": _writes(lambda i: i.state.ring("recent").push(torch.full((WIDTH,), float("inf")))),
        "a counter of float": _writes(lambda i: i.state.counter("ticks").set(0.5)),  # type: ignore[arg-type]
        "state it never declared": _writes(lambda i: i.state.ring("nothing").clear()),
    },
    "act": {"complex into a tensor": _writes(lambda i: i.state.tensor("last").set(torch.zeros(WIDTH) * 1j))},
    "frames": {
        "NaN into KV": _writes(lambda i: i.state.kv("kv").append(torch.full((1, 2, 1, 2, 2), _NAN))),
        "KV of another geometry": _writes(
            lambda i: i.state.kv("kv").append(torch.zeros(2, 2, FRAMES_KV.block_size, 2, 2))
        ),
    },
}
