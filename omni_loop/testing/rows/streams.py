"""F1, F2: streams that are cut, or claimed by two, over the real server and real connections.

F1: wherever a connection is cut, the stream resumes and says bit for bit what an uncut one says, and each seq is
computed once. F2: the newest attach owns the stream; nothing the older one sends after it is computed.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...client import AsyncClient, AsyncSession, SessionStream
from ...client import stream as client_stream
from ...client.book import Book
from ...config import SessionConfig
from ...errors import Code, OmniLoopError, Reason
from ...types import FramePrediction, TickResult
from ..board import Broken, expect
from ..fault_proxy import Direction, FaultProxy
from ..history import Attached, History
from .bed import ANSWER_S, nothing_leaks, row, same, some_actions
from .served import served
from .toys import NAME

RESUMED_S = 2.0
_CUTS, _CUTS_SCALED = 120, 72  # of one seed: every message's, and as many more in the midst of messages
# An open or a close whose answer is cut leaves a session until its lease ends, and a server here takes 32.
_CUTS_OF_ONE_SERVER = 24
_ROUNDS, _ROUNDS_SCALED = 40, 8


# F1 --------------------------------------------------------------------------------------------------------


def cuts(seed: int, full: bool) -> float:
    """Connections cut: after every message of either side, and in the midst of messages."""
    with nothing_leaks():
        return asyncio.run(_cuts(seed, _CUTS if full else _CUTS_SCALED))


@dataclass
class _Heard:
    """What a stream said, in order; ``ends``: terminal answers by seq."""

    ticks: dict[int, TickResult] = field(default_factory=dict)
    frames: dict[int, FramePrediction] = field(default_factory=dict)
    ends: list[int] = field(default_factory=list)
    epochs: list[int] = field(default_factory=list)

    def take(self, event: client_stream.Event) -> None:
        if isinstance(event, TickResult):
            self.ticks[event.seq] = event
            self.ends.append(event.seq)
        elif isinstance(event, FramePrediction):
            expect(event.seq not in self.frames, f"the frames of seq {event.seq} came twice")
            self.frames[event.seq] = event
        elif isinstance(event, (client_stream.WasReset, client_stream.WasRewound)):
            self.epochs.append(event.epoch)
        else:
            raise Broken(f"a stream that was cut says {event}")

    def expect_same(self, other: _Heard) -> None:
        expect(self.ends == other.ends, f"seqs {self.ends} were answered, {other.ends} by a stream that is not cut")
        expect(self.epochs == other.epochs, f"epochs {self.epochs} began, {other.epochs} on a stream that is not cut")
        for seq, want in other.ticks.items():
            expect(same(self.ticks[seq], want), f"seq {seq} was answered otherwise than on a stream that is not cut")
        expect(set(self.frames) == set(other.frames), "frames are missing")
        for seq, shown in other.frames.items():
            expect(self.frames[seq].frames.tobytes() == shown.frames.tobytes(), f"the frames of seq {seq} differ")


Cut = Callable[[FaultProxy, int, int], None]  # hears how many messages were sent and heard


def _never(proxy: FaultProxy, sent: int, heard: int) -> None:
    pass


def _after(sent: int = -1, heard: int = -1) -> Cut:
    """Once so many messages were sent, or heard."""

    def cut(proxy: FaultProxy, now_sent: int, now_heard: int) -> None:
        if (now_sent, -1) == (sent, heard) or (-1, now_heard) == (sent, heard):
            proxy.cut()

    return cut


async def _play(client: AsyncClient, proxy: FaultProxy, seed: int, cut: Cut, ahead: int) -> tuple[_Heard, int]:
    """One session's life, ``ahead`` requests before their answers; and how often it attached."""
    session = await client.open(NAME, seed=seed)
    draw = np.random.default_rng(seed)
    heard = _Heard()
    sent = said = 0
    async with session.resuming(give_up_s=ANSWER_S) as stream:
        events = aiter(stream)

        async def ask(request: Awaitable[Any]) -> None:
            nonlocal sent
            await request
            sent += 1
            cut(proxy, sent, -1)

        async def hear(until: int) -> None:
            nonlocal said
            while len(stream.unanswered) > until:
                async with asyncio.timeout(ANSWER_S):
                    heard.take(await anext(events))
                said += 1
                cut(proxy, -1, said)

        async def infer(step: int, frames: int = 0) -> None:
            await ask(stream.infer({"x": row(draw)}, step, frames=frames))

        await infer(0)
        await infer(1, frames=2)
        await hear(ahead)
        await ask(stream.predict(some_actions(draw, 2)))
        await hear(0)  # a prediction ends with its connection; it is asked again as long as nothing came after it
        await infer(2)
        await hear(0)  # answers of an epoch that is over are not said again
        await ask(stream.reset())
        await infer(0, frames=1)
        await hear(ahead)
        await infer(1)
        await ask(stream.recondition({"x": row(draw, 2)}, executed=some_actions(draw, 2), first_step=2))
        await infer(4, frames=1)
        await stream.done()
        async with asyncio.timeout(ANSWER_S):
            async for event in events:
                heard.take(event)
        expect(stream.resumed_s < RESUMED_S, f"it took {stream.resumed_s:.2f} s to resume")
        attachments = stream.attachments
    await session.close()
    return heard, attachments


