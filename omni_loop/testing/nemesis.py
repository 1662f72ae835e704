"""Draws faults from a seed and makes them, one after the other, while something is to hold.

The name is Jepsen's (Kingsbury). What it did is in :attr:`Nemesis.log`, so that a failure can say what led to it.
"""

from __future__ import annotations

import asyncio
import inspect
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .fault_proxy import Direction, FaultProxy

_DIRECTIONS: tuple[Direction, ...] = ("up", "down")


@dataclass(frozen=True, slots=True)
class Fault:
    """``begin`` makes it, at once or as a coroutine; ``end`` undoes what lasts."""

    name: str
    begin: Callable[[random.Random], Any]
    end: Callable[[], Any] | None = None


@dataclass
class Nemesis:
    """``gap_s`` and ``lasts_s`` bound the drawn times between faults and of those that last."""

    draw: random.Random
    faults: Sequence[Fault]
    gap_s: tuple[float, float] = (0.0, 0.05)
    lasts_s: tuple[float, float] = (0.0, 0.1)
    log: list[str] = field(default_factory=list)

    async def run(self, until: asyncio.Event) -> None:
        """Until told to stop; what lasts is over then."""
        while not until.is_set():
            await self.strike()
            await asyncio.sleep(self.draw.uniform(*self.gap_s))

    async def strike(self) -> str:
        """One fault, over when this returns; its name."""
        fault = self.draw.choice(list(self.faults))
        self.log.append(fault.name)
        try:
            await _done(fault.begin(self.draw))
            if fault.end is not None:
                await asyncio.sleep(self.draw.uniform(*self.lasts_s))
        finally:
            if fault.end is not None:
                await _done(fault.end())
        return fault.name


async def _done(made: Any) -> None:
    if inspect.isawaitable(made):
        await made


def of_network(proxy: FaultProxy, span: int = 4096) -> list[Fault]:
    """Every fault of ``proxy`` but flips; cuts come within ``span`` bytes."""

    def cut_after(draw: random.Random) -> None:
        proxy.cut_after(draw.randrange(span), draw.choice(_DIRECTIONS))

    def refuse_and_cut(draw: random.Random) -> None:
        proxy.refuse()
        proxy.cut()

    return [
        Fault("cut", lambda draw: proxy.cut()),
        Fault("cut after", cut_after),
        Fault("half-close", lambda draw: proxy.half_close(draw.choice(_DIRECTIONS))),
        Fault("freeze", lambda draw: proxy.freeze(), proxy.heal),
        Fault("delay", lambda draw: proxy.delay(draw.uniform(1, 80)), proxy.heal),
        Fault("throttle", lambda draw: proxy.throttle(draw.uniform(10_000, 200_000)), proxy.heal),
        Fault("refuse and cut", refuse_and_cut, proxy.heal),
    ]


def of_flips(proxy: FaultProxy, span: int = 2048) -> list[Fault]:
    """One bit of what passes next, either way."""

    def flip(draw: random.Random) -> None:
        proxy.flip(draw.randrange(span), draw.choice(_DIRECTIONS), draw.randrange(8))

    return [Fault("flip", flip)]
