"""F12, F13: the server is told to stop, or is killed, under load; the next one goes on with its sessions.

Robots observe on streams that attach again by themselves, through one address that outlives the servers. Each answer
says how many ticks its session has committed and which, so that one that is lost, doubled or of another past is seen.
"""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...client import (
    AsyncClient,
    AsyncSession,
    Draining,
    Refused,
    ResumingStream,
    SessionStream,
    Skipped,
    connect_async,
)
from ...config import Deployment, SnapshotConfig
from ...errors import Reason, StateError
from ...serve.background import BackgroundServer
from ...types import TickResult
from .. import load_toy
from ..board import Broken, expect
from ..fault_proxy import FaultProxy
from ..load import Reader

ROBOTS, HZ, SIDE = 6, 20.0, 16
IN_CI, WHOLE = 3, 50  # faults, one after the other; the sessions live through all of them
AHEAD = 4  # observations of a robot that may be unanswered
EVERY = 3  # ticks after which a session is written, where the server will be killed
ANSWER_S = 60.0  # who is not answered by then never is


def stopped(seed: int, full: bool) -> float:
    """F12: sessions gone on with after a SIGTERM. Each stream hears of it, what is under way is answered, the server
    ends with 0, and not a tick is lost or done twice."""
    return asyncio.run(_row(seed, WHOLE if full else IN_CI, kill=False))


def killed(seed: int, full: bool) -> float:
    """F13: sessions gone on with after a ``kill -9``: from all they had, or from what was written last, once the client
    has been told which seq that is."""
    return asyncio.run(_row(seed, WHOLE if full else IN_CI, kill=True))


async def _row(seed: int, faults: int, kill: bool) -> float:
    draw = np.random.default_rng(seed)
    with tempfile.TemporaryDirectory() as folder:
        async with (
            _world(Path(folder), kill) as world,
            connect_async(world.proxy.address, timeout_s=ANSWER_S) as client,
        ):
            robots = [await Robot.open(client, _seed(seed) + i) for i in range(ROBOTS)]
            living = [asyncio.ensure_future(robot.live()) for robot in robots]
            try:
                for _ in range(faults):
                    await asyncio.sleep(float(draw.uniform(0.2, 1.2)))
                    await world.end()
                    before = [robot.answered for robot in robots]
                    await world.begin()
                    await _all_answered(robots, before, living)
                for robot in robots:
                    robot.over = True
                await asyncio.wait_for(asyncio.gather(*living), ANSWER_S)
            finally:
                for life in living:
                    life.cancel()
                await asyncio.gather(*living, return_exceptions=True)
            for robot in robots:
                robot.check(faults, kill)
                await robot.session.close()
        left = await asyncio.to_thread(os.listdir, folder)
        expect(not left, f"{len(left)} sessions are still kept after all were closed")
        return float(sum(robot.went_on for robot in robots))


async def _all_answered(robots: Sequence[Robot], before: Sequence[int], living: Sequence[asyncio.Future[None]]) -> None:
    """Until every robot has had answers of the new server: more than were under way."""
    until = asyncio.get_running_loop().time() + ANSWER_S
    while not all(robot.answered > count + AHEAD for robot, count in zip(robots, before, strict=True)):
        for life in living:
            if life.done():
                life.result()  # raises what ended it
        expect(asyncio.get_running_loop().time() < until, "a robot had no answers after the server came back")
        await asyncio.sleep(0.02)


@dataclass
class World:
    """The address that stays, and the server behind it."""

    proxy: FaultProxy
    server: BackgroundServer
    deployment: Deployment
    kill: bool

    async def end(self) -> None:
        """The server ends, as the row wants it."""
        if self.kill:
            os.kill(self.server.pid, signal.SIGKILL)
        code = await asyncio.to_thread(self.server.stop)
        want = -signal.SIGKILL if self.kill else 0
        expect(code == want, f"the server ended with exit code {code}, expected {want}")

    async def begin(self) -> None:
        """Another takes its place."""
        self.server = BackgroundServer(self.deployment)
        await asyncio.to_thread(self.server.start)
        self.proxy.target = self.server.address


@asynccontextmanager
async def _world(folder: Path, kill: bool) -> AsyncIterator[World]:
    """At the end, without an error, the last server ends with 0."""
    snapshots = SnapshotConfig(folder=str(folder), on_stop=not kill, every_ticks=EVERY if kill else 0)
    deployment = Deployment(pipelines=(load_toy.named(SIDE, cost_ms=2.0),), snapshots=snapshots)
    server = BackgroundServer(deployment)
    await asyncio.to_thread(server.start)
    async with FaultProxy() as proxy:
        await proxy.start(server.address)
        world = World(proxy, server, deployment, kill)
        try:
            yield world
        except BaseException:
            await asyncio.to_thread(world.server.stop)
            raise
    code = await asyncio.to_thread(world.server.stop)
    expect(code == 0, f"the last server ended with exit code {code}")


