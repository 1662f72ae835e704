"""Plain values that a session's state must hold, for :mod:`.test_state_machine`: one number a block."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from omni_loop.runner.stage_state import Key, StageState
from omni_loop.stage import CounterSpec, KVSpec, RingSpec, StateSpec, TensorSpec

KV = KVSpec(layers=1, kv_heads=1, head_dim=1, block_size=1, window_blocks=2, sink_blocks=1, scratch_blocks=2)
STAGES: dict[str, dict[str, StateSpec]] = {
    name: {"kv": KV, "mean": TensorSpec((1,)), "recent": RingSpec((1,), 2), "ticks": CounterSpec(3)}
    for name in ("p/a", "p/b")
}
KEEP, BLOCKS = 3, 9
PREFIX = 1000  # the value of the one block everybody may begin with
NAMES = ("s", "t", "u")  # few, so that much happens to each


@dataclass(frozen=True)
class Values:
    """Never changed in place."""

    sink: tuple[int, ...] = ()
    window: tuple[int, ...] = ()
    total: int = 0
    mean: int = 0
    recent: tuple[int, ...] = ()
    ticks: int = 3

    def append(self, values: list[int]) -> Values:
        into_sink = max(0, 1 - self.total)
        window = (*self.window, *values[into_sink:])[-2:]
        return replace(self, sink=(*self.sink, *values[:into_sink]), window=window, total=self.total + len(values))

    def truncate(self, total: int) -> Values:
        window = self.window[: max(0, len(self.window) - (self.total - total))]
        return replace(self, sink=self.sink[:total], window=window, total=total)


@dataclass
class Model:
    """One stage: the versions kept, the last one committed, and what is staged."""

    versions: list[tuple[Key, Values]]
    staged: Values | None = None
    tick: int | None = None
    fresh: int = 0

    @property
    def committed(self) -> Values:
        return self.versions[-1][1]

    def commit(self, key: Key) -> None:
        if self.staged is not None:
            if self.versions[-1][0] == key:
                del self.versions[-1]
                self.versions.append((key, self.staged))
            else:
                self.versions.append((key, self.staged))
                del self.versions[: -KEEP - 1]
        self.discard()

    def discard(self) -> None:
        self.staged, self.tick, self.fresh = None, None, 0


@dataclass
class Life:
    """One session."""

    stages: dict[str, Model]
    epoch: int = 0
    clock: int = 0  # the last tick committed
    pins: int = 0
    recomputable: bool = False
    evicted: bool = False
    expired: bool = False

    @property
    def may_go(self) -> bool:
        """Under the policy "recomputable"."""
        return self.recomputable or self.expired

    @property
    def undecided(self) -> bool:
        return any(model.tick is not None for model in self.stages.values())

    def reset(self) -> None:
        self.stages = {stage: Model([((self.epoch, -1), Values())]) for stage in STAGES}
        self.evicted = self.recomputable = self.expired = False


def fresh(epoch: int = 0) -> Life:
    life = Life({}, epoch)
    life.reset()
    return life


def facts(state: StageState) -> dict[str, Any]:
    kv = state.kv("kv")
    return {
        "lengths": (kv.length, kv.total, kv.sink_length),
        "mean": int(state.tensor("mean").get()),
        "recent": tuple(int(x) for x in state.ring("recent").items()),
        "ticks": state.counter("ticks").get(),
    }


def wanted(values: Values) -> dict[str, Any]:
    lengths = (len(values.sink) + len(values.window), values.total, len(values.sink))
    return {"lengths": lengths, "mean": values.mean, "recent": values.recent, "ticks": values.ticks}


def block_of(values: list[int]) -> np.ndarray[Any, Any]:
    return np.array(values, np.float32)[None, None, :, None, None].repeat(2, 1)
