"""Whatever order sessions' commands arrive in: each session is answered as if it were alone, and once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_loop.errors import Reason
from omni_loop.messages import (
    CloseSession,
    Command,
    Commit,
    Discard,
    Failed,
    OpenSession,
    ResetSession,
    RunStage,
    Scalar,
)
from omni_loop.runner.runner import RunnerSettings
from omni_loop.runner.state import Budget

from .batch_toys import MS, Bed, Logged, Stepped

STAGES = ("p/a", "p/s")
SESSIONS = "abcd"
Script = Sequence["Tick"]


@dataclass(frozen=True)
class Tick:
    stages: tuple[str, ...]  # in this order, one transaction
    passes: int
    blocks: int
    fault: tuple[str, str]  # a parameter of the toy and its value
    commit: bool
    then: str  # "", "reset" or "reopen"


ticks = st.builds(
    Tick,
    stages=st.permutations(STAGES).flatmap(lambda s: st.sampled_from([tuple(s), tuple(s[:1])])),
    passes=st.integers(1, 4),
    blocks=st.integers(1, 2),
    fault=st.sampled_from(
        [("mode", "")] * 8
        + [("mode", m) for m in ("raise", "item", "typed", "exit", "nan", "nan_state")]
        + [("advance", "raise"), ("advance", "item"), ("begin", "yes")]
    ),
    commit=st.sampled_from([True, True, False]),
    then=st.sampled_from(["", "", "", "reset", "reopen"]),
)
scripts = st.lists(st.lists(ticks, max_size=4), min_size=len(SESSIONS), max_size=len(SESSIONS))


def commands(bed: Bed, session: str, script: Script) -> list[Command]:
    made: list[Command] = [OpenSession(session, 7, "push")]
    for number, tick in enumerate(script, 1):
        params: dict[str, Scalar] = {"passes": tick.passes, "blocks": tick.blocks, tick.fault[0]: tick.fault[1]}
        made += [bed.run(session, number, stage, **params) for stage in tick.stages]
        if tick.commit:
            made.append(Commit(session, 0, number, tick.stages))
        made.append(Discard(session, 0, number, tick.stages))
        if tick.then == "reset":
            made.append(ResetSession(session, 0, number))
        elif tick.then == "reopen":
            # Its inputs go with it, so that the rest of the script would fail: it ends here.
            return [*made, CloseSession(session)]
    return [*made, CloseSession(session)]


def answer(bed: Bed, command: Command, request: int) -> object:
    """What can be compared; payloads are read before the session closes."""
    report = bed.answers[request]
    if isinstance(report, Failed):
        return report.code, report.reason, report.text
    if isinstance(command, RunStage):
        payload = bed.connector.get(report.outputs["y"])
        return dict(payload.meta), [float(v) for v in payload.arrays["y"]]
    return "done"


def ended(answer: object) -> bool:
    return isinstance(answer, tuple) and answer[1] is Reason.CANCELLED


def play(bed: Bed, scripts: dict[str, Script], draw_step: object = None) -> dict[str, list[object]]:
    """Each session's answers, when their commands arrive in the order that ``draw_step`` says: next session, and
    how many steps follow."""
    queues = {s: commands(bed, s, script) for s, script in scripts.items()}
    asked: dict[int, tuple[str, Command]] = {}
    answers: dict[str, list[object]] = {s: [] for s in scripts}

    def step() -> None:
        for request in bed.step():
            session, command = asked.pop(request)
            answers[session].append(answer(bed, command, request))

    while any(queues.values()):
        ready = [s for s, queue in queues.items() if queue]
        session, steps = draw_step(ready) if callable(draw_step) else (ready[0], 50)
        command = queues[session].pop(0)
        asked[bed.add(command)] = (session, command)
        for _ in range(steps):
            step()
        bed.clock.now += steps * MS
    while (wait := bed.batcher.wait_s()) is not None:
        bed.clock.now += int(wait * 1e9) + 1
        step()
    assert not asked
    return answers


def bed(max_batch: int = 16, max_wait_ms: float = 0.0, blocks: int | None = None) -> Bed:
    made = RunnerSettings(
        budget=Budget(max_sessions=8, blocks=blocks), max_batch=max_batch, max_wait_ms=max_wait_ms, queue_ms=20
    )
    return Bed({"p/a": Logged, "p/s": Stepped}, made)


def close(bed: Bed) -> None:
    bed.connector.cleanup_session("")
    for session in SESSIONS:  # inputs of scripts that ended early
        bed.connector.cleanup_session(session)
    bed.close()


@settings(max_examples=60, deadline=None)
@given(scripts, st.sampled_from([1, 2, 16]), st.sampled_from([0.0, 3.0]), st.data())
def test_every_order_of_arrival_gives_what_each_session_gets_alone(
    drawn: list[Script], max_batch: int, max_wait_ms: float, data: st.DataObject
) -> None:
    given_scripts = dict(zip(SESSIONS, drawn, strict=True))
    together = bed(max_batch, max_wait_ms)
    got = play(together, given_scripts, lambda ready: (data.draw(st.sampled_from(ready)), data.draw(st.integers(0, 3))))
    close(together)
    for session, script in given_scripts.items():
        solo = bed(1)
        asked = commands(solo, session, script)
        kept = {c.tick for c in asked if isinstance(c, Commit)}
        for command, mine, want in zip(asked, got[session], play(solo, {session: script})[session], strict=True):
            if isinstance(command, RunStage) and command.tick not in kept and ended(mine):
                continue  # the tick's discard came before its turn
            if isinstance(want, tuple) and isinstance(want[0], dict):
                want = want[0], pytest.approx(want[1], rel=1e-4, abs=1e-4)
            assert mine == want
        close(solo)


@settings(max_examples=40, deadline=None)
@given(scripts, st.integers(4, 10), st.data())
def test_with_little_room_every_command_is_answered_once_and_the_books_balance(
    drawn: list[Script], blocks: int, data: st.DataObject
) -> None:
    scarce = bed(blocks=blocks)
    got = play(
        scarce,
        dict(zip(SESSIONS, drawn, strict=True)),
        lambda ready: (data.draw(st.sampled_from(ready)), data.draw(st.integers(0, 3))),
    )
    scarce.runner.state.check()
    assert all(answers[-1] == "done" for answers in got.values())
    close(scarce)
