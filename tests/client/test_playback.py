"""Control periods one by one: a ramp is played without a skip and without a repeat, whatever the latency does."""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_loop.client.playback import Playback, Played, Sending
from omni_loop.errors import InvalidInput, TensorError
from omni_loop.types import ActionChunk, ArraySpec, Op, SessionSpec

SPEC = SessionSpec(
    pipeline="ramp",
    observations=(ArraySpec("state", "float32", (1,)),),
    action=ArraySpec("action", "float32", (1,), low=-5, high=10_000),
    horizon=8,
    execution_horizon=4,
    control_hz=10,
    ops=(Op.INFER,),
)
NOTHING = {"state": np.zeros(1, np.float32)}


def ramp(seq: int, step: int) -> ActionChunk:
    """The action for a step is its number."""
    return ActionChunk(seq, step, np.arange(step, step + 8, dtype=np.float32)[:, None], 0)


@dataclass
class Robot:
    """A control loop whose answers come after so many periods as ``latencies`` say, one after another."""

    playback: Playback
    latencies: deque[int]
    played: list[Played] = field(default_factory=list)
    sent: list[Sending] = field(default_factory=list)
    due: deque[tuple[int, Sending]] = field(default_factory=deque)

    def period(self) -> None:
        self.playback.see(NOTHING)
        if (sending := self.playback.due()) is not None:
            self.sent.append(sending)
            takes = self.latencies.popleft() if self.latencies else 1
            last = self.due[-1][0] if self.due else 0  # answers come in order
            self.due.append((max(self.playback.period + takes, last), sending))
        while self.due and self.due[0][0] <= self.playback.period:
            _, sending = self.due.popleft()
            self.playback.answered(sending, ramp(len(self.sent), sending.seen.step))
        self.played.append(self.playback.next())

    @property
    def actions(self) -> list[float]:
        return [float(p.action[0]) for p in self.played if p.source == "chunk" and p.action is not None]


@given(st.lists(st.integers(0, 20), max_size=60), st.booleans(), st.integers(1, 8))
@settings(max_examples=200, deadline=None)
def test_a_ramp_has_no_skip_and_no_repeat(latencies: list[int], join: bool, every: int) -> None:
    robot = Robot(Playback(SPEC, "stop", execution_horizon=every, join=join), deque(latencies))
    for _ in range(150):
        robot.period()
    assert robot.actions == list(range(len(robot.actions)))
    assert [p.step for p in robot.played if p.source == "chunk"] == list(range(len(robot.actions)))
    assert len(robot.actions) > 0
    counts = robot.playback.counts
    assert counts.played + counts.watchdog == 150


@given(st.lists(st.integers(0, 12), max_size=40), st.booleans())
@settings(max_examples=100, deadline=None)
def test_the_server_hears_of_every_executed_action_once(latencies: list[int], join: bool) -> None:
    """Rows sent as executed are those between the observation committed before and this one."""
    robot = Robot(Playback(SPEC, "stop", join=join), deque(latencies))
    committed, answered = 0, 0
    for _ in range(120):
        robot.period()
    for sending in robot.sent:
        if sending.executed is not None:
            assert sending.executed[:, 0].tolist() == list(range(committed, sending.seen.step)), answered
        committed, answered = sending.seen.step, answered + 1


def test_the_latency_measured_is_what_is_frozen() -> None:
    robot = Robot(Playback(SPEC), deque([3] * 50))
    for _ in range(60):
        robot.period()
    later = robot.sent[2:]
    assert later
    for sending in later:
        assert sending.executed_through == sending.seen.step + 3 - 1
        assert not sending.supersede
    # One at a time: the next leaves when the answer is there, since as many rows are to be played as it took and one.
    assert {b.seen.step - a.seen.step for a, b in itertools.pairwise(later)} == {4}
    assert robot.playback.counts.watchdog == 3  # before the first chunk


def test_without_latency_a_chunk_takes_over_after_its_execution_horizon() -> None:
    robot = Robot(Playback(SPEC), deque([0] * 50))
    for _ in range(40):
        robot.period()
    assert [s.seen.step for s in robot.sent] == list(range(0, 40, 4))
    assert robot.playback.counts.watchdog == 0


def test_without_joining_nothing_is_frozen_and_nothing_superseded() -> None:
    robot = Robot(Playback(SPEC, join=False), deque([1, 1, 9, 1, 9]))
    for _ in range(60):
        robot.period()
    assert all(s.executed_through is None and not s.supersede and s.executed is not None for s in robot.sent)


def test_a_late_answer_is_superseded_by_a_newer_observation_once() -> None:
    robot = Robot(Playback(SPEC), deque([1, 1, 1, 6, 6, 1]))
    for _ in range(20):
        robot.period()
    superseding = [s for s in robot.sent if s.supersede]
    assert len(superseding) == 1
    assert superseding[0].executed is None  # nobody knows what the server will have committed


