"""The session machine against a small sequential model, and its table read row by row."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import asdict

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from omni_loop.errors import Code, Exhausted, InvalidInput, OmniLoopError, Reason, ServerUnavailable, StateError
from omni_loop.session.machine import TABLE, Event, Phase, Position, SessionMachine, Verdict

SEQS = st.integers(min_value=-1, max_value=12)


def at(phase: Phase) -> SessionMachine:
    """A machine brought to ``phase`` by legal events, with seq 1 running where a tick runs."""
    m = SessionMachine()
    if phase is Phase.NEW:
        return m
    m.opened()
    if phase is Phase.IDLE:
        return m
    if phase is Phase.EVICTED:
        m.evicted()
        return m
    if phase in (Phase.RUNNING, Phase.TRAILING, Phase.REBUILDING):
        m.accept(1)
        m.started(1)
        if phase is Phase.TRAILING:
            m.committed(1, Position(1, 1, 1))
        if phase is Phase.REBUILDING:
            m.evicted()
        return m
    (m.lost if phase is Phase.LOST else m.closed)()
    return m


def send(m: SessionMachine, event: Event) -> None:
    calls = {
        Event.OPENED: m.opened,
        Event.STARTED: lambda: m.started(m.pending[0] if m.pending else 1),
        Event.COMMITTED: lambda: m.committed(m.running, Position()),
        Event.ANSWERED: lambda: m.replied(m.running),
        Event.FINISHED: m.finished,
        Event.FAILED: m.undone,
        Event.RESET: m.reset,
        Event.REWOUND: lambda: m.rewound(Position()),
        Event.EVICTED: m.evicted,
        Event.REBUILT: m.rebuilt,
        Event.LOST: m.lost,
        Event.CLOSED: m.closed,
    }
    calls[event]()


@pytest.mark.parametrize("event", Event)
@pytest.mark.parametrize("phase", Phase)
def test_every_event_in_every_phase(phase: Phase, event: Event) -> None:
    m = at(phase)
    if event is Event.STARTED and phase in (Phase.IDLE, Phase.EVICTED):
        m.accept(1)
    before = asdict(m)
    expected = TABLE.get((phase, event))
    if expected is None:
        with pytest.raises(StateError) as caught:
            send(m, event)
        assert asdict(m) == before
        reasons = {Phase.LOST: Reason.SESSION_LOST, Phase.CLOSED: Reason.CLOSED}
        assert caught.value.reason is reasons.get(phase, Reason.BUSY)
    else:
        send(m, event)
        assert m.phase is expected


def test_a_seq_that_failed_may_be_sent_again_until_a_later_one_came() -> None:
    m = at(Phase.RUNNING)
    m.undone()
    assert m.judge(1) is Verdict.NEW
    m.accept(3)
    m.dropped(3)  # cancelled while it waited
    with pytest.raises(StateError, match="seq 1 is stale: the session is at seq 3"):
        m.judge(1)
    m.accept(3)
    assert m.judge(3) is Verdict.JOIN


def test_a_retry_waits_while_the_failed_tick_is_being_undone() -> None:
    m = at(Phase.RUNNING)
    m.dropped(1)
    m.accept(1)
    with pytest.raises(StateError):
        m.started(1)
    m.undone()
    assert m.pending == [1]  # the retry, not the tick that was undone
    m.started(1)


def test_a_committed_seq_cannot_be_dropped() -> None:
    m = at(Phase.TRAILING)
    m.dropped(1)
    m.finished()
    assert m.judge(1) is Verdict.REPEAT


def test_a_tick_that_commits_nothing_leaves_tick_and_position() -> None:
    m = at(Phase.TRAILING)
    m.finished()
    m.accept(2)
    m.started(2)
    m.replied(2)
    m.finished()
    assert (m.tick, m.position, m.answered) == (1, Position(1, 1, 1), 2)
    assert m.judge(2) is Verdict.REPEAT


def test_a_child_stands_where_its_parent_stands_and_goes_on_with_the_next_seq() -> None:
    m = at(Phase.TRAILING)
    m.finished()
    m.accept(4)  # waits behind the fork
    child = m.forked()
    assert (child.epoch, child.tick, child.position, child.pending) == (0, 1, Position(1, 1, 1), [])
    assert (child.phase, child.accepted, child.answered) == (Phase.NEW, 3, 0)
    child.opened()
    assert child.judge(4) is Verdict.NEW
    child.accept(4)
    child.started(4)
    child.committed(4, Position(2, 2, 1))
    assert m.position == Position(1, 1, 1)
    assert m.pending == [4]


def test_a_tick_that_cannot_be_rebuilt_for_may_be_sent_again_and_rebuilds_first() -> None:
    m = at(Phase.REBUILDING)
    m.undone()
    assert m.phase is Phase.EVICTED
    m.accept(1)
    m.started(1)
    assert m.phase is Phase.REBUILDING
    m.rebuilt()
    assert (m.phase, m.running) == (Phase.RUNNING, 1)


class Model(RuleBasedStateMachine):
    """One session as a list of what was accepted, and what was committed, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.m = SessionMachine(max_waiting=2)

    @initialize()
    def open(self) -> None:
        self.m.opened()
        self.waiting: list[int] = []
        self.running: int | None = None
        self.trailing = False
        self.undoing = False
        self.gone = False  # the runners' state
        self.highest = 0
        self.kept: list[int] = []  # whose answers are kept
        self.answered = 0
        self.retry: set[int] = set()
        self.draining = False
        self.attachments = 0
        self.epoch = self.tick = 0
        self.commits: list[int] = []
        self.over: Phase | None = None

    def expected(self, seq: int) -> Verdict | type[OmniLoopError]:
        if self.over is not None:
            return StateError
        if seq < 1:
            return InvalidInput
        under_way = [*self.waiting, *([self.running] if self.running is not None else [])]
        if seq in under_way:
            return Verdict.JOIN
        if seq in self.kept:
            return Verdict.REPEAT
        again = seq in self.retry and all(seq > other for other in under_way)
        if seq <= self.highest and not again:
            return StateError
        if self.draining:
            return ServerUnavailable
        if len(under_way) > 2:
            return Exhausted
        return Verdict.NEW if again or seq == self.highest + 1 else Verdict.GAPPED

    @rule(seq=SEQS)
    def arrive(self, seq: int) -> None:
        before = deepcopy(self.m)
        expected = self.expected(seq)
        if isinstance(expected, Verdict):
            assert self.m.judge(seq) is expected
            assert self.m == before
        if expected in (Verdict.NEW, Verdict.GAPPED):
            self.m.accept(seq)
            self.waiting.append(seq)
            self.highest = max(self.highest, seq)
            self.retry = {other for other in self.retry if other > seq}
            return
        with pytest.raises(expected if not isinstance(expected, Verdict) else StateError):
            self.m.accept(seq)
        assert self.m == before

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def supersede(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(self.waiting))
        self.m.superseded(seq)
        self.waiting.remove(seq)

    @precondition(lambda self: self.over is None and self.running is not None)
    @rule()
    def what_runs_is_not_superseded(self) -> None:
        with pytest.raises(StateError):
            self.m.superseded(self.running or 0)

    @precondition(lambda self: self.kept)
    @rule()
    def forget(self) -> None:
        seq = self.kept.pop(0)
        self.m.forgot([seq])
        assert self.m.forgotten == seq

    @precondition(lambda self: self.over is None)
    @rule()
    def attach(self) -> None:
        self.attachments += 1
        assert self.m.attached() == self.attachments
        self.m.check_attachment(self.attachments)
        with pytest.raises(StateError) as fenced:
            self.m.check_attachment(self.attachments - 1)
        assert (fenced.value.code, fenced.value.reason) == (Code.ABORTED, Reason.FENCED)

    @rule()
    def drain(self) -> None:
        self.m.draining = self.draining = True

    @precondition(lambda self: self.waiting and self.running is None and not self.undoing and self.over is None)
    @rule()
    def start(self) -> None:
        self.running = self.waiting.pop(0)
        self.m.started(self.running)

    @precondition(lambda self: self.over is None and not self.trailing and not self.gone)
    @rule()
    def evict(self) -> None:
        self.m.evicted()
        self.gone = True

    @precondition(lambda self: self.over is None and self.gone)
    @rule()
    def rebuild(self) -> None:
        self.m.rebuilt()
        self.gone = False

    @precondition(lambda self: self.running is not None and not self.trailing and not self.gone)
    @rule()
    def reply_only(self) -> None:
        assert self.running is not None
        self.m.replied(self.running)
        self._answers()

    @rule()
    def fork(self) -> None:
        before = deepcopy(self.m)
        child = self.m.forked()
        assert self.m == before
        assert (child.epoch, child.tick, child.position) == (self.m.epoch, self.m.tick, self.m.position)
        child.opened()
        assert not child.draining
        seq = child.accepted + 1
        child.accept(seq)
        child.started(seq)
        child.committed(seq, Position(99, 99, 0))
        assert self.m == before

    @precondition(lambda self: self.running is not None and not self.trailing and not self.gone)
    @rule(past=st.booleans())
    def commit(self, past: bool) -> None:
        assert self.running is not None
        self.m.committed(self.running, Position(self.running, self.running, 0), past)
        self._answers()
        self.commits.append(self.running)
        self.epoch, self.tick = (self.epoch + 1, 0) if past else (self.epoch, self.tick + 1)

    def _answers(self) -> None:
        assert self.running is not None
        self.answered, self.trailing = self.running, True
        self.kept.append(self.running)
        self.retry = {seq for seq in self.retry if seq > self.answered}

    def _forgets(self) -> None:
        self.kept, self.answered, self.retry = [], 0, set()

    @precondition(lambda self: self.trailing)
    @rule()
    def finish(self) -> None:
        self.m.finished()
        self.running, self.trailing = None, False

    @precondition(lambda self: self.over is None)
    @rule(seq=SEQS)
    def drop(self, seq: int) -> None:
        self.m.dropped(seq)
        if self.trailing and seq == self.running:
            return
        if seq == self.running:
            self.running, self.undoing = None, True
        elif seq in self.waiting:
            self.waiting.remove(seq)
        else:
            return
        self.retry.add(seq)

    @precondition(lambda self: (self.running is not None and not self.trailing) or self.undoing)
    @rule()
    def undo(self) -> None:
        self.m.undone()
        if self.running is not None:
            self.retry.add(self.running)
        self.running, self.undoing = None, False

    @precondition(lambda self: self.running is None and not self.undoing and self.over is None)
    @rule()
    def reset(self) -> None:
        self.epoch += 1
        self.tick = 0
        self._forgets()
        self.gone = False
        assert self.m.reset() == self.epoch

    @precondition(lambda self: self.running is None and not self.undoing and self.over is None)
    @rule(step=st.integers(0, 12))
    def rewind(self, step: int) -> None:
        self.epoch += 1
        self.tick = 0
        self._forgets()
        self.gone = False
        assert self.m.rewound(Position(step, step, 0)) == self.epoch
        assert self.m.position.step == step

    @precondition(lambda self: self.over is None)
    @rule(lost=st.booleans())
    def end(self, lost: bool) -> None:
        (self.m.lost if lost else self.m.closed)()
        self.over = Phase.LOST if lost else Phase.CLOSED
        self.waiting, self.running, self.trailing, self.undoing = [], None, False, False

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "over"):
            return
        assert (self.m.epoch, self.m.tick) == (self.epoch, self.tick)
        assert (self.m.answered, self.m.kept) == (self.answered, self.kept)
        assert self.commits == sorted(set(self.commits))  # each seq committed once, in order
        expected = [*([self.running] if self.running is not None else []), *self.waiting]
        assert self.m.pending == expected
        if self.over is not None:
            assert self.m.phase is self.over
            return
        idle = self.running is None and not self.undoing
        phases = {(True, False): Phase.IDLE, (True, True): Phase.EVICTED, (False, True): Phase.REBUILDING}
        assert self.m.phase is phases.get((idle, self.gone), Phase.TRAILING if self.trailing else Phase.RUNNING)


Model.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestModel = Model.TestCase
