from __future__ import annotations

import asyncio

import pytest

from omni_loop.clock import FakeClock, SystemClock


async def test_sleepers_wake_in_time_order_and_see_their_own_time() -> None:
    clock, woken = FakeClock(), []

    async def sleeper(seconds: float) -> None:
        await clock.sleep(seconds)
        woken.append((seconds, clock.now()))

    tasks = [asyncio.create_task(sleeper(s)) for s in (3.0, 1.0, 2.0)]
    await clock.advance(2.5)
    assert woken == [(1.0, 1.0), (2.0, 2.0)]
    assert clock.now() == 2.5
    await clock.advance(0.5)
    assert woken[-1] == (3.0, 3.0)
    await asyncio.gather(*tasks)


async def test_a_sleeper_that_sleeps_again_wakes_within_one_advance() -> None:
    clock, times = FakeClock(), []

    async def ticker() -> None:
        while True:
            await clock.sleep(1)
            times.append(clock.now())

    task = asyncio.create_task(ticker())
    await clock.advance(3)
    assert times == [1.0, 2.0, 3.0]
    task.cancel()


async def test_a_cancelled_sleeper_disturbs_nobody() -> None:
    clock = FakeClock()
    gone, kept = asyncio.create_task(clock.sleep(1)), asyncio.create_task(clock.sleep(1))
    await asyncio.sleep(0)
    gone.cancel()
    await clock.advance(1)
    assert gone.cancelled()
    assert kept.done()
    assert not kept.cancelled()


async def test_time_never_goes_back() -> None:
    clock = FakeClock(start_ns=5_000_000_000)
    with pytest.raises(ValueError, match="does not go back"):
        await clock.advance(-1)
    assert (clock.now(), clock.now_ns()) == (5.0, 5_000_000_000)


def test_the_system_clock_is_monotonic_in_one_unit() -> None:
    clock = SystemClock()
    before, middle, after = clock.now_ns(), clock.now(), clock.now_ns()
    assert before <= round(middle * 1e9) + 1000
    assert round(middle * 1e9) <= after + 1000
