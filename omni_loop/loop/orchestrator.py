"""The orchestrator: every session's progress through its pipeline, event-driven and guarded.

A tick's life: :meth:`Orchestrator.tick` judges its seq -> it waits for its session's turn -> :meth:`_fly`: answer
stages run, the answer is read, checked and committed, and leaves -> besides stages run in their own transaction ->
payloads are released and the turn passes on. A failure ends that tick only: the session is as before it.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from ..clock import Clock, SystemClock
from ..errors import OmniLoopError, Reason, ServerUnavailable, StageFailed, StateError, UnknownName, nearest
from ..messages import CloseSession, OpenSession, ResetSession, Scalar
from ..session.machine import Phase, Verdict
from ..session.manager import Session, SessionManager
from ..types import Op, SessionSpec, TickResult
from .flight import Flight, OnPart
from .pool import Pool
from .prepare import Work, check_keys, check_options, check_prompt, check_request, check_seed, prepare
from .request import SessionInfo, TickRequest
from .results import read
from .tick import Route, TickRun, all_of, eager

if TYPE_CHECKING:
    from ..config import Deployment, SessionConfig

T = TypeVar("T")
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Live:
    """A session with what the loop needs beside it."""

    session: Session
    route: Route
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)  # passes on in the order of arrival
    flights: dict[int, Flight] = field(default_factory=dict)  # by seq


class Orchestrator:
    """Admits, advances and answers ticks; all methods belong to one event loop."""

    def __init__(self, pool: Pool, session: SessionConfig, max_sessions: int, clock: Clock | None = None) -> None:
        self._pool = pool
        self._clock = clock or SystemClock()
        self._manager = SessionManager(self._clock, max_sessions, session.idle_ttl_s, session.max_waiting)
        self._live: dict[str, _Live] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._leases: asyncio.Task[None] | None = None
        self._draining = False

    @classmethod
    async def start(cls, deployment: Deployment) -> Orchestrator:
        """Build the pipelines' runners, warm them up, and be ready.

        Raises:
            ConfigError, UnknownName, MissingExtra, CheckpointError: the deployment cannot run as written.
        """
        pool = await Pool.start(deployment)
        return cls(pool, deployment.session, deployment.limits.max_sessions)

    @property
    def specs(self) -> Mapping[str, SessionSpec]:
        """The spec of every pipeline served, by name."""
        return {name: route.graph.spec for name, route in self._pool.routes.items()}

    @property
    def ready(self) -> bool:
        """Every stage has run once, every runner lives, and the server is not draining."""
        return not self._draining and self._pool.alive

    async def ping(self) -> None:
        """Pass through the work loop of every runner; raises ServerUnavailable when one is gone."""
        await self._pool.ping()

    def session(self, session: str, token: str) -> SessionInfo:
        """The owner's view of an open session; UnknownSession otherwise."""
        return self._info(self._find(session, token))

    def last_seq(self, session: str, token: str) -> int:
        """Highest seq answered so far with a result; 0: none in this epoch."""
        return self._find(session, token).session.machine.answered

    async def open(
        self,
        pipeline: str,
        seed: int | None = None,
        prompt: str = "",
        observation_keys: Sequence[str] = (),
        options: Mapping[str, Scalar] | None = None,
    ) -> SessionInfo:
        """Open a session. ``seed`` None: drawn here; no ``observation_keys``: exactly the required ones.

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
        )
        return await self._to_the_end(self._open(_Live(session, route)), undo=self._abandon)

    async def tick(self, request: TickRequest, on_part: OnPart | None = None) -> TickResult:
        """Run one seq. ``on_part`` hears the answer early when frames come besides it.

        A failed tick changes nothing, and its seq may be sent again. Cancelling the last caller ends the tick.

        Raises:
            UnknownSession, InvalidInput, Unsupported: refused before anything ran.
            StateError: stale seq, a step the session cannot take, closed or lost. Exhausted: too many ticks wait.
            DeadlineExceeded, StageFailed, PayloadError, ServerUnavailable: the tick was undone.
        """
        arrived = self._clock.now()
        live = self._find(request.session, request.token)
        leave = functools.partial(self._end_flight, live)
        flight = live.flights.get(request.seq)
        if flight is None:
            if live.session.machine.judge(request.seq) is Verdict.REPEAT and live.session.reply is not None:
                return live.session.reply
            self._refuse_when_draining()
            plan = check_request(live.route.graph, live.session.keys, request)
            live.session.machine.accept(request.seq)
            flight = live.flights[request.seq] = Flight(request, plan, arrived)
            flight.arm(leave)
            self._manager.hold(live.session)
            self._spawn(self._fly(live, flight))
        return await flight.wait(on_part, leave)

    async def reset(self, session: str, token: str, seed: int | None = None, prompt: str | None = None) -> int:
        """Begin a new epoch, after the ticks accepted before; returns it. ``seed`` or ``prompt`` None: as it was."""
        self._refuse_when_draining()
        live = self._find(session, token)
        check_prompt(live.route.graph.spec, prompt or "")
        if seed is not None:
            check_seed(seed)
        self._manager.hold(live.session)
        return await self._to_the_end(self._reset(live, seed, prompt))

    async def close(self, session: str, token: str) -> None:
        """Free everything of the session; its ticks in flight are cancelled."""
        live = self._find(session, token)
        await self._to_the_end(self._end(live, StateError("the session was closed", reason=Reason.CLOSED)))

    async def stop(self, grace_s: float = 5.0) -> None:
        """Refuse new work, let ticks in flight finish within ``grace_s``, then end everything."""
        self._draining = True
        if self._leases is not None:
            self._leases.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=grace_s)
        stopping = ServerUnavailable("the server stopped", reason=Reason.DRAINING)
        left = [live for live in self._live.values() if live.session.machine.phase is not Phase.CLOSED]
        try:
            await all_of([self._end(live, stopping) for live in left])
            while self._tasks:
                await asyncio.wait(self._tasks)
        finally:
            await self._pool.stop()

    # One tick ---------------------------------------------------------------------------------------------

    async def _fly(self, live: _Live, flight: Flight) -> None:
        """One tick from its turn to its end. Never raises: what goes wrong is the flight's answer."""
        async with live.turn:
            if not flight.over:
                try:
                    await self._run(live, flight)
                except Exception as error:
                    self._lose(live, flight, error)
        if live.flights.get(flight.request.seq) is flight:
            del live.flights[flight.request.seq]
        self._release(live.session)

    async def _run(self, live: _Live, flight: Flight) -> None:
        """Raises only when the runners' state is in doubt: a commit, discard or release failed."""
        session, machine, plan = live.session, live.session.machine, flight.plan
        flight.began = self._clock.now()
        machine.started(flight.request.seq)
        run: TickRun | None = None
        try:
            work = prepare(live.route.graph, plan, session, flight.request)
            run = TickRun(live.route, session.id, machine.epoch, machine.tick, work, session.feedback, flight.stop)
            await run.run(plan.answer)
            answer = read(
                live.route.graph.spec, plan, run, work, TickResult(flight.request.seq, machine.epoch + work.past)
            )
        except Exception as error:
            # The caller hears at once; the turn passes on when the runners have undone the tick.
            self._end_flight(live, flight, _public(error))
            if run is not None:
                await run.discard()
                await run.release()
            if isinstance(error, ServerUnavailable) and error.reason is Reason.RUNNER_GONE:
                raise  # with the session's state
            if machine.phase is Phase.RUNNING:
                machine.undone()
            return
        flight.sealed = True
        await run.commit()
        if machine.phase is Phase.RUNNING:  # else closed meanwhile: the caller has heard, the state is freed next
            machine.committed(flight.request.seq, work.position, work.past)
            await self._answer(live, flight, run, work, answer)
        await run.release()

    async def _answer(self, live: _Live, flight: Flight, run: TickRun, work: Work, answer: TickResult) -> None:
        """The committed answer leaves; what was asked besides follows; the next tick is fed."""
        session, machine, besides = live.session, live.session.machine, flight.plan.besides
        if work.op is not Op.PREDICT and (answer.chunk is not None or work.past):
            session.chunk = answer.chunk  # imagined chunks are not what a robot executes
        last = not besides or work.count == 0
        session.reply = result = self._timed(flight, run, answer)
        flight.answer(result, last)
        if not last:
            session.reply = result = await self._besides(live, flight, run, work, result)
            flight.finish(result)
        if machine.phase is Phase.TRAILING:
            fed = run.feed(machine.epoch)
            live.route.forget(session.feedback)
            session.feedback = fed
            machine.finished()

    async def _besides(self, live: _Live, flight: Flight, run: TickRun, work: Work, answer: TickResult) -> TickResult:
        """``answer`` with what was asked besides, or with the error that lost it."""
        try:
            await run.run(flight.plan.besides)
            result = read(live.route.graph.spec, flight.plan, run, work, answer)
        except Exception as error:
            await run.discard()
            return replace(answer, frames_error=_public(error))
        await run.commit()
        return self._timed(flight, run, result)

    def _timed(self, flight: Flight, run: TickRun, result: TickResult) -> TickResult:
        total_ms = 1e3 * (self._clock.now() - flight.arrived)
        timings = run.timings(total_ms, 1e3 * (flight.began - flight.arrived))
        chunk = None if result.chunk is None else replace(result.chunk, timings=timings)
        return replace(result, chunk=chunk, timings=timings)

    def _end_flight(self, live: _Live, flight: Flight, error: OmniLoopError) -> None:
        """End ``flight`` early. Until its commit is sent, its seq may be sent again."""
        if flight.over:
            return
        flight.fail(error)
        if not flight.sealed:
            live.session.machine.dropped(flight.request.seq)
            del live.flights[flight.request.seq]

    def _lose(self, live: _Live, flight: Flight | None, error: Exception) -> None:
        """A runner may hold what another does not: the session is lost, and says so from now on."""
        public = _public(error)
        _log.error("session %s is lost: %s", live.session.id, public.text)
        if live.session.machine.phase is not Phase.CLOSED:
            live.session.machine.lost()
        if flight is not None:
            flight.fail(public)
        for other in live.flights.values():
            other.fail(live.session.machine.refusal())
        live.flights.clear()

    # Sessions ---------------------------------------------------------------------------------------------

    def _find(self, session: str, token: str) -> _Live:
        return self._live[self._manager.find(session, token).id]

    def _info(self, live: _Live) -> SessionInfo:
        s, m = live.session, live.session.machine
        return SessionInfo(s.id, s.token, m.epoch, s.seed, live.route.graph.spec, s.keys, m.accepted, m.position.step)

    async def _open(self, live: _Live) -> SessionInfo:
        session = live.session
        groups = live.route.runners()
        commands = [OpenSession(session.id, session.seed, session.prompt, session.options, s) for s in groups.values()]
        calls = [handle.submit(command) for handle, command in zip(groups, commands, strict=True)]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        opened = [h for h, o in zip(groups, outcomes, strict=True) if not isinstance(o, BaseException)]
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                self._manager.remove(session)
                await all_of([handle.submit(CloseSession(session.id)) for handle in opened])
                raise outcome
        session.machine.opened()
        self._live[session.id] = live
        self._release(session)
        return self._info(live)

    async def _abandon(self, opening: asyncio.Task[SessionInfo]) -> None:
        """Nobody will ever know the id of the session that was being opened."""
        info = await opening
        await self.close(info.id, info.token)

    async def _reset(self, live: _Live, seed: int | None, prompt: str | None) -> int:
        session, machine = live.session, live.session.machine
        try:
            async with live.turn:
                machine.check_usable()
                command = ResetSession(session.id, machine.epoch + 1, seed, prompt)
                try:
                    await all_of([handle.submit(command) for handle in live.route.runners()])
                except Exception as error:
                    self._lose(live, None, error)
                    raise
                live.route.forget(session.feedback)
                session.forget()
                session.seed = session.seed if seed is None else seed
                session.prompt = session.prompt if prompt is None else prompt
                return machine.reset()
        finally:
            self._release(session)

    async def _end(self, live: _Live, why: OmniLoopError) -> None:
        """Close: refuse what comes, cancel what is in flight, wait for its undoing, free everything."""
        session = live.session
        session.machine.closed()
        for flight in tuple(live.flights.values()):
            self._end_flight(live, flight, why)
        try:
            async with live.turn:
                live.route.forget(session.feedback)
                session.forget()
                await all_of([handle.submit(CloseSession(session.id)) for handle in live.route.runners()])
        except ServerUnavailable as gone:
            if gone.reason is not Reason.RUNNER_GONE:  # with a runner that is gone, its state is freed
                raise
        finally:
            for handle in live.route.runners():
                handle.connector.cleanup_session(session.id)  # what a failed release has left
            self._manager.remove(session)
            del self._live[session.id]

    def _release(self, session: Session) -> None:
        """A call ended; the lease starts when it was the last one."""
        self._manager.release(session)
        if (self._leases is None or self._leases.done()) and self._manager.next_due() is not None:
            self._leases = asyncio.create_task(self._watch_leases())

    async def _watch_leases(self) -> None:
        """Sleep until the next lease ends; runs only while somebody is idle."""
        while (due := self._manager.next_due()) is not None and not self._draining:
            await self._clock.sleep(max(due - self._clock.now(), 0.001))
            for session in self._manager.expired():
                expired = StateError("the session was idle for too long", reason=Reason.EXPIRED)
                self._spawn(self._end(self._live[session.id], expired))

    # Tasks ------------------------------------------------------------------------------------------------

    def _refuse_when_draining(self) -> None:
        if self._draining:
            raise ServerUnavailable("the server is about to stop", reason=Reason.DRAINING)

    async def _to_the_end(
        self, work: Coroutine[Any, Any, T], undo: Callable[[asyncio.Task[T]], Coroutine[Any, Any, None]] | None = None
    ) -> T:
        """Run ``work`` to its end even when the caller is cancelled; then ``undo`` follows."""
        task = self._spawn(work)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if undo is not None:
                self._spawn(undo(task))
            raise

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = eager(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _public(error)  # logs what is no answer of ours; the caller, if any, gets the error itself


def _public(error: BaseException) -> OmniLoopError:
    """``error`` as it may be shown; anything that is not ours is logged and shown as internal."""
    if isinstance(error, OmniLoopError):
        return error
    _log.error("internal error", exc_info=error)
    return StageFailed("the server met an internal error; its log says which")
