"""The checks that must find planted bugs: the product's own contracts and the rows of its board, by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from omni_loop.messages import PayloadKind
from omni_loop.runner.state import Budget, StateManager
from omni_loop.stage import CounterSpec, Outputs, Payload, StageItem, StateSpec
from omni_loop.testing.rows import long, outputs, room, snapshots
from omni_loop.testing.stage_driver import Ask, Driver
from omni_loop.testing.state_contract import STAGES, StateContract
from omni_loop.testing.versions_contract import VersionsContract
from omni_loop.types import StageKind

SEED = 12  # runners on the event loop: what a seed draws happens again
NOBODY_GOES = 14  # of F6: nothing may be evicted


class _State(StateContract, VersionsContract):
    def make(self, max_sessions: int = 4) -> Any:
        return StateManager(STAGES, Budget(max_sessions, rewind_ticks=4))


def contract(name: str) -> Callable[[], None]:
    """One test of the state contract; at its end the books balance."""

    def check() -> None:
        suite = _State()
        test = getattr(suite, f"test_{name}")
        if "manager" not in inspect.signature(test).parameters:
            test()
            return
        manager = suite.make()
        manager.open("s")
        test(manager)
        manager.check()

    return check


def row(name: str, seed: int = SEED) -> Callable[[], None]:
    """A row of the board with a fixed seed, whole but short."""

    def check() -> None:
        if name == "L3":
            long.measure(seed, False)  # too short for its number; its bounds hold or raise
        elif name == "F6":
            room.measure(seed, False)
        elif name == "F7":
            outputs.measure(seed, True)
        else:
            snapshots.measure(seed, True)

    return check


class _Noisy:
    kind, revision = StageKind.ACT, "1"

    def state_specs(self) -> Mapping[str, StateSpec]:
        return {"ticks": CounterSpec()}

    def run(self, items: Sequence[StageItem]) -> Sequence[Outputs | Exception]:
        return [{"y": Payload(PayloadKind.TOKENS, {"y": torch.tensor(item.noise_seed("stage"))}, {})} for item in items]

    def warm_up(self) -> None:
        pass


def noise() -> None:
    """A pure function of seed, epoch and tick, and of each of them."""
    driver = Driver(_Noisy())
    drawn: list[int] = []
    for session, seed in (("a", 1), ("b", 2)):
        driver.open(session, seed)
        for _ in range(2):
            drawn += [int(driver.tick(session, tick, Ask({}))["y"].arrays["y"]) for tick in range(2)]
            driver.reset(session)
    assert len(set(drawn)) == 8, "noise is drawn twice"
    driver.open("c", 1)
    assert int(driver.run("c", 0, Ask({}))["y"].arrays["y"]) == drawn[0], "noise is not drawn again"
    driver.discard("c", 0)
    driver.close()


__all__ = ["contract", "noise", "row"]
