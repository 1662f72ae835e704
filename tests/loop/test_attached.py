"""Streams come and go: who is attached, what is given again, replaced or cancelled, how long a session waits."""

from __future__ import annotations

import asyncio

import pytest

from omni_loop.clock import FakeClock
from omni_loop.config import SessionConfig
from omni_loop.errors import Reason, StateError, UnknownSession

from .toy import Gate, actions, infer, predict, toy


def never() -> None:
    raise AssertionError("fenced")


async def test_a_newer_attachment_fences_the_older_one() -> None:
    async with toy() as t:
        info = await t.core.open("toy")
        fenced: list[int] = []
        first = t.core.attach(info.id, info.token, lambda: fenced.append(1), None)
        second = t.core.attach(info.id, info.token, lambda: fenced.append(2), None)
        assert (first.number, second.number, fenced) == (1, 2, [1])
        t.core.detach(info.id, first.number)  # the older one's end is nobody's
        t.core.attach(info.id, info.token, never, None)
        assert fenced == [1, 2]
        with pytest.raises(UnknownSession):
            t.core.attach(info.id, "another token", never, None)


async def test_attaching_again_gives_what_was_missed_and_what_is_under_way() -> None:
    async with toy(config=SessionConfig(replies=2)) as t:
        info = await t.core.open("toy")
        results = [await t.core.tick(infer(info, seq, step=seq - 1)) for seq in (1, 2, 3)]
        gate = Gate()
        t.script.before["context"] = gate
        running = asyncio.create_task(t.core.tick(infer(info, 4, step=3)))
        await gate.reached()
        attached = t.core.attach(info.id, info.token, lambda: None, 0)
        assert [a is b for a, b in zip(attached.replies, results[1:], strict=True)] == [True, True]
        assert (attached.forgotten, attached.last_seq, attached.accepted, attached.pending) == (1, 3, 4, (4,))
        joined = asyncio.create_task(t.core.wait(info.id, info.token, 4))
        await asyncio.sleep(0)
        gate.open()
        assert await joined is await running
        assert await t.core.wait(info.id, info.token, 4) is await running
        assert t.core.attach(info.id, info.token, never, 4).replies == ()
        with pytest.raises(StateError, match="seq 1 is neither under way nor kept"):
            await t.core.wait(info.id, info.token, 1)


async def test_nothing_of_an_old_epoch_is_given_again() -> None:
    async with toy() as t:
        info = await t.core.open("toy")
        await t.core.tick(infer(info, 1))
        await t.core.reset(info.id, info.token)
        attached = t.core.attach(info.id, info.token, never, 0)
        assert (attached.epoch, attached.replies, attached.forgotten, attached.last_seq) == (1, (), 0, 0)


async def test_a_newer_observation_replaces_those_that_wait() -> None:
    async with toy() as t:
        info = await t.core.open("toy")
        gate = Gate()
        t.script.before["context"] = gate
        calls = [asyncio.create_task(t.core.tick(infer(info, 1, step=0)))]
        await gate.reached()
        calls += [asyncio.create_task(t.core.tick(infer(info, seq, step=1, supersede=True))) for seq in (2, 3, 4)]
        await asyncio.sleep(0)
        gate.open()
        first, second, third, newest = await asyncio.gather(*calls, return_exceptions=True)
        assert not isinstance(first, BaseException)
        assert not isinstance(newest, BaseException)
        assert (actions(first)[0][1], actions(newest)[0][1]) == (1, 2)  # one commit between them: none of the replaced
        for replaced in (second, third):
            assert isinstance(replaced, StateError)
            assert replaced.reason is Reason.SUPERSEDED
        with pytest.raises(StateError, match="stale"):
            await t.core.tick(infer(info, 2, step=1))


async def test_what_replaces_others_finds_room_where_they_waited() -> None:
    async with toy(config=SessionConfig(max_waiting=1)) as t:
        info = await t.core.open("toy")
        gate = Gate()
        t.script.before["context"] = gate
        calls = [asyncio.create_task(t.core.tick(infer(info, seq, step=seq - 1))) for seq in (1, 2)]
        await gate.reached()
        newest = asyncio.create_task(t.core.tick(infer(info, 3, step=1, supersede=True)))
        await asyncio.sleep(0)
        gate.open()
        assert actions(await newest)[0][1] == 2
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(outcomes[1], StateError)