def test_a_superseded_observation_leaves_the_books_right() -> None:
    playback = Playback(SPEC)
    first = see(playback)
    playback.answered(first, ramp(1, 0))
    for _ in range(4):
        playback.next()
    old = see(playback)
    for _ in range(2):
        playback.next()
    new = see(playback)
    assert new.supersede
    playback.failed(old, skipped=True)
    playback.answered(new, ramp(2, 6))
    for _ in range(4):
        playback.next()
    assert playback.counts.skipped == 1
    again = see(playback)
    assert again.executed is not None
    assert again.executed[:, 0].tolist() == [6, 7, 8, 9]


def see(playback: Playback) -> Sending:
    playback.see(NOTHING)
    sending = playback.due()
    assert sending is not None
    return sending


def test_actions_that_ran_dry_take_periods_and_no_steps() -> None:
    playback = Playback(SPEC, "hold")
    nothing = playback.next()
    assert (nothing.action, nothing.step, nothing.source) == (None, 0, "watchdog")
    playback.answered(see(playback), ramp(1, 0))
    for step in range(8):
        played = playback.next()
        assert (played.step, played.source, played.seq) == (step, "chunk", 1)
    for _ in range(3):
        played = playback.next()
        assert played.action is not None
        assert (played.action[0], played.step, played.source) == (7, 8, "watchdog")
    playback.answered(see(playback), ramp(2, 8))
    assert playback.next().action == [8]


@pytest.mark.parametrize(
    ("watchdog", "home", "want"),
    [("stop", None, 0.0), ("home", [2.5], 2.5), ([3.0], None, 3.0), (np.ones(1, "f4"), None, 1.0)],
)
def test_the_watchdog_acts_as_told(watchdog: object, home: list[float] | None, want: float) -> None:
    playback = Playback(SPEC, watchdog, home)  # type: ignore[arg-type]
    for _ in range(2):
        action = playback.next().action
        assert action is not None
        assert action.tolist() == [want]
    playback.answered(see(playback), ramp(1, 0))
    assert playback.next().source == "chunk"


@pytest.mark.parametrize(
    ("watchdog", "home", "error", "text"),
    [
        ("hould", None, InvalidInput, "no watchdog is called 'hould'. Did you mean 'hold'?"),
        ("home", None, InvalidInput, r"home=\[...\]"),
        ("home", [1.0, 2.0], TensorError, r"'home' is float32\[2\]; an action is float32\[1\]"),
        ([-7.0], None, TensorError, "'watchdog' leaves the action's range -5.0..10000.0"),
        ([np.nan], None, TensorError, "not finite"),
    ],
)
def test_a_watchdog_that_cannot_act_is_refused(
    watchdog: object, home: object, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        Playback(SPEC, watchdog, home)  # type: ignore[arg-type]


def test_stop_is_refused_where_nothing_is_no_action() -> None:
    spec = replace(SPEC, action=replace(SPEC.action, low=1.0))
    with pytest.raises(TensorError, match="'stop' leaves the action's range"):
        Playback(spec, "stop")


def test_an_execution_horizon_is_at_most_the_horizon() -> None:
    with pytest.raises(InvalidInput, match=r"execution_horizon is 9; it must be 1..8"):
        Playback(SPEC, execution_horizon=9)


def test_nothing_of_an_episode_that_is_over_is_played() -> None:
    playback = Playback(SPEC, "hold")
    playback.answered(see(playback), ramp(1, 0))
    for _ in range(5):
        playback.next()
    old = see(playback)
    playback.reset()
    after = playback.next()
    assert (after.action, after.step, after.source) == (None, 0, "watchdog")
    playback.answered(old, ramp(2, 5))  # it was under way
    assert playback.next().action is None
    assert playback.counts.stale == 1
    first = see(playback)
    assert first.seen.step == 0
    assert (first.executed_through, first.supersede) == (None, False)
    assert first.executed is not None
    assert not len(first.executed)
    playback.answered(first, ramp(3, 0))
    assert playback.next().action == [0]


def test_what_was_seen_before_a_reset_is_not_sent_after_it() -> None:
    playback = Playback(SPEC)
    playback.see(NOTHING)
    playback.reset()
    assert playback.due() is None


def test_a_refused_observation_is_followed_by_the_next_with_what_was_executed_since() -> None:
    playback = Playback(SPEC)
    playback.answered(see(playback), ramp(1, 0))
    for _ in range(4):
        playback.next()
    playback.failed(see(playback), skipped=False)
    playback.next()
    again = see(playback)
    assert again.executed is not None
    assert again.executed[:, 0].tolist() == [0, 1, 2, 3, 4]
    playback.failed(again, skipped=False, unsure=True)  # perhaps the server has committed what it never answered
    playback.next()
    assert see(playback).executed is None
    assert playback.counts.refused == 2


def test_seams_are_measured_apart_from_strides() -> None:
    playback = Playback(SPEC)
    playback.answered(see(playback), ramp(1, 0))
    for _ in range(4):
        playback.next()
    chunk = ramp(2, 4)
    playback.answered(see(playback), replace(chunk, actions=chunk.actions + 3))
    for _ in range(3):
        playback.next()
    seams = playback.counts.seams
    assert (seams.count, seams.jump, seams.jump_max) == (1, 4.0, 4.0)
    assert (seams.strides, seams.stride) == (5, 1.0)
