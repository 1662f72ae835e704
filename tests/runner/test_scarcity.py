"""Items that find no room in a pool: they wait for others to settle, are tried again, and are refused in time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from omni_loop.messages import CloseSession, Discard, Done
from omni_loop.runner.runner import RunnerSettings
from omni_loop.runner.state import Budget

from .batch_toys import MS, Bed, Greedy, Logged, Stepped, error_of

NO_ROOM = ("resource_exhausted", "out_of_blocks")


def scarce(blocks: int, **stages: type[Logged]) -> Bed:
    settings = RunnerSettings(budget=Budget(max_sessions=8, blocks=blocks), queue_ms=100)
    return Bed({f"p/{name}": kind for name, kind in stages.items()}, settings)


@pytest.fixture
def bed() -> Iterator[Bed]:
    """A pool of six blocks."""
    bed = scarce(6, a=Logged, b=Logged)
    bed.open(*"abcd")
    yield bed
    bed.close()


def log(bed: Bed, stage: str = "p/a") -> list[tuple[str, ...]]:
    toy = bed.runner.stages[stage]
    assert isinstance(toy, Logged)
    return toy.log


def test_who_finds_no_room_waits_until_others_have_decided(bed: Bed) -> None:
    held = bed.add(bed.run("a", 1, blocks=4))
    bed.work()
    late = bed.add(bed.run("b", 1, blocks=4))
    bed.work()
    assert bed.done(held).outputs
    assert late not in bed.answers
    assert bed.batcher.wait_s() == pytest.approx(0.1)
    bed.clock.now += 60 * MS
    assert bed.batcher.wait_s() == pytest.approx(0.04)
    bed.add(Discard("a", 0, 1, ("p/a",)))
    bed.work()
    assert bed.connector.get(bed.done(late).outputs["y"]).meta["ticks"] == 1
    bed.commit("b", 1)
    bed.work()


def test_who_waits_too_long_is_told_when_to_come_back(bed: Bed) -> None:
    bed.add(bed.run("a", 1, blocks=4))
    late = bed.add(bed.run("b", 1, blocks=4))
    bed.work()
    bed.clock.now += 100 * MS
    assert bed.batcher.wait_s() == 0
    bed.work()
    report = bed.failed(late)
    assert error_of(report) == NO_ROOM
    assert report.retryable
    assert report.retry_after_ms > 0
    assert report.missing_bytes > 0
    assert bed.batcher.wait_s() is None
    bed.commit("a", 1)
    bed.work()


def test_being_tried_in_vain_does_not_prolong_the_wait(bed: Bed) -> None:
    bed.add(bed.run("a", 1, blocks=4))
    late = bed.add(bed.run("b", 1, blocks=4))
    bed.work()
    bed.clock.now += 60 * MS
    bed.now(CloseSession("d"))
    assert log(bed)[-1] == ("b",)
    assert late not in bed.answers
    bed.clock.now += 40 * MS
    bed.work()
    assert error_of(bed.answers[late]) == NO_ROOM
    bed.commit("a", 1)
    bed.work()


def test_who_could_wait_for_nobody_is_refused_at_once(bed: Bed) -> None:
    bed.add(bed.run("a", 1, blocks=4))
    bed.work()
    bed.commit("a", 1)
    bed.work()
    late = bed.add(bed.run("b", 1, blocks=4))
    bed.work()
    assert error_of(bed.answers[late]) == NO_ROOM
    assert bed.runner.state.stats().pools["p/a.kv"].free == 2
    again = bed.add(bed.run("b", 2, blocks=2))
    bed.work()
    assert isinstance(bed.answers[again], Done)


def test_the_oldest_is_tried_first_and_one_after_another(bed: Bed) -> None:
    bed.add(bed.run("a", 1, blocks=4))
    bed.work()
    waiting = [bed.add(bed.run(s, 1, blocks=n)) for s, n in (("b", 3), ("c", 3), ("d", 4))]
    bed.work()
    assert not any(r in bed.answers for r in waiting)
    del log(bed)[:]
    bed.now(CloseSession("a"))
    assert log(bed) == [("b",), ("c",), ("d",)]
    assert [r in bed.answers for r in waiting] == [True, True, False]
    bed.add(Discard("b", 0, 1, ("p/a",)))
    bed.add(Discard("c", 0, 1, ("p/a",)))
    bed.work()
    assert isinstance(bed.answers[waiting[2]], Done)
    bed.add(Discard("d", 0, 1, ("p/a",)))
    bed.work()


def test_two_that_wait_for_each_other_are_not_both_kept_waiting() -> None:
    """Each has something staged, but both wait: the younger is refused, and then the older has its chance."""
    bed = scarce(4, a=Logged, b=Logged)
    bed.open("a", "b")
    first = [bed.add(bed.run("a", 1, "p/a", blocks=3)), bed.add(bed.run("b", 1, "p/b", blocks=3))]
    bed.work()
    assert all(isinstance(bed.answers[r], Done) for r in first)
    older, younger = bed.add(bed.run("a", 1, "p/b", blocks=3)), bed.add(bed.run("b", 1, "p/a", blocks=3))
    bed.work()
    assert older not in bed.answers
    assert error_of(bed.answers[younger]) == NO_ROOM
    bed.add(Discard("b", 0, 1, ("p/a", "p/b")))
    bed.work()
    assert isinstance(bed.answers[older], Done)
    bed.commit("a", 1, "p/a", "p/b")
    bed.work()
    bed.close()


def test_those_that_starved_each_other_are_tried_alone() -> None:
    bed = scarce(4, a=Greedy)
    bed.open("a", "b", "c")
    requests = {s: bed.add(bed.run(s, 1, blocks=3)) for s in "abc"}
    bed.work()
    assert log(bed)[0] == ("a", "b", "c")
    assert all(len(together) == 1 for together in log(bed)[1:])
    assert isinstance(bed.answers[requests["a"]], Done)
    for session in "abc":
        assert isinstance(bed.answers[requests[session]], Done)
        bed.add(Discard(session, 0, 1, ("p/a",)))
        bed.work()
    bed.close()


def test_jobs_that_find_no_room_begin_anew_when_there_is() -> None:
    bed = scarce(6, s=Stepped)
    bed.open("a", "b", "c")
    requests = {s: bed.add(bed.run(s, 1, "p/s", blocks=4, passes=2)) for s in "abc"}
    bed.work()
    assert isinstance(bed.answers[requests["a"]], Done)
    for session in "abc":
        meta = bed.connector.get(bed.done(requests[session]).outputs["y"]).meta
        assert (meta["ticks"], meta["total"]) == (1, 8)
        bed.add(Discard(session, 0, 1, ("p/s",)))
        bed.work()
    bed.close()


def test_the_end_waits_for_no_room(bed: Bed) -> None:
    bed.add(bed.run("a", 1, blocks=4))
    late = [bed.add(bed.run(s, 1, blocks=4)) for s in "bc"]
    behind = bed.commit("b", 1)
    reports = {r.request: r for reports in bed.batcher.drain() for r in reports}
    assert [error_of(reports[r])[1] for r in (*late, behind)] == ["out_of_blocks", "out_of_blocks", "stale_seq"]


def test_what_goes_on_in_its_tick_is_not_tried_again(bed: Bed) -> None:
    bed.add(bed.run("a", 1, blocks=2))
    bed.add(bed.run("b", 1, blocks=2))
    bed.work()
    again = bed.add(bed.run("a", 1, blocks=4))
    bed.work()
    assert error_of(bed.answers[again]) == NO_ROOM
    bed.add(Discard("b", 0, 1, ("p/a",)))
    bed.work()
