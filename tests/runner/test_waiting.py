"""How long a batch waits for others to join it, with a clock that stands still."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from omni_loop.messages import (
    CloseSession,
)
from omni_loop.runner.runner import RunnerSettings
from omni_loop.runner.state import Budget

from .batch_toys import MS, Bed, Logged


def settings(max_batch: int = 16, max_wait_ms: float = 0.0) -> RunnerSettings:
    return RunnerSettings(budget=Budget(max_sessions=32), max_batch=max_batch, max_wait_ms=max_wait_ms)


def log(bed: Bed, stage: str = "p/a") -> list[tuple[str, ...]]:
    toy = bed.runner.stages[stage]
    assert isinstance(toy, Logged)
    return toy.log


class TestWaiting:
    """``max_wait_ms`` is 8."""

    @pytest.fixture
    def bed(self) -> Iterator[Bed]:
        bed = Bed({"p/a": Logged}, settings(max_batch=3, max_wait_ms=8))
        bed.open(*"abcd")
        yield bed
        bed.close()

    def tick(self, bed: Bed, session: str, tick: int) -> None:
        bed.add(bed.run(session, tick))
        bed.commit(session, tick)
        bed.clock.now += 8 * MS
        bed.work()

    def test_nobody_waits_alone(self, bed: Bed) -> None:
        for tick in range(4):
            bed.add(bed.run("a", tick))
            assert bed.batcher.wait_s() == 0
            bed.work()
            bed.commit("a", tick)
            bed.work()

    def test_one_waits_for_another_that_was_active_lately(self, bed: Bed) -> None:
        self.tick(bed, "b", 1)
        first = bed.add(bed.run("a", 1))
        assert bed.batcher.wait_s() == 0.008
        assert bed.step() == []
        bed.clock.now += 5 * MS
        assert bed.batcher.wait_s() == 0.003
        second = bed.add(bed.run("b", 2))
        assert bed.batcher.wait_s() == 0
        assert bed.step() == [first, second]

    def test_one_waits_no_longer_than_allowed(self, bed: Bed) -> None:
        self.tick(bed, "b", 1)
        first = bed.add(bed.run("a", 1))
        bed.clock.now += 8 * MS
        assert bed.batcher.wait_s() == 0
        assert bed.step() == [first]

    def test_a_full_batch_waits_for_nobody(self, bed: Bed) -> None:
        for session in "abcd":
            self.tick(bed, session, 1)
        for session in "abc":
            assert bed.batcher.wait_s() != 0
            bed.add(bed.run(session, 2))
        assert bed.batcher.wait_s() == 0
        bed.work()
        assert log(bed)[-1] == ("a", "b", "c")

    def test_nobody_waits_for_one_that_is_gone_or_was_long_away(self, bed: Bed) -> None:
        self.tick(bed, "b", 1)
        bed.now(CloseSession("b"))
        bed.add(bed.run("a", 1))
        assert bed.batcher.wait_s() == 0
        bed.work()
        bed.commit("a", 1)
        bed.work()
        bed.clock.now += 1000 * MS
        bed.add(bed.run("c", 1))
        assert bed.batcher.wait_s() == 0
        bed.work()

    def test_the_last_ones_wait_for_nobody(self, bed: Bed) -> None:
        self.tick(bed, "b", 1)
        first = bed.add(bed.run("a", 1))
        assert [r.request for reports in bed.batcher.drain() for r in reports] == [first]