@dataclass
class Robot:
    """A client of one session, for as long as it takes."""

    client: AsyncClient
    session: AsyncSession
    reader: Reader
    step: int = -1
    sent: int = 0
    answered: int = 0
    drained: int = 0
    lost: list[str] = field(default_factory=list)  # what it was told
    past: dict[int, tuple[int, int, int]] = field(default_factory=dict)  # step, ticks, history after a seq
    wrong: list[str] = field(default_factory=list)
    attachments: int = 0
    began: int = 0  # sessions, beyond the first, because one was gone for good
    over: bool = False  # it shall end

    @classmethod
    async def open(cls, client: AsyncClient, seed: int) -> Robot:
        return cls(client, await client.open(load_toy.NAME, seed=seed), Reader(seed, seed))

    @property
    def went_on(self) -> int:
        """Times that a session went on after its server."""
        return self.attachments - 1 - self.began

    async def live(self) -> None:
        while not self.over:
            try:
                async with self.session.resuming(give_up_s=ANSWER_S) as stream:
                    try:
                        await self._on(stream)
                    finally:
                        self.attachments += stream.attachments
            except StateError as error:
                if error.reason is not Reason.SESSION_LOST:
                    raise
                self.lost.append(error.text)
                await self._accept()

    async def _on(self, stream: ResumingStream) -> None:
        sending = asyncio.create_task(self._send(stream))
        try:
            async for event in stream:
                if isinstance(event, TickResult):
                    self._hear(event)
                elif isinstance(event, Draining):
                    self.drained += 1
                elif isinstance(event, Skipped | Refused):
                    self.wrong.append(f"seq {event.seq} was not answered: {event}")
                    self.answered += 1
            await sending
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)  # what ends it ends the events too

    async def _send(self, stream: ResumingStream) -> None:
        while not self.over:
            await asyncio.sleep(1 / HZ)
            if len(stream.unanswered) >= AHEAD:
                continue
            self.step += 1
            image = np.full((SIDE, SIDE, 3), self.sent % 251, np.uint8)
            self.sent += 1
            seq = self.session._book.seq + 1
            self.reader.seen[seq] = load_toy.checksum(image)
            arrays: dict[str, NDArray[Any]] = {"image": image, "mark": np.array([self.reader.key, seq], np.float32)}
            executed = np.zeros((min(self.step, 1), load_toy.DIM), np.float32)
            sent = await stream.infer(arrays, self.step, executed=executed)
            expect(sent == seq, f"the client numbered seq {seq} as {sent}")
            self.past[seq] = (self.step, 0, 0)
        await stream.done()

    def _hear(self, answer: TickResult) -> None:
        if wrong := self.reader.read(answer):
            self.wrong.append(wrong)
        self.answered += 1
        step = -1 if answer.chunk is None else answer.chunk.first_step
        self.past[answer.seq] = (step, self.reader.ticks, self.reader.history)

    async def _accept(self) -> None:
        """Go on from what the server has, which must be what this session was once; or begin another session."""
        listed = (await self.client.sessions(self.session)).sessions
        if not listed:
            self.began += 1
            seed = self.reader.seed + ROBOTS  # of nobody else
            self.session, self.reader = await self.client.open(load_toy.NAME, seed=seed), Reader(seed, seed)
            self.step, self.past = -1, {}
            return
        seq = listed[0].last_seq
        if f"after seq {seq}," not in self.lost[-1]:
            raise Broken(f"the session is at seq {seq}, and the client was told: {self.lost[-1]}")
        expect(seq in self.past, f"the session is at seq {seq}, which was never sent")
        self.step, ticks, history = self.past[seq]
        if ticks:
            self.reader.ticks, self.reader.history, self.reader.last = ticks, history, seq
        self.reader.seen.clear()
        accepting = SessionStream(self.client.channel, self.client.address, self.session._book)
        await accepting.attach(seq)
        accepting.cancel()

    def check(self, faults: int, kill: bool) -> None:
        expect(not self.wrong, f"{len(self.wrong)} answers cannot be: {'; '.join(self.wrong[:3])}")
        if not kill:
            expect(not self.lost, f"a session was lost to a stop: {self.lost}")
            expect(self.drained == faults, f"a stream was told {self.drained} times of {faults} that the server drains")
            expect(self.sent == self.answered, f"{self.sent} observations had {self.answered} answers")
            expect(self.went_on == faults, f"a session went on {self.went_on} times after {faults} stops")


def _seed(seed: int) -> int:
    return 1 + seed * 64 % (load_toy.MOST - 64)
