"""Load on a server: sessions that observe at a fixed rate, in processes of their own, and what they were answered.

``python -m omni_loop.testing.load < plan.json > report.json``: the clients of one process. The schedule does not wait
for answers (an open loop): a server that falls behind is seen as latency, not as fewer requests (the coordinated
omission of closed loops, Tene 2013). Latency counts from the moment an observation was due. Each answer must say that
it is of this session, this seq, and after exactly the ticks answered before; see :mod:`.load_toy`.
"""

from __future__ import annotations

import asyncio
import gc
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..client import AsyncClient, AsyncSession, connect_async
from ..client.stream import Draining, Event, Refused, SessionStream, Skipped
from ..errors import OmniLoopError
from ..types import TickResult
from . import load_toy
from .board import Broken, expect

ANSWER_S = 60.0  # after the last observation; who is not answered by then never is
_IMAGES = 4  # of a session, taken in turns


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """``sessions`` at ``hz`` for ``seconds``, the first with seed ``seed``, each at its own offset within the period.
    ``hz`` 0: as fast as answers come, ``in_flight`` at a time."""

    address: str
    sessions: int
    hz: float
    seconds: float
    seed: int = 1
    side: int = 320
    in_flight: int = 4
    after_s: float = 0.0  # begin so long after every session is open
    close: bool = True


@dataclass(slots=True)
class LoadReport:
    """Of one process, or of several together. ``latencies_ms`` of every answer; ``wrong``: what cannot be; ``refused``:
    by reason."""

    scheduled: int = 0
    answered: int = 0
    latencies_ms: list[float] = field(default_factory=list)
    refused: dict[str, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    def add(self, other: LoadReport) -> None:
        self.scheduled += other.scheduled
        self.answered += other.answered
        self.latencies_ms += other.latencies_ms
        self.wrong += other.wrong
        self.refused = dict(Counter(self.refused) + Counter(other.refused))

    def quantile(self, q: float) -> float:
        """Milliseconds; raises Broken when nothing was answered."""
        expect(bool(self.latencies_ms), f"none of {self.scheduled} observations was answered: {self.refused}")
        return float(np.quantile(self.latencies_ms, q))

    def check(self, share: float) -> None:
        """Nothing wrong, and at least ``share`` of what was scheduled answered."""
        expect(not self.wrong, f"{len(self.wrong)} answers cannot be: {'; '.join(self.wrong[:3])}")
        told = f"{self.answered} of {self.scheduled} observations were answered; refused: {self.refused}"
        expect(self.answered >= share * self.scheduled, told)
        lost = self.scheduled - self.answered - sum(self.refused.values())
        expect(lost == 0, f"{lost} observations had no terminal answer")


# One session ----------------------------------------------------------------------------------------------


class Reader:
    """What the answers of one session must say."""

    def __init__(self, seed: int, key: int) -> None:
        self.seed, self.key = seed, key
        self.seen: dict[int, int] = {}  # checksums of what was sent and is not answered, by seq
        self.ticks = self.history = self.last = 0

    def read(self, answer: TickResult) -> str:
        """What is wrong with it; empty: nothing."""
        if answer.chunk is None:
            return f"seq {answer.seq} has no chunk"
        if (seen := self.seen.pop(answer.seq, None)) is None:
            return f"seq {answer.seq} was answered twice, or never asked"
        self.ticks, self.history = self.ticks + 1, load_toy.after(self.history, answer.seq, seen)
        want = (self.seed, self.key, answer.seq, self.ticks, self.history, seen)
        told = tuple(int(v) for v in answer.chunk.actions[0])
        late, self.last = answer.seq <= self.last, max(self.last, answer.seq)
        if late:
            return f"seq {answer.seq} was answered after seq {self.last}"
        return "" if told == want else f"seq {answer.seq} of session {self.key} says {told}, expected {want}"


class Robot:
    """One session under load. Its key is its seed."""

    def __init__(self, plan: LoadPlan, session: AsyncSession, seed: int) -> None:
        self.plan, self.session = plan, session
        self.reader = Reader(seed, seed)
        self.report = LoadReport()
        draw = np.random.default_rng(seed)
        images = [draw.integers(0, 256, (plan.side, plan.side, 3), dtype=np.uint8) for _ in range(_IMAGES)]
        self._images = [(image, load_toy.checksum(image)) for image in images]
        self._due: dict[int, float] = {}
        self._room = asyncio.Event()
        self.seq = 0

    async def drive(self, offset_s: float) -> None:
        """The whole plan on one stream; what is not answered in the end is missing in the report."""
        async with self.session.stream() as stream:
            reading = asyncio.create_task(self._read(stream))
            try:
                await (self._paced(stream, offset_s) if self.plan.hz else self._flood(stream))
                await stream.done()
                await asyncio.wait_for(reading, ANSWER_S)
            except TimeoutError:
                pass  # the report shows what is missing
            finally:
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)

    def observation(self, seq: int) -> tuple[dict[str, NDArray[Any]], int]:
        image, seen = self._images[seq % _IMAGES]
        return {"image": image, "mark": np.array([self.reader.key, seq], np.float32)}, seen

    async def _send(self, stream: SessionStream, due: float) -> None:
        self.seq += 1
        arrays, seen = self.observation(self.seq)
        self.reader.seen[self.seq] = seen
        self._due[self.seq] = due
        self.report.scheduled += 1
        sent = await stream.infer(arrays, self.seq - 1, executed=_EXECUTED[: min(self.seq - 1, 1)])
        expect(sent == self.seq, f"the client numbered seq {self.seq} as {sent}")

    async def _paced(self, stream: SessionStream, offset_s: float) -> None:
        loop, period = asyncio.get_running_loop(), 1 / self.plan.hz
        first = loop.time() + offset_s
        for n in range(round(self.plan.hz * self.plan.seconds)):
            due = first + n * period
            await asyncio.sleep(max(due - loop.time(), 0.0))
            await self._send(stream, due)

    async def _flood(self, stream: SessionStream) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + self.plan.seconds
        while loop.time() < until:
            if len(self._due) < self.plan.in_flight:
                await self._send(stream, loop.time())
            else:
                self._room.clear()
                await self._room.wait()

    async def _read(self, stream: SessionStream) -> None:
        now = asyncio.get_running_loop().time
        async for event in stream:
            if isinstance(event, Draining):
                self.report.wrong.append("the server drains under the load")
            elif isinstance(event, TickResult | Skipped | Refused):
                if event.seq in self._due:
                    self._hear(event, now() - self._due.pop(event.seq))
                else:
                    self.report.wrong.append(f"an answer that nobody waits for: {event}")
            self._room.set()

    def _hear(self, event: Event, latency_s: float) -> None:
        report = self.report
        if isinstance(event, TickResult):
            report.answered += 1
            report.latencies_ms.append(round(1e3 * latency_s, 3))
            if wrong := self.reader.read(event):
                report.wrong.append(wrong)
        elif isinstance(event, Skipped | Refused):
            self.reader.seen.pop(event.seq, None)
            reason = event.reason if isinstance(event, Skipped) else str(event.error.reason)
            report.refused[reason] = report.refused.get(reason, 0) + 1


