"""A live session and its traffic with all its runners at once: everywhere or nowhere."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..errors import Reason, UnknownSession
from ..messages import (
    CloseSession,
    Command,
    ExportSession,
    ForkSession,
    ImportSession,
    OpenSession,
    PayloadKey,
    Receipt,
    ReleasePayloads,
)
from ..session.manager import Session
from ..session.snapshot import SnapshotData
from ..stage import Payload
from .flight import Flight
from .tick import Route, all_of

if TYPE_CHECKING:
    from ..runner.handle import RunnerHandle


@dataclass(slots=True)
class Live:
    """A session with what the loop needs beside it."""

    session: Session
    route: Route
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)  # passes on in the order of arrival
    flights: dict[int, Flight] = field(default_factory=dict)  # by seq

    def feed(self, payloads: Mapping[str, Payload], epoch: int, tick: int) -> None:
        """What tick ``tick`` fed, by feedback edge, awaits the next tick, in ``epoch``; what lay there is forgotten."""
        self.route.forget(self.session.feedback)  # first: the new keys may be the old ones
        self.session.feedback = {}
        for edge, payload in payloads.items():
            self._feed(edge, self.route.key(edge, self.session.id, epoch, tick), payload)

    def fed(self) -> dict[str, Payload]:
        """The payloads that await the next tick."""
        handles, fed_to = self.route.handles, self.route.graph.fed_to
        return {e: handles[fed_to[e]].connector.get(receipt) for e, receipt in self.session.feedback.items()}

    async def open(self, seed: int) -> None:
        """Fresh state on every runner."""
        s = self.session
        commands = {h: OpenSession(s.id, seed, s.prompt, s.options, names) for h, names in self.route.runners().items()}
        await self._enter(s.id, commands)

    async def fork(self, child: str, seed: int | None) -> None:
        """``child`` shares the state of this session on every runner."""
        command = ForkSession(self.session.id, child, seed)
        await self._enter(child, dict.fromkeys(self.route.runners(), command))

    async def reseed(self, seed: int) -> None:
        """The same state under another seed: out to a fork and back."""
        aside = f"{self.session.id}~"
        await self.fork(aside, seed)
        await self.become(aside)

    async def become(self, other: str) -> None:
        """The state of ``other``, a fork of this session, which ends. What awaits the next tick stays."""
        fed, receipts = self.fed(), self.session.feedback
        try:
            await self.vacate()
            command = ForkSession(other, self.session.id)
            await self._enter(self.session.id, dict.fromkeys(self.route.runners(), command))
        finally:
            await close_all(self.route.runners(), other)
        for edge, receipt in receipts.items():
            self._feed(edge, receipt.key, fed[edge])

    async def export(self) -> dict[str, Payload]:
        """The committed state of every stage, by full name. The arrays are the caller's."""
        states: dict[str, Payload] = {}

        async def of(handle: RunnerHandle) -> None:
            done = await handle.submit(ExportSession(self.session.id, self.session.machine.epoch))
            try:
                states.update({stage: handle.connector.get(receipt) for stage, receipt in done.outputs.items()})
            finally:
                await handle.submit(ReleasePayloads(tuple(r.key for r in done.outputs.values())))

        await all_of([of(handle) for handle in self.route.runners()])
        return states

    async def restore(self, data: SnapshotData, seed: int) -> None:
        """The state of ``data`` on every runner."""
        s = self.session
        commands: dict[RunnerHandle, Command] = {}
        put: list[tuple[RunnerHandle, Receipt]] = []
        try:
            for handle, stages in self.route.runners().items():
                receipts = {}
                for stage in stages:
                    key = PayloadKey(f"import>{stage}", s.id, data.epoch, 0)
                    receipts[stage] = handle.connector.put(key, data.stages[stage])
                    put.append((handle, receipts[stage]))
                commands[handle] = ImportSession(s.id, seed, s.prompt, data.epoch, receipts, s.options)
            await self._enter(s.id, commands)
        finally:
            for handle, receipt in put:
                handle.connector.cleanup(receipt.key)

    async def vacate(self) -> None:
        """Nothing of the session is left on any runner."""
        await close_all(self.route.runners(), self.session.id)
        for handle in self.route.runners():
            handle.connector.cleanup_session(self.session.id)
        self.session.feedback = {}

    def _feed(self, edge: str, key: PayloadKey, payload: Payload) -> None:
        connector = self.route.handles[self.route.graph.fed_to[edge]].connector
        self.session.feedback[edge] = connector.put(key, payload)

    async def _enter(self, session: str, commands: Mapping[RunnerHandle, Command]) -> None:
        """``session`` comes to every runner, or to none: then the first error is raised."""
        calls = [handle.submit(command) for handle, command in commands.items()]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        errors = [o for o in outcomes if isinstance(o, BaseException)]
        if errors:
            await close_all(
                [h for h, o in zip(commands, outcomes, strict=True) if not isinstance(o, BaseException)], session
            )
            raise errors[0]


async def close_all(handles: Iterable[RunnerHandle], session: str) -> None:
    """Free everything of ``session`` on ``handles``; one that does not know it has nothing to free."""
    await all_of([_unless_unknown(handle.submit(CloseSession(session))) for handle in handles])


async def _unless_unknown(closing: Awaitable[Any]) -> None:
    with contextlib.suppress(UnknownSession):  # never opened there, or freed when it was to be made anew
        await closing


def evicted(error: BaseException) -> bool:
    """Whether ``error`` says that a runner gave the session's state to others."""
    return getattr(error, "reason", None) is Reason.EVICTED
