"""The stages of ``pusht`` with 16 sessions in one batch, and with one session."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from statistics import median

import numpy as np

from omni_loop import registry
from omni_loop.messages import PayloadKind
from omni_loop.stage import Outputs, Payload, Stage
from omni_loop.types import Op
from omni_loop_envs.pusht.env import PushT

from .sessions import Sessions

MANY = 16
STAGES = ("context", "act", "frames", "decode")
IMAGINED = "imagined"  # the context stage, given frames of the tick before
FRAMES = 8
_FILL = 6  # ticks in which windows fill
Inputs = Sequence[Mapping[str, Payload]]


class Batches:
    """Each round one session and then 16 see, act, imagine, decode and look at what they imagined, each stage timed by
    itself."""

    def __init__(self, checkpoints: str, rounds: int) -> None:
        options = {"checkpoints": checkpoints} if checkpoints else {}
        self._stages: dict[str, Stage] = {name: registry.build(registry.STAGES, name, options) for name in STAGES}
        self._rounds = rounds

    def ms(self, stage: str) -> tuple[float, float]:
        """Median CPU milliseconds of a tick: of 16 sessions, of one."""
        many, one = self._spent
        return median(many[stage]), median(one[stage])

    @cached_property
    def _spent(self) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
        many, one = _Group(self._stages, MANY), _Group(self._stages, 1)
        for tick in range(_FILL + self._rounds):
            one.tick(tick)
            many.tick(tick)
        return many.spent, one.spent


class _Group:
    """Sessions that go through the stages together."""

    def __init__(self, stages: Mapping[str, Stage], n: int) -> None:
        self._sessions = {name: Sessions(stage, n) for name, stage in stages.items()}
        self._sessions[IMAGINED] = Sessions(stages["context"], n)
        self._seen = [_observation(seed) for seed in range(n)]
        self.spent: dict[str, list[float]] = {name: [] for name in self._sessions}

    def tick(self, number: int) -> None:
        seen = self._run("context", number, [{"observation": o} for o in self._seen])
        chunks = self._run("act", number, [{"scene": s["scene"], "kv": s["kv"]} for s in seen])
        given: list[dict[str, Payload]] = [{"actions": c["chunk"]} for c in chunks]
        if number == 0:
            given = [{**g, "latents": s["latents"]} for g, s in zip(given, seen, strict=True)]
        imagined = self._run("frames", number, given, Op.PREDICT if number else Op.INFER)
        self._run("decode", number, [{"latents": i["latents"]} for i in imagined])
        self._run(IMAGINED, number, [{"imagined": i["latents"]} for i in imagined])

    def _run(self, stage: str, number: int, inputs: Inputs, op: Op = Op.INFER) -> list[Outputs]:
        begin = time.thread_time()
        made = self._sessions[stage].tick(number, op, inputs, params={"frames": FRAMES})
        if number >= _FILL:
            self.spent[stage].append((time.thread_time() - begin) * 1e3)
        return made


def _observation(seed: int) -> Payload:
    env = PushT()
    try:
        arrays = dict(env.reset(seed))
    finally:
        env.close()
    del arrays["block_pose"]  # so that the T is read from the frame
    return Payload(PayloadKind.OBSERVATION, {**arrays, "executed": np.zeros((0, 2), np.float32)})
