"""Ids, tokens, the bound and leases."""

from __future__ import annotations

import pytest

from omni_loop.clock import FakeClock
from omni_loop.errors import Exhausted, Reason, UnknownSession
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
