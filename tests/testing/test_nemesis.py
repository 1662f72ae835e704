from __future__ import annotations

import asyncio
import random

import pytest

from omni_loop.testing.nemesis import Fault, Nemesis, of_flips, of_network

from .test_fault_proxy import dialled, proxied, say


def drawn(seed: int, count: int) -> tuple[list[str], list[str]]:
    """What a nemesis did, in its own words and in those of its faults."""
    done: list[str] = []

    async def slow(draw: random.Random) -> None:
        await asyncio.sleep(0)
        done.append(f"slow {draw.random()}")

    faults = [
        Fault("fast", lambda draw: done.append(f"fast {draw.random()}"), lambda: done.append("over")),
        Fault("slow", slow),
    ]
    nemesis = Nemesis(random.Random(seed), faults, gap_s=(0, 0), lasts_s=(0, 0))

    async def run() -> None:
        for _ in range(count):
            await nemesis.strike()

    asyncio.run(run())
    return nemesis.log, done


def test_a_seed_draws_the_same_again() -> None:
    assert drawn(1, 20) == drawn(1, 20) != drawn(2, 20)
    log, done = drawn(1, 20)
    assert {"fast", "slow"} == set(log)
    assert done.count("over") == log.count("fast")


async def test_what_lasts_is_over_when_it_is_told_to_stop() -> None:
    lasting = asyncio.Event()
    nemesis = Nemesis(random.Random(3), [Fault("x", lambda draw: lasting.set(), lasting.clear)])
    over = asyncio.Event()
    running = asyncio.create_task(nemesis.run(over))
    await asyncio.wait_for(lasting.wait(), 10)
    over.set()
    await asyncio.wait_for(running, 10)
    assert not lasting.is_set()


async def test_a_fault_that_fails_is_undone_and_not_hidden() -> None:
    undone: list[str] = []

    def bad(draw: random.Random) -> None:
        raise ValueError("no such fault")

    nemesis = Nemesis(random.Random(3), [Fault("bad", bad, lambda: undone.append("it"))])
    with pytest.raises(ValueError, match="no such fault"):
        await nemesis.strike()
    assert undone == ["it"]


async def test_every_fault_of_a_network_happens_and_is_over() -> None:
    async with proxied() as proxy:
        for fault in (*of_network(proxy), *of_flips(proxy)):
            nemesis = Nemesis(random.Random(5), [fault], lasts_s=(0, 0.01))
            await nemesis.strike()
            proxy.cut()
            proxy.heal()
            async with dialled(proxy) as pair:
                assert await say(pair, b"whole") == b"whole", fault.name