async def test_a_cancelled_tick_leaves_nothing_and_may_be_sent_again() -> None:
    async with toy() as t:
        info = await t.core.open("toy")
        gate = Gate()
        t.script.before["act"] = gate
        calls = [asyncio.create_task(t.core.tick(infer(info, seq, step=seq - 1))) for seq in (1, 2)]
        await gate.reached()
        for seq in (1, 2, 9):  # running, waiting, unknown
            t.core.cancel(info.id, info.token, seq)
        gate.open()
        for outcome in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(outcome, StateError)
            assert outcome.reason is Reason.CANCELLED
        del t.script.before["act"]
        again = [await t.core.tick(infer(info, seq, step=seq - 1)) for seq in (1, 2)]
        assert [actions(result)[0][1] for result in again] == [1, 2]
        t.core.cancel(info.id, info.token, 2)  # answered: nothing happens
        assert await t.core.tick(infer(info, 2, step=1)) is again[1]


async def test_leases_last_longer_while_a_stream_is_attached() -> None:
    clock = FakeClock()
    async with toy(config=SessionConfig(idle_ttl_s=100, grace_s=10), clock=clock) as t:
        unary, attached, lost, back = [await t.core.open("toy") for _ in range(4)]
        for info in (attached, lost, back):
            number = t.core.attach(info.id, info.token, lambda: None, None).number
            if info is not attached:
                t.core.detach(info.id, number)
        await clock.advance(9)
        t.core.attach(back.id, back.token, lambda: None, 0)
        await clock.advance(2)
        with pytest.raises(UnknownSession):
            t.core.session(lost.id, lost.token)
        await clock.advance(85)
        for info in (unary, attached, back):
            t.core.session(info.id, info.token)
        await clock.advance(20)
        for info in (unary, attached, back):
            with pytest.raises(UnknownSession):
                t.core.session(info.id, info.token)


async def test_no_lease_ends_while_a_tick_runs() -> None:
    clock = FakeClock()
    async with toy(config=SessionConfig(idle_ttl_s=100, grace_s=10), clock=clock) as t:
        info = await t.core.open("toy")
        number = t.core.attach(info.id, info.token, never, None).number
        gate = Gate()
        t.script.before["context"] = gate
        tick = asyncio.create_task(t.core.tick(infer(info, 1), keep=True))
        await gate.reached()
        t.core.detach(info.id, number)
        await clock.advance(50)
        gate.open()
        await tick
        await t.core._tasks.wait()  # what is left of it is cleaned up
        await clock.advance(9)
        t.core.session(info.id, info.token)
        await clock.advance(2)
        with pytest.raises(UnknownSession):
            t.core.session(info.id, info.token)


async def test_a_session_is_found_by_its_owner_alone() -> None:
    async with toy() as t:
        info = await t.core.open("toy", owner="ada")
        assert t.core.session(info.id, info.token, "ada").id == info.id
        texts = []
        for id, token, owner in ((info.id, info.token, "bob"), (info.id, "x", "ada"), ("none", info.token, "ada")):
            with pytest.raises(UnknownSession) as caught:
                t.core.session(id, token, owner)
            texts.append(caught.value.text)
        assert len(set(texts)) == 1
        child = await t.core.fork(info.id, info.token)
        assert (t.core.count("ada"), t.core.count("bob")) == (2, 0)
        await t.core.close(child.id, child.token)
        assert t.core.count("ada") == 1


async def test_predictions_are_never_replaced() -> None:
    async with toy() as t:
        info = await t.core.open("toy")
        await t.core.tick(infer(info, 1))
        gate = Gate()
        t.script.before["frames"] = gate
        first = asyncio.create_task(t.core.tick(predict(info, 2, steps=1)))
        await gate.reached()
        second = asyncio.create_task(t.core.tick(predict(info, 3, steps=1)))
        third = asyncio.create_task(t.core.tick(infer(info, 4, step=1, supersede=True)))
        await asyncio.sleep(0)
        gate.open()
        assert [(await task).seq for task in (first, second, third)] == [2, 3, 4]
