"""The session log: bounded, honest about what it can still make anew, and shared by forks without being shared."""

from __future__ import annotations

import numpy as np
import pytest

from omni_loop.messages import PayloadKind
from omni_loop.session.log import ENTRY_BYTES, Base, Room, SessionLog, Version
from omni_loop.session.machine import Position
from omni_loop.stage import Payload

FED = {"a>b": Payload(PayloadKind.LATENTS, {"x": np.zeros(1)})}


def version(step: int, epoch: int = 0) -> Version:
    return Version(epoch, step, Position(step, step, 0))


def log_of(steps: int, limit: int = 1 << 20, keep: int = 2) -> SessionLog[str]:
    log: SessionLog[str] = SessionLog(limit, keep)
    for step in range(steps):
        log.add(version(step), 1, f"tick {step}", 100)
        log.keep(version(step), FED)
    return log


def test_entries_are_counted_with_what_they_take_beside_their_arrays() -> None:
    log = log_of(3)
    assert log.nbytes == 3 * (100 + ENTRY_BYTES)
    assert log.recomputable
    assert [e.work for e in log.until(version(1))] == ["tick 0", "tick 1"]
    assert log.steps() == [0, 1, 2]
    assert log.feedback(version(0)) is None  # only a replay can tell
    assert log.feedback(version(1)) == FED


def test_a_log_that_outgrows_its_bytes_keeps_only_the_last_versions() -> None:
    log = log_of(4, limit=3 * (100 + ENTRY_BYTES))
    assert not log.complete
    assert not log.recomputable
    assert (log.entries, log.nbytes) == ([], 0)
    assert log.steps() == [2, 3]
    log.add(version(4), 1, "tick 4", 100)
    assert log.nbytes == 0  # it stays incomplete until a reset or a snapshot
    log.clear()
    assert log.recomputable
    assert log.steps() == []


def test_a_log_that_outgrows_its_bytes_goes_on_from_the_last_snapshot() -> None:
    log = log_of(2, limit=3 * (100 + ENTRY_BYTES))
    base = Base("name", "digest", version(1))
    log.snapshotted(base)
    assert log.base is None  # while it is whole it needs no snapshot
    for step in (2, 3):
        log.add(version(step), 1, f"tick {step}", 100)
    assert (log.base, log.complete, log.recomputable) == (base, True, False)
    assert [e.work for e in log.entries] == ["tick 2", "tick 3"]
    assert log.nbytes == 2 * (100 + ENTRY_BYTES)
    for step in (4, 5):
        log.add(version(step), 1, f"tick {step}", 100)
    assert not log.complete  # the same snapshot does not help twice
    log.snapshotted(Base("name", "other", version(5)))
    assert log.complete
    assert log.until(None) == []


@pytest.mark.parametrize(("to", "complete"), [(2, True), (1, True), (0, False)])
def test_going_back_behind_the_base_makes_the_log_incomplete(to: int, complete: bool) -> None:
    log = log_of(0)
    log.clear(Base("name", "digest", version(1)))
    for step in (2, 3):
        log.add(version(step), 1, f"tick {step}", 0)
    log.cut(version(to))
    assert log.complete is complete
    assert [e.work for e in log.entries] == (["tick 2"] if to == 2 else [])
    assert log.nbytes == ENTRY_BYTES * (to == 2)


def test_the_latest_version_of_a_step_is_found() -> None:
    log = log_of(3)
    log.cut(version(1))
    again = Version(1, 0, Position(1, 1, 0))
    log.add(again, 1, "again", 0)
    assert log.find(1) == again
    assert log.find(2) is None
    assert [e.work for e in log.until(None)] == ["tick 0", "tick 1", "again"]


def test_a_child_has_its_own_log_of_the_same_past() -> None:
    log = log_of(2)
    child = log.forked()
    child.add(version(2), 2, "child's", 0)
    log.cut(version(0))
    assert [e.work for e in child.entries] == ["tick 0", "tick 1", "child's"]
    assert [e.work for e in log.entries] == ["tick 0"]
    assert child.feedback(version(1)) is None  # what the runners keep to go back to is the parent's


def test_without_bytes_or_versions_nothing_is_kept() -> None:
    log = log_of(3, limit=0, keep=0)
    assert not log.complete
    assert log.steps() == []


def test_all_logs_together_are_bounded_and_the_one_that_grows_gives_way() -> None:
    room = Room(3 * (100 + ENTRY_BYTES))
    one: SessionLog[str] = SessionLog(1 << 20, 2, room)
    other: SessionLog[str] = SessionLog(1 << 20, 2, room)
    for step in range(2):
        one.add(version(step), 1, "one", 100)
    other.add(version(0), 1, "other", 100)
    assert room.used == room.limit
    other.add(version(1), 1, "other", 100)
    assert (one.recomputable, other.recomputable) == (True, False)
    assert room.used == one.nbytes == 2 * (100 + ENTRY_BYTES)
    one.clear()
    assert room.used == 0


def test_what_a_child_shares_takes_its_bytes_once() -> None:
    room = Room(1 << 20)
    parent: SessionLog[str] = SessionLog(1 << 20, 2, room)
    for step in range(3):
        parent.add(version(step), 1, "parent", 100)
    used, child = room.used, parent.forked()
    assert room.used == used == child.nbytes
    child.add(version(3), 1, "child", 100)
    child.cut(version(1))
    assert room.used == used
    parent.clear()
    assert room.used == child.nbytes == 2 * (100 + ENTRY_BYTES)
    child.snapshotted(Base("s", "d", version(1)))
    child.clear()
    assert room.used == 0
