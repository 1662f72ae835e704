"""The orchestrator: every session's progress through its pipeline, event-driven and guarded.

A tick's life: :meth:`Orchestrator.tick` judges its seq -> it waits for its session's turn -> :meth:`_fly`: answer
stages run, the answer is read, checked, logged and committed, and leaves -> besides stages run in their own transaction
-> payloads are released and the turn passes on. A failure ends that tick only: the session is as before it. A runner
that has given the session's state to others makes the tick wait until the log has made it anew.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..clock import Clock, SystemClock
from ..errors import Reason, ServerUnavailable, StateError
from ..session.log import Entry, Version
from ..session.machine import Phase, Verdict
from ..session.manager import SessionManager
from ..session.snapshot import SnapshotStore
from ..telemetry import metrics
from ..types import Op, SessionSpec, TickResult
from .endure import Enduring, Keep, SessionStore
from .flight import Flight, OnPart
from .graph import EXECUTED, OBSERVATION, CompiledPlan
from .live import Live, evicted
from .parts import Show
from .pool import Pool
from .prepare import Work, check_request, prepare
from .rebuild import Logged
from .request import TickRequest
from .results import read, read_part
from .tap import Tap, Ticked
from .tasks import public
from .tick import TickRun, eager

if TYPE_CHECKING:
    from ..config import Deployment, SessionConfig, SnapshotConfig


_gaps = metrics.counter("omni_loop_seqs_missing", "Seqs that were passed over by a higher one")
_waited = metrics.histogram("omni_loop_turn_wait_seconds", "From a request's arrival to its session's turn")


class Orchestrator(Enduring):
    """Admits, advances and answers ticks; all methods belong to one event loop."""

    def __init__(
        self,
        pool: Pool,
        session: SessionConfig,
        max_sessions: int,
        clock: Clock | None = None,
        store: SnapshotStore | None = None,
        tap: Tap | None = None,
        keep: Keep | None = None,
    ) -> None:
        clock = clock or SystemClock()
        manager = SessionManager(
            clock,
            max_sessions,
            session.idle_ttl_s,
            session.max_waiting,
            session.log_bytes,
            session.rewind_ticks,
            session.grace_s,
            session.replies,
            session.logs_bytes,
        )
        super().__init__(pool, manager, clock, store, tap, keep)

    @classmethod
    async def start(cls, deployment: Deployment) -> Orchestrator:
        """Build the pipelines' runners, warm them up, and be ready.

        Raises:
            ConfigError, UnknownName, MissingExtra, CheckpointError: the deployment cannot run as written.
        """
        store, tap = _store(deployment.snapshots), _tap(deployment)
        kept = deployment.snapshots
        outlive = store is not None and (kept.on_stop or kept.every_ticks)
        keep = Keep(store, kept.on_stop, kept.every_ticks) if store is not None and outlive else None
        try:
            pool = await Pool.start(deployment)
        except BaseException:
            if tap is not None:
                await asyncio.to_thread(tap.stop)
            raise
        core = cls(pool, deployment.session, deployment.limits.max_sessions, store=store, tap=tap, keep=keep)
        core.claim(deployment.session.idle_ttl_s)
        return core

    @property
    def specs(self) -> Mapping[str, SessionSpec]:
        """The spec of every pipeline served, by name."""
        return {name: route.graph.spec for name, route in self._pool.routes.items()}

    @property
    def ready(self) -> bool:
        """Every stage has run once, every runner lives, and the server is not draining."""
        return not self._draining and self._pool.alive

    @property
    def recording(self) -> bool | None:
        """Whether all that should be recorded is; None: nothing is recorded."""
        return self._tap.healthy() if self._tap else None

    async def ping(self) -> None:
        """Pass through the work loop of every runner; raises ServerUnavailable when one is gone."""
        await self._pool.ping()

    def last_seq(self, session: str, token: str) -> int:
        """Highest seq answered so far with a result; 0: none in this epoch."""
        return self._find(session, token).session.machine.answered

    async def tick(self, request: TickRequest, on_part: OnPart | None = None, *, keep: bool = False) -> TickResult:
        """Run one seq. ``on_part`` hears the answer early when frames come besides it, and parts of the frames while
        they are made when the request wants ``previews``.

        A failed tick changes nothing, and its seq may be sent again. Cancelling the last caller ends the tick, unless
        it said ``keep``: then the answer is there for a repeat of the seq.

        Raises:
            UnknownSession, InvalidInput, Unsupported: refused before anything ran.
            StateError: stale seq, a step the session cannot take, closed or lost. Exhausted: too many ticks wait.
            DeadlineExceeded, StageFailed, PayloadError, ServerUnavailable: the tick was undone.
        """
        arrived = self._clock.now() - 1e-3 * request.spent_ms
        live = self._find(request.session, request.token)
        leave = functools.partial(self._end_flight, live)
        flight = live.flights.get(request.seq)
        if flight is None:
            self._check_sure(live, request.seq)
            machine, replaced = live.session.machine, _replaced(live, request)
            verdict, kept = machine.judge(request.seq, len(replaced)), live.session.replies.get(request.seq)
            if verdict is Verdict.REPEAT and kept is not None:
                return kept
            self._refuse_when_draining()
            plan = check_request(live.route.graph, live.session.keys, request)
            if verdict is Verdict.GAPPED:
                _gaps.inc(request.seq - machine.accepted - 1)
            for other in replaced:
                newer = f"seq {request.seq} came and replaced it"
                self._end_flight(live, other, StateError(newer, reason=Reason.SUPERSEDED))
            machine.accept(request.seq)
            flight = live.flights[request.seq] = Flight(request, plan, arrived)
            flight.arm(leave)
            self._manager.hold(live.session)
            self._tasks.spawn(self._fly(live, flight))
        return await flight.wait(on_part, None if keep else leave)

    # One tick ---------------------------------------------------------------------------------------------

    async def _fly(self, live: Live, flight: Flight) -> None:
        """One tick from its turn to its end. Never raises: what goes wrong is the flight's answer."""
        async with live.turn:
            if not flight.over:
                try:
                    await self._run(live, flight)
                except Exception as error:
                    self._lose(live, flight, error)
                else:
                    await self._after_tick(live)
        if live.flights.get(flight.request.seq) is flight:
            del live.flights[flight.request.seq]
        self._release(live.session)

    async def _run(self, live: Live, flight: Flight) -> None:
        """Raises only when the runners' state is in doubt: a commit, discard or release failed."""
        session, machine, plan = live.session, live.session.machine, flight.plan
        flight.began = self._clock.now()
        _waited.observe(flight.began - flight.arrived)
        machine.started(flight.request.seq)
        run: TickRun | None = None
        try:
            work = prepare(live.route.graph, plan, session, flight.request)
            if machine.phase is Phase.REBUILDING:
                await self._revive(live, flight)
            run = self._begin(live, flight, work)
            try:
                await run.run(plan.answer)
            except StateError as error:
                if not evicted(error):
                    raise
                await run.discard()
                await run.release()
                machine.evicted()
                await self._revive(live, flight)
                run = self._begin(live, flight, work)
                await run.run(plan.answer)
            answer = read(
                live.route.graph.spec, plan, run, work, TickResult(flight.request.seq, machine.epoch + work.past)
            )
        except Exception as error:
            await self._undo(live, flight, run, error)
            return
        flight.sealed = True
        if plan.op is Op.PLAN:
            await self._reply(live, flight, run, work, answer)
        else:
            await self._commit(live, flight, run, work, answer)
        await asyncio.sleep(0)  # the answer leaves before what is left of the tick is cleaned up
        await run.release()

    def _begin(self, live: Live, flight: Flight, work: Work) -> TickRun:
        session, machine = live.session, live.session.machine
        show: tuple[CompiledPlan, Show] | None = None
        if flight.request.previews and flight.plan.plan.frames is not None and work.count:
            spec, seq, epoch = live.route.graph.spec, flight.request.seq, machine.epoch + work.past
            show = flight.plan, lambda part, made: flight.show(read_part(made, spec, seq, work, epoch, part))
        return TickRun(live.route, session.id, machine.epoch, machine.tick, work, session.feedback, flight.stop, show)

    async def _undo(self, live: Live, flight: Flight, run: TickRun | None, error: Exception) -> None:
        """The tick failed. The caller hears at once; the turn passes on when the runners have undone it."""
        self._end_flight(live, flight, public(error))
        if run is not None:
            await run.discard()
            await run.release()
        if isinstance(error, ServerUnavailable) and error.reason is Reason.RUNNER_GONE:
            raise error  # with the session's state
        if live.session.machine.phase in (Phase.RUNNING, Phase.REBUILDING):
            live.session.machine.undone()

    async def _reply(self, live: Live, flight: Flight, run: TickRun, work: Work, answer: TickResult) -> None:
        """The answer leaves, and what the tick staged is forgotten: the session stays as it was."""
        result = self._timed(flight, run, answer)
        await run.discard()
        if live.session.machine.phase is Phase.RUNNING:
            live.session.machine.replied(flight.request.seq)
            live.session.remember(result)
            flight.answer(result, last=True)
            self._tell(flight, work, live.session.machine.epoch, live.session.machine.tick, live.session.seed, result)
            live.session.machine.finished()

    async def _commit(self, live: Live, flight: Flight, run: TickRun, work: Work, answer: TickResult) -> None:
        session, machine = live.session, live.session.machine
        chunk = session.chunk
        if work.op is not Op.PREDICT and (answer.chunk is not None or work.past):
            chunk = answer.chunk  # imagined chunks are not what a robot executes
        version = Version(machine.epoch, machine.tick, work.position, chunk)
        entry: Entry[Logged] = session.log.add(version, session.seed, (flight.plan, work), _nbytes(work))
        commit = eager(run.commit(session.log.recomputable))
        if not run.certain:
            await commit
        if machine.phase is Phase.RUNNING:  # else closed meanwhile: the caller has heard, the state is freed next
            machine.committed(flight.request.seq, work.position, work.past)
            session.chunk = chunk
            await self._answer(live, flight, run, entry, answer, commit)
        await commit

    async def _answer(
        self,
        live: Live,
        flight: Flight,
        run: TickRun,
        entry: Entry[Logged],
        answer: TickResult,
        commit: asyncio.Task[None],
    ) -> None:
        """The committed answer leaves; what was asked besides follows; the next tick is fed."""
        session, machine, (_, work) = live.session, live.session.machine, entry.work
        last = not flight.plan.besides or work.count == 0
        result = self._timed(flight, run, answer)
        session.remember(result)
        flight.answer(result, last)
        try:
            await commit
            if not last:
                result = replace(await self._besides(live, flight, run, entry, result), early=result.timings)
                session.remember(result)
                flight.finish(result)
        finally:
            self._tell(flight, work, entry.version.epoch, entry.version.tick, entry.seed, result)
        if machine.phase is Phase.TRAILING:
            fed = run.fed()
            live.feed(fed, machine.epoch, entry.version.tick)
            session.log.keep(entry.version, fed)
            machine.finished()

    async def _besides(
        self, live: Live, flight: Flight, run: TickRun, entry: Entry[Logged], answer: TickResult
    ) -> TickResult:
        """``answer`` with what was asked besides, or with the error that lost it."""
        try:
            await run.run(flight.plan.besides)
            result = read(live.route.graph.spec, flight.plan, run, entry.work[1], answer)
        except Exception as error:
            await run.discard()
            return replace(answer, frames_error=public(error))
        await run.commit(live.session.log.recomputable)
        entry.besides = True
        return self._timed(flight, run, result)

    def _tell(self, flight: Flight, work: Work, epoch: int, tick: int, seed: int, result: TickResult) -> None:
        sent = work.sent.get(OBSERVATION)
        executed = None if sent is None else sent.arrays[EXECUTED]
        stands = work.position.step
        self._tap.ticked(Ticked(flight.request, executed, epoch, tick, work.step, stands, seed, result))

    def _timed(self, flight: Flight, run: TickRun, result: TickResult) -> TickResult:
        total_ms = 1e3 * (self._clock.now() - flight.arrived)
        timings = run.timings(total_ms, 1e3 * (flight.began - flight.arrived))
        chunk = None if result.chunk is None else replace(result.chunk, timings=timings)
        return replace(result, chunk=chunk, timings=timings)


def _store(config: SnapshotConfig) -> SessionStore | None:
    """The deployment's store; None when it names no folder."""
    if config.folder is None:
        return None
    # It brings zarr, which a server without snapshots never loads.
    from ..record.snapshot import ZarrSnapshots

    return ZarrSnapshots(Path(config.folder), config.max_bytes)


def _tap(deployment: Deployment) -> Tap | None:
    """The deployment's recorder; None when it names no folder."""
    if deployment.record.folder is None:
        return None
    # It brings codecs, which a server that records nothing never loads.
    from ..record.recorder import Recorder

    return Recorder(deployment)


def _replaced(live: Live, request: TickRequest) -> list[Flight]:
    """Observations that wait and have not begun, which a newer one that says so replaces."""
    if not request.supersede or request.op is not Op.INFER:
        return []
    begun = live.session.machine.running
    flights = [f for f in live.flights.values() if f.request.op is Op.INFER and not f.over and not f.sealed]
    return [f for f in flights if f.request.seq != begun and f.request.seq < request.seq]


def _nbytes(work: Work) -> int:
    """Bytes of what the client sent."""
    return sum(array.nbytes for payload in work.sent.values() for array in payload.arrays.values())
