"""Where a session's state goes besides forward: to its beginning, to a child, back, out to a snapshot and in again.

Everything here waits for the session's turn, behind the ticks accepted before it. State that was evicted is made anew
first; where that cannot be, the session is lost and says so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from ..errors import InvalidInput, OmniLoopError, Reason, StateError, UnknownName, Unsupported, nearest
from ..messages import ResetSession, RewindSession
from ..session.log import Base, SessionLog, Version
from ..session.machine import Phase, SessionMachine
from ..session.snapshot import SnapshotData, SnapshotStore, reserved
from ..types import MAX_COUNT
from .flight import Flight
from .live import Live, close_all, evicted
from .prepare import check_prompt, check_seed
from .rebuild import check_fits, load_base, rebuild
from .request import SessionInfo
from .sessions import Sessions
from .tick import all_of

T = TypeVar("T")


class Branching(Sessions):
    """The table of sessions with ways to leave the straight line of ticks."""

    async def reset(self, session: str, token: str, seed: int | None = None, prompt: str | None = None) -> int:
        """Begin a new epoch, after the ticks accepted before; returns it. ``seed`` or ``prompt`` None: as it was."""
        self._refuse_when_draining()
        live = self._find(session, token)
        check_prompt(live.route.graph.spec, prompt or "")
        if seed is not None:
            check_seed(seed)
        return await self._in_turn(live, lambda: self._reset(live, seed, prompt))

    async def fork(self, session: str, token: str, seed: int | None = None) -> SessionInfo:
        """Open a child that stands where the session stands, after the ticks accepted before. ``seed`` None: the
        session's own, so that the two go on alike; with another they draw other noise from here on.

        Raises:
            Exhausted: no room for another session. StateError: the session is closed or lost.
        """
        self._refuse_when_draining()
        live = self._find(session, token)
        seed = live.session.seed if seed is None else check_seed(seed)
        return await self._in_turn(live, lambda: self._fork(live, seed), undo=self._abandon)

    async def rewind(self, session: str, token: str, step: int) -> tuple[int, int]:
        """Begin a new epoch with the state as it was after the latest commit that stood at ``step``, after the ticks
        accepted before. What came later is forgotten; seqs go on. Returns the epoch and the step.

        Raises:
            StateError: there is no way back to ``step``; the text names the steps that can be reached.
        """
        self._refuse_when_draining()
        live = self._find(session, token)
        if not 0 <= step <= 2 * MAX_COUNT:
            raise InvalidInput(f"step is {step}; a session stands at 0 or later")
        return await self._in_turn(live, lambda: self._rewind(live, step))

    async def snapshot(self, session: str, token: str, name: str) -> int:
        """Save the session as ``name``, after the ticks accepted before; the ticks behind it wait until it is written.
        Returns bytes on disk.

        Raises:
            Unsupported: this server keeps no snapshots. InvalidInput, Exhausted, SnapshotError: as the store says.
        """
        self._refuse_when_draining()
        _check_free(name)
        live, store = self._find(session, token), self._kept()
        return await self._in_turn(live, lambda: self._snapshot(live, store, name))

    async def snapshots(self) -> list[str]:
        """Names of all snapshots that are kept. Raises :class:`~omni_loop.errors.Unsupported`."""
        return await asyncio.to_thread(self._kept().names)

    async def restore(self, name: str, *, owner: str = "") -> SessionInfo:
        """Open a session of ``owner`` that goes on where snapshot ``name`` was taken.

        Raises:
            Unsupported: this server keeps no snapshots. UnknownName: no such one, or its pipeline is not served.
            SnapshotError: corrupt, or of other weights or another spec. Exhausted: no room for another session.
        """
        self._refuse_when_draining()
        _check_free(name)
        return await self._tasks.to_the_end(self._restore(self._kept(), name, owner), undo=self._abandon)

    # In a session's turn ----------------------------------------------------------------------------------

    async def _reset(self, live: Live, seed: int | None, prompt: str | None) -> int:
        session, machine, before = live.session, live.session.machine, (live.session.seed, live.session.prompt)
        session.seed = session.seed if seed is None else seed
        session.prompt = session.prompt if prompt is None else prompt
        try:
            if machine.phase is not Phase.EVICTED:
                await self._reset_runners(live, seed, prompt)
            if machine.phase is Phase.EVICTED:  # found out just now, or a runner may not even know the session
                await live.vacate()
                await live.open(session.seed)
        except Exception:
            session.seed, session.prompt = before
            raise
        live.route.forget(session.feedback)
        session.forget()
        epoch = machine.reset()
        self._tell_turned(live, "reset")
        return epoch

    async def _reset_runners(self, live: Live, seed: int | None, prompt: str | None) -> None:
        machine = live.session.machine
        command = ResetSession(live.session.id, machine.epoch + 1, seed, prompt)
        try:
            await all_of([handle.submit(command) for handle in live.route.runners()])
        except OmniLoopError as error:
            if error.reason is Reason.RUNNER_GONE:
                self._lose(live, None, error)
                raise
            machine.evicted()  # one runner may have what another has not: none of it counts
            if not evicted(error):
                raise

    async def _fork(self, live: Live, seed: int) -> SessionInfo:
        parent = live.session
        session = self._manager.open(
            parent.pipeline,
            seed,
            parent.prompt,
            parent.keys,
            parent.options,
            parent.machine.forked(),
            parent.log.forked(),
            parent.owner,
        )
        child = Live(session, live.route)

        async def fork() -> None:
            await self._on_state(live, lambda: live.fork(session.id, seed))
            session.chunk = parent.chunk
            child.feed(live.fed(), session.machine.epoch, session.machine.tick - 1)

        return await self._enter(child, fork, "fork", parent.id)

    async def _rewind(self, live: Live, step: int) -> tuple[int, int]:
        session, machine, log = live.session, live.session.machine, live.session.log
        version = log.find(step)
        if version is None:
            raise StateError(
                f"there is no way back to step {step}: {_reachable(log.steps())}", reason=Reason.BAD_REQUEST
            )
        epoch, feedback = machine.epoch + 1, log.feedback(version)
        known = feedback is not None and machine.phase is not Phase.EVICTED
        if feedback is not None and known and await self._rewind_runners(live, version, epoch):
            live.feed(feedback, epoch, version.tick)
        else:
            await self._check_way_back(live, version)
            await self._rebuild(live, epoch, version)
        log.cut(version)
        session.chunk = version.chunk
        session.replies.clear()
        session.doubtful = False
        epoch = machine.rewound(version.position)
        self._tell_turned(live, "rewind")
        return epoch, version.position.step

    async def _check_way_back(self, live: Live, version: Version) -> None:
        """Refuse before anything is touched what a replay cannot reach: a rewind that fails must lose nothing."""
        log = live.session.log
        if not log.reaches(version):
            log.forget(version)
            raise _no_way_back(log, version, "made room for others")
        if log.base is not None and live.session.machine.phase is not Phase.EVICTED:
            try:
                await load_base(log.base, self._store, version.position.step)
            except StateError as error:
                raise _no_way_back(log, version, f"would be made anew from a snapshot, but {error.text}") from error

    async def _rewind_runners(self, live: Live, version: Version, epoch: int) -> bool:
        """Whether every runner went back; False: the log shall bring the session there. Without a log that can, a
        version that one runner has given up is refused, and the others come forward again."""
        session, log, runners = live.session, live.session.log, live.route.runners()
        aside = f"{session.id}~" if len(runners) > 1 and not log.reaches(version) else ""
        if aside:
            await self._on_state(live, lambda: live.fork(aside, None))
        command = RewindSession(session.id, epoch, version.epoch, version.tick)
        outcomes = await asyncio.gather(*(h.submit(command) for h in runners), return_exceptions=True)
        errors = [o for o in outcomes if isinstance(o, BaseException)]
        gone = [e for e in errors if isinstance(e, StateError) and e.reason is Reason.BAD_REQUEST]
        if aside:
            if errors:
                await self._become(live, aside)
            await close_all(runners, aside)
        if not errors:
            return True
        if len(gone) < len(errors) or log.reaches(version):
            odd = next((e for e in errors if e not in gone and not evicted(e)), None)
            if odd is not None:
                self._lose(live, None, odd)
                raise odd
            return False
        log.forget(version)
        raise _no_way_back(log, version, "made room for others")

    async def _become(self, live: Live, other: str) -> None:
        try:
            await live.become(other)
        except Exception as error:
            self._lose(live, None, error)
            raise
        live.session.log.kept.clear()  # what comes back has no past on the runners

    async def _capture(self, live: Live) -> SnapshotData:
        """The session as it stands, in its turn."""
        s, machine = live.session, live.session.machine
        stages = await self._on_state(live, live.export)
        last = machine.forked()
        return SnapshotData(
            pipeline=s.pipeline,
            spec=live.route.graph.spec.digest,
            seed=s.seed,
            prompt=s.prompt,
            keys=s.keys,
            options=s.options,
            epoch=machine.epoch,
            tick=machine.tick,
            seq=last.accepted,
            position=machine.position,
            chunk=s.chunk,
            stages=stages,
            feedback=live.fed(),
        )

    async def _snapshot(self, live: Live, store: SnapshotStore, name: str) -> int:
        data, s = await self._capture(live), live.session
        # In its turn to the end, so that a log that was incomplete goes on from exactly here.
        saved = await asyncio.to_thread(store.save, name, data)
        s.log.snapshotted(Base(name, saved.digest, _version(data)))
        self._tell_turned(live, "snapshot", name)
        return saved.nbytes

    async def _restore(self, store: SnapshotStore, name: str, owner: str) -> SessionInfo:
        data, saved = await asyncio.to_thread(store.load, name)
        routes = self._pool.routes
        if data.pipeline not in routes:
            raise UnknownName(f"the snapshot is of pipeline {data.pipeline!r}.{nearest(data.pipeline, routes)}")
        route = routes[data.pipeline]
        check_fits(data, route)
        machine = SessionMachine(epoch=data.epoch, tick=data.tick, position=data.position, accepted=data.seq)
        log = self._manager.log()
        log.clear(Base(name, saved.digest, _version(data)))
        session = self._manager.open(
            data.pipeline, data.seed, data.prompt, data.keys, data.options, machine, log, owner
        )
        session.chunk = data.chunk
        live = Live(session, route)

        async def restore() -> None:
            await live.restore(data, data.seed)
            live.feed(data.feedback, data.epoch, data.tick - 1)

        return await self._enter(live, restore, "restore", name)

    # Evicted state -----------------------------------------------------------------------------------------

    async def _on_state(self, live: Live, call: Callable[[], Awaitable[T]]) -> T:
        """``call`` on the runners' state, which is made anew first when it was evicted."""
        if live.session.machine.phase is not Phase.EVICTED:
            try:
                return await call()
            except StateError as error:
                if not evicted(error):
                    raise
            live.session.machine.evicted()
        await self._revive(live)
        return await call()

    async def _revive(self, live: Live, flight: Flight | None = None) -> None:
        """Evicted state is as after the last commit again, or the session is lost; ``flight`` hears why."""
        await self._rebuild(live, live.session.machine.epoch, flight=flight)
        live.session.machine.rebuilt()

    async def _rebuild(self, live: Live, epoch: int, upto: Version | None = None, flight: Flight | None = None) -> None:
        machine = live.session.machine
        if machine.phase is Phase.IDLE:
            machine.evicted()  # from here on nothing on the runners counts
        try:
            await rebuild(live, self._store, epoch, upto)
        except OmniLoopError as error:
            if error.reason in (Reason.SESSION_LOST, Reason.RUNNER_GONE):
                self._lose(live, flight, error)
            raise

    def _kept(self) -> SnapshotStore:
        if self._store is None:
            raise Unsupported("this server keeps no snapshots; its deployment names no folder for them")
        return self._store


def _check_free(name: str) -> None:
    if reserved(name):
        raise InvalidInput(f"{name!r} is the server's own name for a session; take another")


def _version(data: SnapshotData) -> Version:
    """Where ``data`` was taken, in the order of versions: before every tick that follows."""
    return Version(data.epoch, data.tick - 1, data.position, data.chunk)


def _reachable(steps: list[int]) -> str:
    shown = ", ".join(map(str, steps[-16:]))
    more = f" and {len(steps) - 16} earlier ones" if len(steps) > 16 else ""
    return f"steps that can be reached: {shown}{more}" if steps else "no step can be reached"


def _no_way_back(log: SessionLog[Any], version: Version, why: str) -> StateError:
    text = f"the state of step {version.position.step} {why}, and there is no way back: {_reachable(log.steps())}"
    return StateError(text, reason=Reason.BAD_REQUEST)
