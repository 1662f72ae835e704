"""What runs when, and beside whom: driven step by step, with a clock that stands still."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from omni_loop.connect.base import pending
from omni_loop.messages import (
    CloseSession,
    Discard,
    Done,
    ForkSession,
    PayloadKey,
    PayloadKind,
    ReleasePayloads,
    ResetSession,
    Scalar,
)
from omni_loop.runner.runner import RunnerSettings
from omni_loop.runner.state import Budget
from omni_loop.stage import Payload

from .batch_toys import MS, Bed, Clock, Logged, Stepped, error_of


def settings(max_batch: int = 16, max_wait_ms: float = 0.0) -> RunnerSettings:
    return RunnerSettings(budget=Budget(max_sessions=32), max_batch=max_batch, max_wait_ms=max_wait_ms)


@pytest.fixture
def bed() -> Iterator[Bed]:
    bed = Bed({"p/a": Logged, "p/b": Logged, "p/s": Stepped})
    yield bed
    bed.close()


near = partial(pytest.approx, rel=1e-5, abs=1e-5)  # sums over memory that lies otherwise


def log(bed: Bed, stage: str = "p/a") -> list[tuple[str, ...]]:
    toy = bed.runner.stages[stage]
    assert isinstance(toy, Logged)
    return toy.log


def alone(session: str, ticks: int, stage: str = "p/a", **params: Scalar) -> list[list[float]]:
    """What a session of its own is answered."""
    bed = Bed({stage: Stepped if stage == "p/s" else Logged})
    bed.open(session)
    answers = []
    for tick in range(1, ticks + 1):
        request = bed.add(bed.run(session, tick, stage, **params))
        bed.work()
        answers.append(bed.y(request))
        bed.commit(session, tick, stage)
        bed.work()
    bed.close()
    return answers


def test_sessions_meet_in_one_batch_and_get_what_they_get_alone(bed: Bed) -> None:
    bed.open("a", "b", "c")
    for tick in (1, 2, 3):
        requests = {s: bed.add(bed.run(s, tick)) for s in "abc"}
        assert bed.step() == list(requests.values())
        assert log(bed)[-1] == ("a", "b", "c")
        for session, request in requests.items():
            assert bed.y(request) == near(alone(session, 3)[tick - 1])
            bed.commit(session, tick)
        bed.work()
    assert bed.batcher.wait_s() is None


def test_a_sessions_commands_keep_their_order(bed: Bed) -> None:
    bed.open("a", "b")
    runs, commits = [], []
    for tick in (1, 2, 3):
        for session in "ab":
            runs.append(bed.add(bed.run(session, tick)))
            commits.append(bed.commit(session, tick))
    answered = [bed.step() for _ in range(6)]
    assert [len(requests) for requests in answered] == [2] * 6
    assert log(bed) == [("a", "b")] * 3
    assert [r for requests in answered[1::2] for r in requests] == commits
    for request, want in zip(runs[::2], alone("a", 3), strict=True):
        assert bed.y(request) == near(want)


def test_what_nobody_waits_for_is_reported_with_what_follows(bed: Bed) -> None:
    bed.open("a", "b")
    first = bed.add(replace(bed.run("a", 1), unhurried=True))
    second = bed.add(replace(bed.run("a", 1, "p/b"), unhurried=True))
    third = bed.add(bed.run("a", 1, "p/s"))
    other = bed.add(bed.run("b", 1))
    told = [bed.step()]
    while bed.batcher.wait_s() == 0:
        told.append(bed.step())
    assert log(bed)[-1] == ("a", "b")
    assert [reports for reports in told if reports] == [[other], [first, second, third]]


def test_an_unhurried_command_that_fails_or_that_nothing_follows_is_reported_at_once(bed: Bed) -> None:
    bed.open("a")
    lonely = bed.add(replace(bed.run("a", 1), unhurried=True))
    assert bed.step() == [lonely]
    bed.commit("a", 1)
    bed.work()
    held = bed.add(replace(bed.run("a", 2), unhurried=True))
    bad = bed.add(replace(bed.run("a", 2, "p/b", mode="raise"), unhurried=True))
    after = bed.add(bed.run("a", 2, "p/s"))
    assert bed.step() == []
    assert bed.step() == [held, bad]
    told = []
    while bed.batcher.wait_s() == 0:
        told += bed.step()
    assert told == [after]


def test_a_batch_takes_the_oldest_and_no_more_than_it_may() -> None:
    bed = Bed({"p/a": Logged}, settings(max_batch=2))
    bed.open(*"abcde")
    requests = [bed.add(bed.run(s, 1)) for s in "ecadb"]
    while bed.batcher.wait_s() == 0:
        bed.step()
    assert log(bed) == [("e", "c"), ("a", "d"), ("b",)]
    assert all(isinstance(bed.answers[r], Done) for r in requests)
    bed.close()


def test_a_stage_with_endless_work_starves_no_other(bed: Bed) -> None:
    bed.open("a", "b", "c")
    slow, other = bed.add(bed.run("b", 1, "p/s", passes=3)), bed.add(bed.run("c", 1, "p/b"))
    for tick in range(1, 10):
        bed.add(bed.run("a", tick))
        bed.add(Discard("a", 0, tick, ("p/a",)))
    while slow not in bed.answers:
        bed.step()
    assert other in bed.answers
    assert len(log(bed)) <= 4
    bed.work()


def test_a_session_that_floods_delays_nobody(bed: Bed) -> None:
    bed.open("a", "b")
    for tick in range(1, 6):
        bed.add(bed.run("a", tick))
        bed.commit("a", tick)
    late = bed.add(bed.run("b", 1))
    assert late in bed.step()
    bed.work()
    assert log(bed) == [("a", "b"), *[("a",)] * 4]


def test_stages_take_turns(bed: Bed) -> None:
    bed.open("a", "b", "c", "d")
    stepped = bed.add(bed.run("a", 1, "p/s", passes=4))
    first = [bed.add(bed.run(s, 1, stage)) for s, stage in (("b", "p/a"), ("c", "p/b"))]
    assert [bed.step() for _ in range(3)] == [[first[0]], [first[1]], []]
    late = bed.add(bed.run("d", 1, "p/a"))
    assert [bed.step() for _ in range(2)] == [[late], []]
    bed.work()
    assert log(bed, "p/s") == [("a",)] * 4
    assert bed.y(stepped) == near(alone("a", 1, "p/s")[0])


def test_items_join_between_passes_and_leave_when_they_are_finished(bed: Bed) -> None:
    bed.open("a", "b", "c")
    a = bed.add(bed.run("a", 1, "p/s", passes=3))
    bed.step()
    b = bed.add(bed.run("b", 1, "p/s", passes=3))
    assert bed.step() == []
    c = bed.add(bed.run("c", 1, "p/s", passes=1))
    assert sorted(bed.step()) == [a, c]
    assert bed.step() == [b]
    assert log(bed, "p/s") == [("a",), ("a", "b"), ("a", "b", "c"), ("b",)]
    for session, request in (("a", a), ("b", b), ("c", c)):
        assert bed.y(request) == near(alone(session, 1, "p/s")[0])


def test_a_job_that_runs_leaves_no_place_beyond_the_batch() -> None:
    bed = Bed({"p/s": Stepped}, settings(max_batch=2))
    bed.open(*"abc")
    for session, passes in (("a", 1), ("b", 2), ("c", 1)):
        bed.add(bed.run(session, 1, "p/s", passes=passes))
    bed.work()
    assert log(bed, "p/s") == [("a", "b"), ("b", "c")]
    bed.close()


def test_commands_go_between_passes_but_never_keep_them_from_running(bed: Bed) -> None:
    bed.open("a", "b")
    run = bed.add(bed.run("a", 1, "p/s", passes=3))
    assert bed.step() == []
    answered = []
    while run not in bed.answers:
        for _ in range(5):
            bed.add(ResetSession("b", 0))
        answered.append(len(bed.step()))
    assert answered == [5, 0, 10, 1]
    bed.work()


def test_what_a_command_waits_for_may_be_promised(bed: Bed) -> None:
    bed.open("a", "b")
    made: dict[str, int] = {}
    for session in "ab":
        command = bed.run(session, 1)
        bed.add(command)
        promise = pending(PayloadKey("p/a.y", session, 0, 1), PayloadKind.HIDDEN, "local")
        made[session] = bed.add(replace(bed.run(session, 1, "p/b"), inputs={"observation": promise}))
    bed.step()
    assert len(bed.step()) == 2
    assert log(bed, "p/b") == [("a", "b")]
    for session, request in made.items():
        assert bed.connector.get(bed.done(request).outputs["y"]).meta["ticks"] == 1
        bed.commit(session, 1, "p/a", "p/b")
    first = {s: alone(s, 1)[0] for s in "ab"}
    want = Bed({"p/b": Logged})
    want.open("a", "b")
    for session, request in made.items():
        command = want.run(session, 1, "p/b")
        payload = Payload(PayloadKind.HIDDEN, {"y": np.array(first[session], np.float32)})
        receipt = want.connector.put(command.inputs["observation"].key, payload)
        again = want.add(replace(command, inputs={"observation": receipt}))
        want.work()
        assert bed.y(request) == near(want.y(again))
        want.commit(session, 1, "p/b")
    want.work()
    want.close()
    bed.work()


def test_a_promise_nobody_kept_fails_before_anything_is_staged(bed: Bed) -> None:
    bed.open("a")
    bad = bed.add(bed.run("a", 1, mode="raise"))
    promise = pending(PayloadKey("p/a.y", "a", 0, 1), PayloadKind.HIDDEN, "local")
    late = bed.add(replace(bed.run("a", 1, "p/b"), inputs={"observation": promise}))
    bed.work()
    assert error_of(bed.answers[bad]) == ("internal", "stage_failed")
    assert error_of(bed.answers[late]) == ("unavailable", "expired")  # not ready
    assert not bed.runner.undecided


MODES = [
    ({"mode": "raise"}, "RuntimeError"),
    ({"mode": "exit"}, "SystemExit"),
    ({"mode": "item"}, "ValueError"),
    ({"mode": "typed"}, "not to my taste"),
    ({"mode": "nan"}, "not finite"),
    ({"mode": "nan_state"}, "not finite"),
]
STEPS = [
    ({"begin": True}, "ValueError"),
    ({"advance": "raise"}, "RuntimeError"),
    ({"advance": "exit"}, "SystemExit"),
    ({"advance": "item"}, "ValueError"),
]


@pytest.mark.parametrize(("params", "says"), MODES)
@pytest.mark.parametrize("bad", ["a", "c", "e"])
def test_a_bad_item_is_its_own_misfortune(bed: Bed, params: dict[str, Scalar], says: str, bad: str) -> None:
    ticks_of_everyone_else_are_as_if_alone(bed, "p/a", params, says, bad)


@pytest.mark.parametrize(("params", "says"), MODES + STEPS)
@pytest.mark.parametrize("bad", ["a", "e"])
def test_a_bad_job_is_its_own_misfortune(bed: Bed, params: dict[str, Scalar], says: str, bad: str) -> None:
    ticks_of_everyone_else_are_as_if_alone(bed, "p/s", {**params, "early": True}, says, bad)


def ticks_of_everyone_else_are_as_if_alone(
    bed: Bed, stage: str, params: dict[str, Scalar], says: str, bad: str
) -> None:
    """Five sessions; the second tick of ``bad`` fails and is discarded, then all go on."""
    bed.open(*"abcde")
    want = {s: alone(s, 3, stage) for s in "abcde"}
    for tick in (1, 2, 3):
        ok = [s for s in "abcde" if (s, tick) != (bad, 2)]
        requests = {s: bed.add(bed.run(s, tick, stage, **({} if s in ok else params))) for s in "abcde"}
        bed.work()
        for session in ok:
            at = tick - 1 if session != bad or tick == 1 else None  # its noise is of tick 3, its state of tick 1
            if at is not None:
                assert bed.y(requests[session]) == near(want[session][at]), (session, tick)
            bed.commit(session, tick, stage)
        if bad not in ok:
            report = bed.failed(requests[bad])
            assert says in report.text
            assert "secret" not in report.text
            bed.add(Discard(bad, 0, tick, (stage,)))
        bed.work()
    meta = bed.connector.get(bed.done(requests[bad]).outputs["y"]).meta
    assert (meta["ticks"], meta["total"]) == (2, 4)


@pytest.mark.parametrize(("sessions", "reason"), [("a", "bad_output"), ("abc", "stage_failed")])
def test_a_stage_that_answers_too_few_jobs_answers_none(bed: Bed, sessions: str, reason: str) -> None:
    bed.open(*sessions)
    requests = [bed.add(bed.run(s, 1, "p/s", advance="count")) for s in sessions]
    bed.work()
    assert {error_of(bed.answers[r]) for r in requests} == {("internal", reason)}


def test_a_stage_that_goes_on_in_its_tick_runs_alone(bed: Bed) -> None:
    """What is split is undone first, and that would take what the tick has staged before."""
    bed.open("a", "b")
    bed.add(bed.run("a", 1))
    bed.work()
    again, other = bed.add(bed.run("a", 1, x=0.5)), bed.add(bed.run("b", 1, mode="raise"))
    bed.work()
    assert log(bed) == [("a",), ("a",), ("b",)]
    assert bed.connector.get(bed.done(again).outputs["y"]).meta["ticks"] == 2
    assert bed.failed(other).reason == "stage_failed"


def test_nobody_joins_a_job_that_must_be_alone(bed: Bed) -> None:
    bed.open("a", "b")
    bed.add(bed.run("a", 1, "p/s", passes=1))
    bed.work()
    bed.add(bed.run("a", 1, "p/s", passes=2))
    bed.step()
    bed.add(bed.run("b", 1, "p/s", passes=1))
    bed.work()
    assert log(bed, "p/s") == [("a",), ("a",), ("a",), ("b",)]


def test_times_are_of_the_batch_and_waiting_is_until_it_begins() -> None:
    clock = Clock()
    bed = Bed({"p/a": lambda: Logged(clock, 40), "p/s": lambda: Stepped(clock, 10)}, settings(), clock)
    bed.open("a", "b")
    early = bed.add(bed.run("a", 1))
    clock.now += 5 * MS
    late = bed.add(bed.run("b", 1))
    behind = bed.add(bed.run("b", 1, "p/s", passes=3))
    bed.work()
    times = {r: (bed.done(r).queue_ms, bed.done(r).model_ms) for r in (early, late, behind)}
    assert times == {early: (5, 40), late: (0, 40), behind: (0, 30)}
    bed.close()


def test_a_commit_is_told_each_sessions_share_of_the_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    bed = Bed({"p/a": lambda: Logged(clock, 40), "p/s": lambda: Stepped(clock, 10)}, settings(), clock)
    costs: list[float] = []
    commit = bed.runner.state.commit

    def record(*args: Any) -> None:
        costs.append(args[-1])
        commit(*args)

    monkeypatch.setattr(bed.runner.state, "commit", record)
    bed.open("a", "b")
    for session in "ab":
        bed.add(bed.run(session, 1))
        bed.add(bed.run(session, 1, "p/s", passes=2))
        bed.commit(session, 1, "p/a", "p/s")
        bed.add(bed.run(session, 2))
        bed.commit(session, 2)
    bed.work()
    assert costs == [30, 30, 20, 20]
    bed.close()


def test_a_fork_is_in_the_order_of_parent_and_child(bed: Bed) -> None:
    bed.open("a", "b")
    bed.add(bed.run("a", 1))
    bed.commit("a", 1)
    fork = bed.add(ForkSession("a", "x"))
    child = bed.add(bed.run("x", 2))
    parent = bed.add(bed.run("a", 2))
    bed.commit("a", 2)
    refused = bed.add(ForkSession("b", "x"))
    itself = bed.add(ForkSession("a", "a"))
    bed.commit("x", 2)
    bed.add(CloseSession("x"))
    bed.work()
    assert isinstance(bed.answers[fork], Done)
    assert log(bed) == [("a",), ("x", "a")]
    assert bed.y(parent) == near(alone("a", 2)[1])
    assert bed.done(child).outputs.keys() == {"y", "kv"}
    assert error_of(bed.answers[refused]) == error_of(bed.answers[itself]) == ("failed_precondition", "busy")


def test_nothing_to_do_is_said_to_be_nothing(bed: Bed) -> None:
    assert bed.batcher.wait_s() is None
    assert bed.step() == []
    bed.add(ReleasePayloads(()))
    assert bed.batcher.wait_s() == 0
    assert bed.step() == [1]
    assert bed.batcher.wait_s() is None