async def _cuts(seed: int, count: int) -> float:
    draw, came = random.Random(seed), 0
    for first in range(0, count, _CUTS_OF_ONE_SERVER):
        came += await _cuts_of_one_server(seed, draw, range(first, min(first + _CUTS_OF_ONE_SERVER, count)))
    expect(came >= count * 3 // 4, f"only {came} of {count} cuts came to pass")
    return float(count)


async def _cuts_of_one_server(seed: int, draw: random.Random, numbers: range) -> int:
    """How many of the cuts came to pass."""
    async with served() as made, FaultProxy() as proxy:
        await proxy.start(made.address)
        async with made.client(proxy.address) as client:
            uncut, ahead = {}, (0, 2, 4)
            for n in ahead:
                before = dict(proxy.passed)
                uncut[n], attached = await _play(client, proxy, seed, _never, n)
                expect(attached == 1, "a stream that is not cut attached twice")
                passed: dict[Direction, int] = {d: proxy.passed[d] - before[d] for d in ("up", "down")}
                uncut[n].expect_same(uncut[0])
            points: list[Cut] = [_after(sent=n) for n in range(1, 11)] + [_after(heard=n) for n in range(1, 13)]
            for n in numbers:
                proxy.heal()
                if n < len(points):
                    heard, _ = await _play(client, proxy, seed, points[n], draw.choice(ahead))
                else:
                    direction: Direction = draw.choice(("up", "down"))
                    proxy.cut_after(draw.randrange(passed[direction]), direction)
                    heard, _ = await _retried(client, proxy, seed, draw.choice(ahead))
                heard.expect_same(uncut[0])
            return proxy.cuts


async def _retried(client: AsyncClient, proxy: FaultProxy, seed: int, ahead: int) -> tuple[_Heard, int]:
    """Calls that open and close a session are no stream, and may meet the cut."""
    while True:
        try:
            return await _play(client, proxy, seed, _never, ahead)
        except OmniLoopError as error:
            expect(error.code is Code.UNAVAILABLE, f"a cut is told as {error.code}: {error.text}")


# F2 --------------------------------------------------------------------------------------------------------


def claims(seed: int, full: bool) -> float:
    """Attachments that were fenced."""
    with nothing_leaks():
        return asyncio.run(_claims(seed, _ROUNDS if full else _ROUNDS_SCALED))


class _Claimant:
    """A client that holds the session's id and token, and writes without pause until it is fenced."""

    def __init__(self, client: AsyncClient, book: Book, history: History, draw: np.random.Generator) -> None:
        self.client, self.history, self.draw = client, history, draw
        self.stream = SessionStream(client.channel, client.address, book)
        self.book = book
        self.number = history.connect()
        self.asked: dict[int, np.ndarray[Any, np.dtype[np.float32]]] = {}
        self.over = False
        self.accepted = 0  # by the server when it attached

    async def attach(self, last_received: int) -> None:
        said = await self.stream.attach(last_received)
        self.book.seq = self.accepted = said.accepted
        told = (said.number, said.accepted, said.answered, said.pending, last_received)
        number, accepted, answered, pending, last = told
        self.history.attached(Attached(self.number, said.epoch, number, accepted, answered, pending, last))

    async def write(self, observations: int) -> None:
        """Until fenced, or so many are sent."""
        try:
            for _ in range(observations):
                if self.over:
                    return
                x, seq = row(self.draw), self.book.seq + 1
                self.asked[seq] = x
                self.history.sent(self.number, seq)
                await self.stream.infer({"x": x}, seq - 1)
                await asyncio.sleep(0)
        except OmniLoopError as error:
            expect(error.reason is Reason.FENCED, f"a fenced stream ended with {error.reason}: {error.text}")

    async def read(self, answers: dict[int, TickResult]) -> None:
        """To the end of the stream; ``answers``: of both clients."""
        fenced = False
        try:
            async for event in self.stream:
                self.history.got(self.number, event)
                if isinstance(event, TickResult):
                    answers[event.seq] = event
        except OmniLoopError as error:
            expect(error.reason is Reason.FENCED and error.code is Code.ABORTED, f"{error.code}: {error.text}")
            fenced = True
        self.over = True
        self.history.ended(self.number, whole=not fenced, fenced=fenced)


async def _claims(seed: int, rounds: int) -> float:
    draw = random.Random(seed)
    rows = np.random.default_rng(seed)
    history = History()
    answers: dict[int, TickResult] = {}
    claimants: list[_Claimant] = []
    config = SessionConfig(replies=64)
    async with served(config) as made, made.client() as one, made.client() as two:
        session = await one.open(NAME, seed=seed)
        opened = session._book
        running: list[asyncio.Task[None]] = []
        for n in range(rounds):
            book = _copy(opened)
            claimant = _Claimant((one, two)[n % 2], book, history, rows)
            await claimant.attach(max(answers, default=0))
            claimants.append(claimant)
            running.append(asyncio.create_task(claimant.read(answers)))
            last = n == rounds - 1
            running.append(asyncio.create_task(claimant.write(5 if last else 10_000)))
            if last:
                await running[-1]
                await claimant.stream.done()
            else:
                await asyncio.sleep(draw.random() * 0.03)
        await asyncio.wait_for(asyncio.gather(*running), ANSWER_S)
        history.check()
        await _replayed(one, seed, _committed(claimants), answers)
        await session.close()
    return float(rounds - 1)


def _copy(book: Book) -> Book:
    """What another process that was given id and token knows."""
    other = Book.__new__(Book)
    other.__dict__.update(book.__dict__)
    return other


def _committed(claimants: Sequence[_Claimant]) -> dict[int, np.ndarray[Any, np.dtype[np.float32]]]:
    """Observations by seq: of the client that owned the stream when the server accepted it."""
    committed: dict[int, np.ndarray[Any, np.dtype[np.float32]]] = {}
    for claimant, newer in zip(claimants, [*claimants[1:], None], strict=True):
        until = newer.accepted if newer is not None else max(claimant.asked)
        committed |= {seq: x for seq, x in claimant.asked.items() if claimant.accepted < seq <= until}
    return committed


async def _replayed(
    client: AsyncClient,
    seed: int,
    committed: dict[int, np.ndarray[Any, np.dtype[np.float32]]],
    answers: dict[int, TickResult],
) -> None:
    """One client alone, with the same observations, is answered the same: nothing else was ever written."""
    expect(set(answers) == set(committed), f"{len(committed)} observations were accepted, {len(answers)} answered")
    alone: AsyncSession = await client.open(NAME, seed=seed)
    for seq in sorted(committed):
        answer = await alone.infer({"x": committed[seq]}, seq - 1)
        expect(same(answer, answers[seq]), f"seq {seq} was answered otherwise than to one client alone")
    await alone.close()
