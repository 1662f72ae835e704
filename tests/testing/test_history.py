"""The model takes what a correct server can have said, and names what none can have said."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from omni_loop.client import stream as client
from omni_loop.errors import Reason, StateError
from omni_loop.testing.board import Broken
from omni_loop.testing.history import Answered, Attached, Ended, Event, History, Sent, Turned, check_all, toy_state
from omni_loop.types import ActionChunk, TickResult, Timings


def of(*events: Event) -> History:
    return History(events=list(events))


def tick(seq: int, state: int | None = None, connection: int = 1, epoch: int = 1, digest: str = "") -> Answered:
    return Answered(connection, seq, "tick", epoch, digest=(digest or str(seq)).encode(), state=state)


def error(seq: int, reason: Reason, connection: int = 1) -> Answered:
    return Answered(connection, seq, "error", reason=reason)


def skipped(seq: int, reason: str, connection: int = 1) -> Answered:
    return Answered(connection, seq, "skipped", reason=reason)


ON = Attached(1, 1, 1, 0, 0)
S1, S2, S3 = Sent(1, 1), Sent(1, 2), Sent(1, 3)
CUT, WHOLE = Ended(1, whole=False), Ended(1, whole=True)
AGAIN = Attached(2, 1, 2, 2, 1, pending=(2,), last_received=1)

CAN_BE: dict[str, Sequence[Event]] = {
    "nothing": (),
    "in order": (ON, S1, S2, tick(1, 1), tick(2, 2), WHOLE),
    "a gap": (ON, S1, S3, tick(1, 1), tick(3, 2), WHOLE),
    "a retry of one that failed": (ON, S1, error(1, Reason.STAGE_FAILED), S1, tick(1, 1), WHOLE),
    "asked twice": (ON, S1, S1, skipped(1, "duplicate_in_flight"), tick(1, 1), WHOLE),
    "asked again": (ON, S1, tick(1, 1), S1, tick(1, 1), WHOLE),
    "no longer kept": (ON, S1, tick(1, 1), S1, error(1, Reason.STALE_SEQ), WHOLE),
    "one in the outbox was replaced": (ON, S1, S2, skipped(1, "superseded"), tick(2, 2), WHOLE),
    "one that waited was replaced": (ON, S1, S2, skipped(1, "superseded"), tick(2, 1), WHOLE),
    "cut and given again": (ON, S1, S2, tick(1, 1), CUT, AGAIN, tick(2, 2, 2), Ended(2, whole=True)),
    "cut and asked again besides": (ON, S1, S2, tick(1, 1), CUT, AGAIN, Sent(2, 2), tick(2, 2, 2), tick(2, 2, 2)),
    "a reset": (ON, S1, tick(1, 1), Turned(1, 2), S2, tick(2, 1, epoch=2), WHOLE),
    "a rewind": (ON, S1, tick(1, 1), S2, tick(2, 2), Turned(1, 2, fresh=False), S3, tick(3, 2, epoch=2), WHOLE),
    "a reset seen from two sides": (ON, S1, Turned(2, 2), tick(1, 1), WHOLE),
    "fenced": (ON, S1, tick(1, 1), Attached(2, 1, 2, 1, 1), S2, error(2, Reason.FENCED), Ended(1, False, fenced=True)),
    "lost with a fenced stream": (ON, S1, Attached(2, 1, 2, 0, 0), Ended(1, False, fenced=True)),
}

CANNOT_BE: dict[str, tuple[str, Sequence[Event]]] = {
    "a phantom": ("seq 2 was answered (tick), and nobody sent it", (ON, S1, tick(1, 1), tick(2, 2))),
    "answered twice": ("sent 1 times on a connection and answered 2", (ON, S1, tick(1, 1), tick(1, 1))),
    "answered and refused": ("answered 2 times", (ON, S1, tick(1, 1), error(1, Reason.STALE_SEQ))),
    "computed twice": ("seq 1 was answered in two ways", (ON, S1, S1, tick(1, 1), tick(1, 1, digest="other"))),
    "run again": ("answered, and then refused: stage_failed", (ON, S1, S1, tick(1, 1), error(1, Reason.STAGE_FAILED))),
    "never answered": ("seq 1 was sent and never answered", (ON, S1)),
    "never answered on a whole stream": ("answered 1 times", (ON, S1, S1, tick(1, 1), WHOLE)),
    "pending for ever": ("seq 2 was pending", (ON, S2, CUT, replace(AGAIN, last_received=None), Ended(2, True))),
    "a commit lost": ("from seq 1 to 2 of epoch 1 0 ticks", (ON, S1, S2, tick(1, 1), tick(2, 1))),
    "a commit doubled": ("2 ticks were committed, of 1 to 1", (ON, S1, S2, tick(1, 1), tick(2, 3))),
    "a failed one committed": (
        "from seq 0 to 2 of epoch 1 2 ticks",
        (ON, S1, error(1, Reason.STAGE_FAILED), S2, tick(2, 2)),
    ),
    "another order": ("from seq 0 to 1 of epoch 1 2 ticks", (ON, S1, S2, tick(1, 2), tick(2, 1))),
    "an open session that stands elsewhere": ("from seq 0 to 1", (ON, S1, tick(1, 7))),
    "a reset that keeps state": (
        "of epoch 2 2 ticks",
        (ON, S1, tick(1, 1), Turned(1, 2), S2, tick(2, 2, epoch=2)),
    ),
    "an old epoch after a reset": ("answered in epoch 1 on a connection at epoch 2", (S1, Turned(1, 2), tick(1, 1))),
    "an answer of two epochs": ("in epochs 1 and 2", (ON, S1, S1, tick(1, 1), tick(1, 1, epoch=2))),
    "a reset that begins nothing": ("epoch 1 began after epoch 1", (ON, Turned(1, 1))),
    "an attachment of an old epoch": ("of epoch 1, after epoch 2", (ON, Turned(1, 2), Attached(2, 1, 2, 0, 0))),
    "an attachment that is not newer": ("attachment 1 came after", (ON, Attached(2, 1, 1, 0, 0))),
    "attached twice": ("connection 1 attached twice", (ON, replace(ON, attachment=2))),
    "pending, and never sent": ("seq 2 is pending, and nobody sent it", (ON, S1, CUT, AGAIN)),
    "a session that forgot": ("seq 1 was answered, and the session", (S1, tick(1, 1), Attached(2, 1, 2, 0, 0))),
    "a second writer": (
        "seq 2 of a fenced stream was computed",
        (ON, S1, tick(1, 1), Attached(2, 1, 2, 1, 1), S2, tick(2, 2)),
    ),
    "life after the end": ("goes on after its end", (ON, WHOLE, S1)),
}


@pytest.mark.parametrize("events", CAN_BE.values(), ids=CAN_BE)
def test_what_can_be(events: Sequence[Event]) -> None:
    of(*events).check()


@pytest.mark.parametrize(("says", "events"), CANNOT_BE.values(), ids=CANNOT_BE)
def test_what_cannot_be(says: str, events: Sequence[Event]) -> None:
    with pytest.raises(Broken) as found:
        check_all([of(*CAN_BE["in order"]), of(*events)])
    assert says in str(found.value)


def test_a_client_that_is_not_done_is_owed_nothing_yet() -> None:
    of(ON, S1, S2, tick(1, 1)).check(complete=False)


def toy(seed: int, seq: int, committed: int, timings: Timings | None = None) -> TickResult:
    actions = np.array([[seed + committed, 100 * seq]], np.float32)
    return TickResult(seq, 1, ActionChunk(seq, seq, actions, 1), timings=timings or Timings())


def test_reads_what_a_stream_yields() -> None:
    history = History(toy_state(5000))
    connection = history.connect()
    history.attached(Attached(connection, 1, 1, 0, 0))
    for seq in range(1, 5):
        history.sent(connection, seq)
    events: list[client.Event] = [
        toy(5000, 1, 1),
        client.Skipped(2, "superseded"),
        client.Refused(0, StateError("of the stream")),
        client.Refused(3, StateError("no")),
        client.Draining("soon"),
        toy(5000, 4, 2),
        client.WasReset(2),
        client.WasRewound(3, 0),
    ]
    for event in events:
        history.got(connection, event)
    history.ended(connection, whole=True)
    history.check()
    answers = [e for e in history.events if isinstance(e, Answered)]
    assert [(a.seq, a.kind, a.state) for a in answers] == [
        (1, "tick", 1),
        (2, "skipped", None),
        (3, "error", None),
        (4, "tick", 2),
    ]
    assert [e.epoch for e in history.events if isinstance(e, Turned)] == [2, 3]


def test_a_chunk_of_another_session_or_seq_is_found() -> None:
    history = History(toy_state(5000))
    history.sent(1, 1)
    history.got(1, toy(9000, 1, 1))
    with pytest.raises(Broken, match="4001 ticks were committed"):
        history.check()
    with pytest.raises(Broken, match="holds a chunk of seq 2"):
        history.got(1, replace(toy(5000, 2, 1), seq=1))


@pytest.mark.parametrize("bytewise", [True, False])
def test_timings_tell_two_computations_apart(bytewise: bool) -> None:
    history = History(bytewise=bytewise)
    for ms in (1.0, 2.0):
        history.sent(1, 1)
        history.got(1, toy(0, 1, 1, Timings(ms)))
    if bytewise:
        with pytest.raises(Broken, match="two ways"):
            history.check()
    else:
        history.check()


def test_drawn_sessions_and_one_thing_wrong_with_each() -> None:
    """A correct server's histories are taken; one commit more, one answer less or one of another kind is found."""
    for seed in range(200):
        draw = random.Random(seed)
        history, committed = History(), 0
        for seq in range(1, draw.randint(3, 12)):
            history.sent(1, seq)
            fate = draw.choice(["tick", "tick", "error", "superseded"])
            if fate == "tick":
                committed += 1
                history.events.append(tick(seq, committed))
            elif fate == "error":
                history.events.append(error(seq, Reason.STAGE_FAILED))
            else:
                committed += draw.randint(0, 1)
                history.events.append(skipped(seq, "superseded"))
        history.sent(1, 99)
        history.events += [tick(99, committed + 1), WHOLE]
        history.check()
        spoiled = History(events=list(history.events))
        match draw.randrange(3):
            case 0:
                spoiled.events[-2] = tick(99, committed + 20)
            case 1:
                del spoiled.events[-2]
            case _:
                spoiled.events.insert(-1, error(99, Reason.STAGE_FAILED))
        with pytest.raises(Broken):
            spoiled.check()
