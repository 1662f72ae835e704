"""A pipeline whose chunk says whose it is: of which session, of which seq, after how many ticks and after which.

Observations are an image and a mark: the client's key of the session, and the seq. What the client said, what the
server holds of the session (its seed) and what its committed state holds meet in one answer, so that an answer, an
observation or a state that came to another session, or a tick that was lost or doubled, is seen by the client at once.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..config import PipelineConfig
from ..connect.base import as_numpy
from ..loop.pipeline import CLIENT, Edge, Pipeline, Plan, StageDef
from ..messages import PayloadKind
from ..stage import CounterSpec, Outputs, Payload, StageItem, StateSpec
from ..types import ArraySpec, Op, SessionSpec, StageKind

NAME = "load-toy"
SEED, KEY, SEQ, TICKS, HISTORY, CHECKSUM = range(6)  # what an action's entries are
DIM, HORIZON, HZ = 6, 4, 5.0
MOST = 1 << 24  # every entry is below it: what float32 holds exactly
_PRIME = 65_521


def named(side: int = 320, cost_ms: float = 0.0) -> PipelineConfig:
    """The pipeline for a deployment: images ``uint8[side, side, 3]``; every batch takes ``cost_ms``."""
    options = {"side": side, "cost_ms": float(cost_ms)}
    return PipelineConfig(name=NAME, template=f"{__name__}:pipeline", options=options)


def pipeline(name: str, side: int = 320, cost_ms: float = 0.0) -> Pipeline:
    image = ArraySpec("image", "uint8", (side, side, 3), low=0, high=255)
    spec = SessionSpec(
        pipeline=name,
        observations=(image, ArraySpec("mark", "float32", (2,))),
        action=ArraySpec("action", "float32", (DIM,)),
        horizon=HORIZON,
        execution_horizon=1,
        control_hz=HZ,
        ops=(Op.INFER,),
    )
    return Pipeline(
        name=name,
        spec=lambda: spec,
        stages=(StageDef("say", StageKind.ACT, f"{__name__}:Say", {"cost_ms": cost_ms}),),
        edges=(Edge(CLIENT, "observation", "say", "observation", PayloadKind.OBSERVATION),),
        plans={Op.INFER: Plan(("say",), chunk="say.actions")},
    )


class Say:
    """The only stage."""

    name, kind, revision = "say", StageKind.ACT, "load-1"

    def __init__(self, cost_ms: float = 0.0) -> None:
        self._cost_s = 1e-3 * cost_ms

    def state_specs(self) -> Mapping[str, StateSpec]:
        return {"ticks": CounterSpec(), "history": CounterSpec()}

    def warm_up(self) -> None:
        """Nothing is made on first use."""

    def run(self, items: Sequence[StageItem]) -> Sequence[Outputs | Exception]:
        if self._cost_s:
            time.sleep(self._cost_s)
        return [self._say(item) for item in items]

    def _say(self, item: StageItem) -> Outputs:
        given = item.inputs["observation"].arrays
        key, seq = (int(v) for v in as_numpy(given["mark"]))
        seen = checksum(as_numpy(given["image"]))
        ticks, history = item.state.counter("ticks"), item.state.counter("history")
        ticks.set(ticks.get() + 1)
        history.set(after(history.get(), seq, seen))
        actions = np.empty((HORIZON, DIM), np.float32)
        actions[:] = (item.seed % MOST, key, seq, ticks.get(), history.get(), seen)
        return {"actions": Payload(PayloadKind.ACTIONS, {"actions": actions}, {"revision": self.revision})}


def checksum(image: NDArray[Any]) -> int:
    return zlib.crc32(memoryview(np.ascontiguousarray(image)).cast("B")) % MOST


def after(history: int, seq: int, seen: int) -> int:
    """The history that a tick makes of the one before it."""
    return (31 * history + 7 * seq + seen) % _PRIME
