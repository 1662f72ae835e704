"""Ids, tokens, the bound and leases."""

from __future__ import annotations

import pytest

from omni_loop.clock import FakeClock
from omni_loop.errors import Exhausted, Reason, UnknownSession
from omni_loop.session.log import Version
from omni_loop.session.machine import Position
from omni_loop.session.manager import Session, SessionManager


def opened(manager: SessionManager) -> Session:
    session = manager.open("toy", 1, "", ("mark",), {})
    session.machine.opened()
    manager.release(session)
    return session


def test_ids_and_tokens_are_unguessable_and_differ() -> None:
    manager = SessionManager(FakeClock(), 100, 60)
    sessions = [opened(manager) for _ in range(100)]
    assert len({s.id for s in sessions}) == len({s.token for s in sessions}) == 100
    assert all(len(s.token) >= 43 for s in sessions)  # 256 bits


def test_a_wrong_token_looks_like_an_unknown_session() -> None:
    manager = SessionManager(FakeClock(), 2, 60)
    session, other = opened(manager), opened(manager)
    assert manager.find(session.id, session.token) is session
    texts = set()
    attempts = [
        (session.id, other.token),
        (session.id, ""),
        ("nobody", session.token),
        ("", ""),
        (session.id, "\udc80"),
    ]
    for id, token in attempts:
        with pytest.raises(UnknownSession) as caught:
            manager.find(id, token)
        texts.add((caught.value.text, caught.value.code, caught.value.reason))
    session.machine.closed()
    with pytest.raises(UnknownSession) as caught:
        manager.find(session.id, session.token)
    texts.add((caught.value.text, caught.value.code, caught.value.reason))
    assert len(texts) == 1


def test_a_session_that_is_being_opened_cannot_be_found() -> None:
    manager = SessionManager(FakeClock(), 1, 60)
    session = manager.open("toy", 1, "", (), {})
    with pytest.raises(UnknownSession):
        manager.find(session.id, session.token)


def test_the_table_is_bounded() -> None:
    manager = SessionManager(FakeClock(), 2, 60)
    first, _ = opened(manager), opened(manager)
    says = r"all 2 sessions are taken; .*: a session ends by itself after 60 s without a call"
    with pytest.raises(Exhausted, match=says) as caught:
        opened(manager)
    assert (caught.value.reason, caught.value.retryable) == (Reason.TOO_MANY_SESSIONS, True)
    assert caught.value.retry_after_ms == pytest.approx(60_000)  # when the first lease ends
    manager.remove(first)
    opened(manager)
    assert len(manager) == 2


async def test_leases_end_in_the_order_of_last_use() -> None:
    clock = FakeClock()
    manager = SessionManager(clock, 3, 60)
    a, b, c = opened(manager), opened(manager), opened(manager)
    assert manager.next_due() == 60
    await clock.advance(30)
    manager.hold(a)
    manager.release(a)
    manager.hold(b)  # stays busy
    assert manager.expired() == []
    await clock.advance(30)
    assert manager.expired() == [c]
    assert manager.next_due() == 90
    await clock.advance(1000)
    assert manager.expired() == [a]
    assert manager.next_due() is None
    manager.release(b)
    assert manager.next_due() == clock.now() + 60


async def test_a_lease_starts_when_the_last_of_several_calls_ends() -> None:
    clock = FakeClock()
    manager = SessionManager(clock, 1, 60)
    session = opened(manager)
    manager.hold(session)
    manager.hold(session)
    manager.release(session)
    await clock.advance(100)
    assert manager.expired() == []
    manager.release(session)
    assert manager.next_due() == 160
    manager.remove(session)
    assert manager.next_due() is None


async def test_a_lost_stream_leaves_its_session_for_the_grace() -> None:
    clock = FakeClock()
    manager = SessionManager(clock, 4, 60, grace_s=5)
    lost, used, kept, back = (opened(manager) for _ in range(4))
    fenced: list[int] = []
    numbers = [manager.attach(s, lambda: None) for s in (lost, used, kept)]
    first = manager.attach(back, lambda: fenced.append(1))
    second = manager.attach(back, lambda: fenced.append(2))
    assert (first, second, fenced) == (1, 2, [1])
    assert not manager.detach(back, first)  # it was fenced: it has nothing to say any more
    assert [manager.detach(s, n) for s, n in zip((lost, used), numbers, strict=False)] == [True, True]
    assert not manager.detach(lost, numbers[0])  # only once
    assert manager.next_due() == 5
    await clock.advance(4)
    manager.hold(used)  # a call, whoever makes it, makes it a session in use
    manager.release(used)
    await clock.advance(1)
    assert manager.expired() == [lost]
    assert manager.next_due() == 60
    await clock.advance(55)
    assert manager.expired() == [kept, back]
    await clock.advance(4)
    assert manager.expired() == [used]


async def test_neither_lease_runs_during_a_call() -> None:
    clock = FakeClock()
    manager = SessionManager(clock, 1, 60, grace_s=5)
    session = opened(manager)
    number = manager.attach(session, lambda: None)
    manager.hold(session)
    manager.detach(session, number)  # the stream is lost while its tick runs
    await clock.advance(1000)
    assert (manager.next_due(), manager.expired()) == (None, [])
    manager.release(session)
    assert manager.next_due() == 1005
    manager.attach(session, lambda: None)
    assert manager.next_due() == 1060


def test_sessions_are_found_and_counted_by_their_owner() -> None:
    manager = SessionManager(FakeClock(), 3, 60)
    session = manager.open("toy", 1, "", (), {}, owner="ann")
    session.machine.opened()
    anybodys = opened(manager)
    assert (manager.count("ann"), manager.count("bob"), manager.count("")) == (1, 0, 1)
    assert manager.find(session.id, session.token, "ann") is session
    assert manager.find(session.id, session.token) is session
    for owner in ("bob", "", "ann\udc80"):
        with pytest.raises(UnknownSession):
            manager.find(session.id, session.token, owner)
    with pytest.raises(UnknownSession):
        manager.find(anybodys.id, anybodys.token, "ann")
    manager.remove(session)
    manager.remove(session)
    assert manager.count("ann") == 0


def test_a_session_that_ends_or_does_not_fit_leaves_no_room_taken() -> None:
    manager = SessionManager(FakeClock(), 1, 60)
    session = opened(manager)
    session.log.add(Version(0, 0, Position()), 1, "tick", 100)
    with pytest.raises(Exhausted):
        manager.open("toy", 1, "", (), {}, log=session.log.forked())
    assert manager._room.used == session.log.nbytes
    manager.remove(session)
    assert manager._room.used == 0