_EXECUTED = np.zeros((1, load_toy.DIM), np.float32)


# One process ----------------------------------------------------------------------------------------------


async def run(plan: LoadPlan) -> LoadReport:
    """All sessions of ``plan``, in this process. Raises what a session cannot be opened with."""
    report = LoadReport()
    async with connect_async(plan.address, timeout_s=ANSWER_S) as client:
        robots = [await _open(plan, client, plan.seed + i) for i in range(plan.sessions)]
        gc.collect()
        gc.freeze()  # images live to the end; the collector need not go through them while latencies are taken
        await asyncio.sleep(plan.after_s)
        period = 1 / plan.hz if plan.hz else 0.0
        drives = [robot.drive(period * i / plan.sessions) for i, robot in enumerate(robots)]
        outcomes = await asyncio.gather(*drives, return_exceptions=True)
        for robot, outcome in zip(robots, outcomes, strict=True):
            if isinstance(outcome, OmniLoopError | Broken):
                robot.report.wrong.append(f"session {robot.reader.key}: {outcome}")
            elif isinstance(outcome, BaseException):
                raise outcome
            report.add(robot.report)
        if plan.close:
            await asyncio.gather(*(robot.session.close() for robot in robots))
    return report


async def _open(plan: LoadPlan, client: AsyncClient, seed: int) -> Robot:
    return Robot(plan, await client.open(load_toy.NAME, seed=seed), seed)


class LoadProcess:
    """:func:`run` in a process of its own. It ends with the ``with`` block of :func:`load`."""

    def __init__(self, plan: LoadPlan) -> None:
        self.plan = plan
        command = [sys.executable, "-m", __name__]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(asdict(plan)))
        self.process.stdin.close()
        self.process.stdin = None

    def report(self) -> LoadReport:
        """When it is done. Raises Broken when it fails, or takes far longer than planned."""
        try:
            text, _ = self.process.communicate(timeout=self.plan.seconds + self.plan.after_s + 3 * ANSWER_S)
        except subprocess.TimeoutExpired:
            raise Broken(f"the clients of {self.plan.sessions} sessions did not end") from None
        expect(self.process.returncode == 0, f"the clients ended with exit code {self.process.returncode}")
        return LoadReport(**json.loads(text))

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        with suppress(ValueError):  # its output was read and closed
            self.process.communicate()


@contextmanager
def load(plans: Sequence[LoadPlan]) -> Iterator[list[LoadProcess]]:
    """A process for each of ``plans``; none is left when the block ends."""
    processes: list[LoadProcess] = []
    try:
        processes.extend(LoadProcess(plan) for plan in plans)
        yield processes
    finally:
        for process in processes:
            process.stop()


def loaded(plans: Sequence[LoadPlan]) -> LoadReport:
    """What all of ``plans`` at once were answered."""
    together = LoadReport()
    with load(plans) as processes:
        for process in processes:
            together.add(process.report())
    return together


def main() -> int:
    plan = LoadPlan(**json.loads(sys.stdin.read()))
    report = asyncio.run(run(plan))
    sys.stdout.write(json.dumps(asdict(report)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
