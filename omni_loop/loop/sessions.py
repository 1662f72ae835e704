"""The table of live sessions: opened, found, held while a call is under way, lost, closed, and ended by their lease."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from ..clock import Clock
from ..errors import (
    OmniLoopError,
    Reason,
    ServerUnavailable,
    StateError,
    UnknownName,
    nearest,
)
from ..messages import Scalar
from ..session.machine import Phase
from ..session.manager import Session, SessionManager
from ..session.snapshot import SnapshotStore
from ..telemetry import metrics
from ..types import TickResult
from . import gauges
from .flight import Flight, OnPart
from .live import Live
from .pool import Pool
from .prepare import check_keys, check_options, check_prompt, check_seed
from .request import KEPT, Attachment, SessionInfo, SessionSummary
from .tap import Failed, Opened, Origin, Tap, Tapped, Turned, Turning, Watch
from .tasks import Tasks, public
from .tick import all_of

T = TypeVar("T")
_log = logging.getLogger(__name__)
_resumes = metrics.counter("omni_loop_resumes", "Streams that went on from what was received")
_skips = metrics.counter("omni_loop_ticks_ended_early", "Ticks that ended before their answer", ("reason",))


class Sessions:
    """All live sessions; all methods belong to one event loop."""

    def __init__(
        self, pool: Pool, manager: SessionManager, clock: Clock, store: SnapshotStore | None, tap: Tap | None = None
    ) -> None:
        self._pool, self._manager, self._clock, self._store = pool, manager, clock, store
        gauges.show(manager)
        self._tap = Tapped(tap)
        self._live: dict[str, Live] = {}
        self._tasks = Tasks()
        self._leases: asyncio.Task[None] | None = None
        self._wakes = 0.0  # when it wakes up, on the clock
        self._draining = False

    def session(self, session: str, token: str, owner: str = "") -> SessionInfo:
        """The owner's view of an open session; UnknownSession for anybody else."""
        return self._info(self._find(session, token, owner))

    def count(self, owner: str) -> int:
        """How many sessions ``owner`` has."""
        return self._manager.count(owner)

    def attach(self, session: str, token: str, fence: Callable[[], None], last_received: int | None) -> Attachment:
        """A stream attaches: the one before it hears ``fence``, and the lease is that of a session in use until
        :meth:`detach`. ``last_received`` None: it has received nothing it wants to go on from.

        Raises:
            UnknownSession. StateError: the session's state was lost.
        """
        live = self._find(session, token)
        machine, last = live.session.machine, last_received or 0
        number = self._manager.attach(live.session, fence)
        self._watch()
        if last_received is not None:
            _resumes.inc()
        under_way = [seq for seq, flight in live.flights.items() if not flight.over]
        return Attachment(
            number=number,
            epoch=machine.epoch,
            last_seq=machine.answered,
            accepted=machine.accepted,
            pending=tuple(sorted(under_way)),
            replies=()
            if last_received is None
            else tuple(reply for reply in live.session.replies.after(last) if reply.seq not in under_way),
            forgotten=machine.forgotten if last_received is not None and machine.forgotten > last else 0,
        )

    def detach(self, session: str, number: int) -> None:
        """The stream ``number`` ended. Where it was the newest, its session is kept for the grace."""
        live = self._live.get(session)
        if live is not None and self._manager.detach(live.session, number):
            self._watch()

    def cancel(self, session: str, token: str, seq: int) -> None:
        """End ``seq`` within one pass of a model, unless its answer is committed already; one that is not under way:
        nothing happens."""
        live = self._find(session, token)
        flight = live.flights.get(seq)
        if flight is not None and not (flight.sealed and flight.part is None):
            self._end_flight(live, flight, StateError("the request was cancelled", reason=Reason.CANCELLED))

    async def wait(self, session: str, token: str, seq: int, on_part: OnPart | None = None) -> TickResult:
        """The answer of a ``seq`` that is under way or kept. Predictions and plans end with the last who waits for
        them. Raises as the tick does; StateError: neither."""
        live = self._find(session, token)
        flight = live.flights.get(seq)
        if flight is not None:
            kept = flight.request.op in KEPT
            return await flight.wait(on_part, None if kept else functools.partial(self._end_flight, live))
        reply = live.session.replies.get(seq)
        if reply is None:
            raise StateError(f"seq {seq} is neither under way nor kept", reason=Reason.STALE_SEQ)
        return reply

    def watch(self, watch: Watch) -> Callable[[], None]:
        """Tell ``watch`` of every tick that is answered; the returned function ends it."""
        return self._tap.watch(watch)

    def list_sessions(self) -> list[SessionSummary]:
        """Every session, without what gives access to it."""
        return [
            SessionSummary(
                s.id, s.pipeline, s.machine.phase, s.machine.epoch, s.machine.position.step, s.machine.accepted, s.owner
            )
            for s in self._manager
        ]

    async def open(
        self,
        pipeline: str,
        seed: int | None = None,
        prompt: str = "",
        observation_keys: Sequence[str] = (),
        options: Mapping[str, Scalar] | None = None,
        *,
        owner: str = "",
    ) -> SessionInfo:
        """Open a session. ``seed`` None: drawn here; no ``observation_keys``: exactly the required ones; ``owner``: who
        alone can find it again.

        Raises:
            UnknownName: no such pipeline. InvalidInput: keys, seed or options that do not fit it.
            Unsupported: a prompt for a pipeline that reads none. Exhausted: no room for another session.
        """
        self._refuse_when_draining()
        routes = self._pool.routes
        if pipeline not in routes:
            raise UnknownName(f"no pipeline {pipeline!r} is served.{nearest(pipeline, routes)}")
        route = routes[pipeline]
        check_prompt(route.graph.spec, prompt)
        session = self._manager.open(
            pipeline,
            check_seed(seed),
            prompt,
            check_keys(route.graph.spec, observation_keys),
            check_options(route.graph.pipeline.options, options or {}, pipeline),
            owner=owner,
        )
        live = Live(session, route)
        return await self._tasks.to_the_end(self._enter(live, lambda: live.open(session.seed)), undo=self._abandon)

    async def close(self, session: str, token: str) -> None:
        """Free everything of the session; its ticks in flight are cancelled."""
        live = self._find(session, token)
        await self._tasks.to_the_end(self._end(live, StateError("the session was closed", reason=Reason.CLOSED)))

    async def stop(self, grace_s: float = 5.0) -> None:
        """Refuse new work, let ticks in flight finish within ``grace_s``, then end everything."""
        self._draining = True
        for live in self._live.values():
            live.session.machine.draining = True
        if self._leases is not None:
            self._leases.cancel()
        await self._tasks.wait(grace_s)
        stopping = ServerUnavailable("the server stopped", reason=Reason.DRAINING)
        left = [live for live in self._live.values() if live.session.machine.phase is not Phase.CLOSED]
        for live in left:
            for flight in tuple(live.flights.values()):
                self._end_flight(live, flight, stopping)
        failures = await self._last_words(left)
        try:
            await all_of([self._end(live, stopping) for live in left])
            await self._tasks.wait()
        finally:
            await asyncio.gather(self._pool.stop(), asyncio.to_thread(self._tap.stop))
        if failures:
            raise failures[0]

    async def _last_words(self, left: Sequence[Live]) -> list[OmniLoopError]:
        """What is to be done with sessions before the server's stop ends them; what of it failed."""
        return []

    async def _forget_kept(self, session: str, why: OmniLoopError) -> None:
        """``session`` ended; what was kept of it beside the table goes too."""

    async def _end(self, live: Live, why: OmniLoopError) -> None:
        """Close: refuse what comes, cancel what is in flight, wait for its undoing, free everything."""
        session = live.session
        session.machine.closed()
        for flight in tuple(live.flights.values()):
            self._end_flight(live, flight, why)
        try:
            async with live.turn:
                session.forget()
                await live.vacate()
        except ServerUnavailable as gone:
            if gone.reason is not Reason.RUNNER_GONE:  # with a runner that is gone, its state is freed
                raise
        finally:
            for handle in live.route.runners():
                handle.connector.cleanup_session(session.id)  # what a failed release has left
            self._manager.remove(session)
            del self._live[session.id]
            self._tap.ended(session.id, why.reason)
        await self._forget_kept(session.id, why)

    def _lose(self, live: Live, flight: Flight | None, error: BaseException) -> None:
        """A runner may hold what another does not: the session is lost, and says so from now on."""
        shown = public(error)
        _log.error("session %s is lost: %s", live.session.id, shown.text)
        if live.session.machine.phase not in (Phase.CLOSED, Phase.LOST):
            live.session.machine.lost()
            self._tell_turned(live, "lost", shown.text)
        if flight is not None:
            flight.fail(shown)
        for other in live.flights.values():
            other.fail(live.session.machine.refusal())
        live.flights.clear()

    def _end_flight(self, live: Live, flight: Flight, error: OmniLoopError) -> None:
        """End ``flight`` early. Until its commit is sent, its seq may be sent again, unless a newer one replaces it."""
        if flight.over:
            return
        _skips.inc(reason=str(error.reason))
        flight.fail(error)
        if not flight.sealed:
            machine, request = live.session.machine, flight.request
            if error.reason is Reason.SUPERSEDED:
                machine.superseded(request.seq)
            else:
                machine.dropped(request.seq)
            del live.flights[request.seq]
            self._tap.failed(Failed(live.session.id, request.seq, request.op, machine.epoch, error))

    # The table --------------------------------------------------------------------------------------------

    def _find(self, session: str, token: str, owner: str | None = None) -> Live:
        return self._live[self._manager.find(session, token, owner).id]

    def _info(self, live: Live) -> SessionInfo:
        s, m = live.session, live.session.machine
        return SessionInfo(s.id, s.token, m.epoch, s.seed, live.route.graph.spec, s.keys, m.accepted, m.position.step)

    async def _enter(
        self, live: Live, allocate: Callable[[], Awaitable[None]], origin: Origin = "open", source: str = ""
    ) -> SessionInfo:
        """A new session comes into the table when ``allocate`` has given it its state, or leaves no trace. ``source``:
        what it continues; see :class:`~omni_loop.loop.tap.Opened`."""
        try:
            await allocate()
        except BaseException:
            self._manager.remove(live.session)
            await live.vacate()
            raise
        live.session.machine.opened()
        self._live[live.session.id] = live
        self._release(live.session)
        self._tell_opened(live, origin, source)
        return self._info(live)

    def _tell_opened(self, live: Live, origin: Origin, source: str) -> None:
        s, m, spec = live.session, live.session.machine, live.route.graph.spec
        at = (m.epoch, m.tick, m.accepted, m.position.step)
        self._tap.opened(Opened(s.id, spec, s.seed, s.prompt, s.keys, s.options, origin, source, *at))

    def _tell_turned(self, live: Live, kind: Turning, name: str = "") -> None:
        s, m = live.session, live.session.machine
        self._tap.turned(Turned(s.id, kind, m.epoch, m.position.step, s.seed, s.prompt, name))

    async def _abandon(self, opening: asyncio.Task[SessionInfo]) -> None:
        """Nobody will ever know the id of the session that was being opened."""
        info = await opening
        await self.close(info.id, info.token)

    async def _in_turn(
        self,
        live: Live,
        work: Callable[[], Awaitable[T]],
        undo: Callable[[asyncio.Task[T]], Coroutine[Any, Any, None]] | None = None,
    ) -> T:
        """``work`` when the session's turn has come, to its end even when the caller goes away."""

        async def run() -> T:
            try:
                async with live.turn:
                    live.session.machine.check_usable()
                    return await work()
            finally:
                self._release(live.session)

        self._manager.hold(live.session)
        return await self._tasks.to_the_end(run(), undo)

    def _release(self, session: Session) -> None:
        """A call ended; the lease starts when it was the last one."""
        self._manager.release(session)
        self._watch()

    def _watch(self) -> None:
        """See to it that somebody wakes up when the next lease ends; a lease after a lost stream may be the shorter."""
        due = self._manager.next_due()
        if due is None or self._draining:
            return
        running = self._leases is not None and not self._leases.done()
        if running and due < self._wakes and self._leases is not None:
            self._leases.cancel()
            running = False
        if not running:
            self._wakes = due
            self._leases = asyncio.create_task(self._watch_leases())

    async def _watch_leases(self) -> None:
        """Sleep until the next lease ends; runs only while somebody is idle."""
        while (due := self._manager.next_due()) is not None and not self._draining:
            self._wakes = due
            await self._clock.sleep(max(due - self._clock.now(), 0.001))
            for session in self._manager.expired():
                expired = StateError("the session was idle for too long", reason=Reason.EXPIRED)
                self._tasks.spawn(self._end(self._live[session.id], expired))

    def _refuse_when_draining(self) -> None:
        if self._draining:
            raise ServerUnavailable("the server is about to stop", reason=Reason.DRAINING)
