"""Sessions that outlive the server: written when it stops, and every so many ticks, and gone on with by their clients.

A session is kept under a name of its own, ``session-<id>``, which no client can write or restore. A client that comes
with its id and token to a server that does not know the session makes it go on from there. What it was answered after
the last time it was written is lost: a session that may have gone on since says so, and stands still until its client
shows what it goes on from, with an attach, or with the very next seq.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from ..clock import Clock
from ..errors import InvalidInput, OmniLoopError, Reason, SnapshotError, StateError, UnknownName
from ..session.log import Base, Version
from ..session.machine import Phase, SessionMachine
from ..session.snapshot import RESERVED as _PREFIX
from ..session.snapshot import Saved, SnapshotData, SnapshotStore, reserved
from ..telemetry import metrics
from ..types import TickResult
from ..wire import loop_pb2 as pb
from ..wire.limits import Limits
from ..wire.replies import decode_result, encode_result
from .branching import Branching
from .flight import Flight
from .live import Live
from .pool import Pool
from .rebuild import check_fits
from .request import Attachment
from .tap import Tap
from .tasks import public

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..session.manager import SessionManager

_NOBODY = hashlib.sha256(b"nobody").hexdigest()
# Above what any stream had that attached after the session was last written.
_ATTACHMENTS = 1 << 20
_LIMITS = Limits()  # of answers that were our own
_log = logging.getLogger(__name__)
_saves = metrics.counter("omni_loop_session_saves", "Sessions written so that they outlive the server", ("how",))
_recalls = metrics.counter("omni_loop_session_recalls", "Sessions gone on with after their server", ("how",))


class SessionStore(SnapshotStore, Protocol):
    """A store that forgets too."""

    def discard(self, name: str) -> None:
        """There is no snapshot ``name`` any more. Raises SnapshotError: it cannot be removed."""


@dataclass(frozen=True, slots=True)
class Keep:
    """Where and when sessions are written: when the server stops, and after so many ticks (0: not)."""

    store: SessionStore
    on_stop: bool = False
    every_ticks: int = 0


@dataclass(slots=True)
class _Waiting:
    """What is to be written next of a session. The newest replaces what waits."""

    data: SnapshotData
    replies: Sequence[TickResult]
    epoch: int


class Enduring(Branching):
    """The table of sessions, with what makes them outlive it."""

    def __init__(
        self,
        pool: Pool,
        manager: SessionManager,
        clock: Clock,
        store: SnapshotStore | None,
        tap: Tap | None = None,
        keep: Keep | None = None,
    ) -> None:
        super().__init__(pool, manager, clock, store, tap)
        self._keep = keep
        self._waiting: dict[str, _Waiting] = {}
        self._writing: dict[str, asyncio.Lock] = {}  # held while a session's snapshot is replaced, or relied on
        self._recalling = asyncio.Lock()
        self._known: dict[str, tuple[str, str]] = {}  # token's hash and owner of those that were not recalled
        self._unclaimed: asyncio.Task[None] | None = None

    async def recall(self, session: str, token: str, owner: str = "") -> None:
        """Let ``session`` go on that an earlier server has kept, for who opened it and holds its token. Nothing happens
        for one that is open here, is not known, or is another's.

        Raises:
            StateError: (session_lost) it was kept, and cannot go on here. Exhausted: no room for another session.
        """
        if self._keep is None or session in self._manager or not reserved(_PREFIX + session):
            return
        self._refuse_when_draining()  # unknown here, and maybe not to the server that comes next
        async with self._recalling:
            if session not in self._manager and self._fits(session, token, owner):
                await self._tasks.to_the_end(self._recall(self._keep.store, session, token, owner))

    def attach(self, session: str, token: str, fence: Callable[[], None], last_received: int | None) -> Attachment:
        """As for any session. StateError (session_lost) the first time a client has received more than was kept."""
        live = self._find(session, token)
        if live.session.doubtful and last_received is not None:
            if last_received > live.session.machine.accepted:
                raise _behind(live, last_received)
            live.session.doubtful = False
        return super().attach(session, token, fence, last_received)

    def claim(self, after_s: float) -> None:
        """Forget what an earlier server has kept and nobody has asked for within ``after_s``, as long as a lease."""
        if self._keep is not None:
            self._unclaimed = asyncio.create_task(self._forget_unclaimed(self._keep.store, after_s))

    # For ticks --------------------------------------------------------------------------------------------

    def _check_sure(self, live: Live, seq: int) -> None:
        """A client whose next seq follows what was kept has lost nothing; any other has to attach first."""
        if live.session.doubtful and seq > live.session.machine.accepted + 1:
            raise _behind(live, seq - 1)

    async def _after_tick(self, live: Live) -> None:
        """In the session's turn, when its answer has left: take down what is due. It is written while ticks go on."""
        keep, machine = self._keep, live.session.machine
        if keep is None or not keep.every_ticks or machine.phase is not Phase.IDLE:
            return
        epoch, tick = live.session.kept_at
        if machine.epoch == epoch and machine.tick - tick < keep.every_ticks:
            return
        try:
            waiting = await self._take_down(live, whole=False)
        except Exception as error:  # the tick is answered, and the session goes on
            _failed(live, public(error))
            return
        live.session.kept_at = machine.epoch, machine.tick
        idle = live.session.id not in self._waiting and not self._lock(live.session.id).locked()
        self._waiting[live.session.id] = waiting
        if idle:
            self._tasks.spawn(self._write(keep.store, live))

    # Writing ----------------------------------------------------------------------------------------------

    async def _take_down(self, live: Live, whole: bool) -> _Waiting:
        """The session as it stands. ``whole``: no tick will follow it."""
        s, m = live.session, live.session.machine
        data = await self._capture(live)
        replies = s.replies.after(0)
        data = replace(
            data,
            seq=min([*m.pending, *m.failed], default=m.accepted + 1) - 1,
            token=_hash(s.token),
            owner=s.owner,
            attachment=m.attachment,
            answered=m.answered,
            forgotten=m.forgotten,
            whole=whole,
        )
        return _Waiting(data, replies, m.epoch)

    async def _write(self, store: SessionStore, live: Live) -> None:
        """All that comes to wait, the newest first and only."""
        while (waiting := self._waiting.get(live.session.id)) is not None:
            async with self._lock(live.session.id):
                waiting = self._waiting.pop(live.session.id, None)
                if waiting is not None and live.session.machine.phase is not Phase.CLOSED:
                    try:
                        await self._save(store, live, waiting)
                    except OmniLoopError as error:
                        _failed(live, error)

    async def _save(self, store: SessionStore, live: Live, waiting: _Waiting) -> None:
        """Under the session's lock."""
        name, log = _PREFIX + live.session.id, live.session.log
        data, saved = await asyncio.to_thread(_store, store, name, waiting)
        _saves.inc(how="saved")
        if live.session.machine.epoch == waiting.epoch:
            log.snapshotted(Base(name, saved.digest, _version(data)))
        elif log.base is not None and log.base.name == name:
            log.lose()  # its beginning was replaced by what is no more in its past
            live.session.kept_at = (-1, 0)  # so that it begins anew after the next tick

    async def _last_words(self, left: Sequence[Live]) -> list[OmniLoopError]:
        """Write every session when the server stops. What could not be, to be raised when all have ended."""
        if self._unclaimed is not None:
            self._unclaimed.cancel()
        if self._keep is None or not self._keep.on_stop:
            return []
        store, errors = self._keep.store, list[OmniLoopError]()

        async def of(live: Live) -> None:
            try:
                async with live.turn:
                    if live.session.machine.usable:
                        waiting = await self._take_down(live, whole=not live.session.doubtful)
                        async with self._lock(live.session.id):
                            self._waiting.pop(live.session.id, None)
                            await self._save(store, live, waiting)
            except OmniLoopError as error:
                _failed(live, error)
                errors.append(error)

        await asyncio.gather(*(of(live) for live in left))
        return errors

    async def _forget_kept(self, session: str, why: OmniLoopError) -> None:
        """A session ended. Unless the server stops, nobody will come back for it."""
        if self._keep is not None and why.reason is not Reason.DRAINING:
            self._waiting.pop(session, None)
            async with self._lock(session):
                await asyncio.to_thread(self._keep.store.discard, _PREFIX + session)
        self._writing.pop(session, None)

    async def _check_way_back(self, live: Live, version: Version) -> None:
        async with self._lock(live.session.id):
            await super()._check_way_back(live, version)

    async def _rebuild(self, live: Live, epoch: int, upto: Version | None = None, flight: Flight | None = None) -> None:
        async with self._lock(live.session.id):
            await super()._rebuild(live, epoch, upto, flight)

    def _lock(self, session: str) -> asyncio.Lock:
        return self._writing.setdefault(session, asyncio.Lock())

    # Reading ----------------------------------------------------------------------------------------------

    def _fits(self, session: str, token: str, owner: str) -> bool:
        """Whether it is worth reading: not when a read has shown that it is another's."""
        known = self._known.get(session)
        return known is None or _same(known, token, owner)

    async def _recall(self, store: SessionStore, id: str, token: str, owner: str) -> None:
        name = _PREFIX + id
        try:
            data, saved = await asyncio.to_thread(store.load, name)
        except UnknownName:
            return
        except SnapshotError as error:
            _log.error("session %s was kept and cannot be read: %s", id, error.text)
            return  # whose it is cannot be told, so nobody is told that it was
        self._known[id] = data.token or _NOBODY, data.owner
        if not self._fits(id, token, owner):
            return
        try:
            live = self._continued(id, token, data, Base(name, saved.digest, _version(data)))
        except (SnapshotError, UnknownName, InvalidInput) as error:
            raise StateError(
                f"the session is lost: it was kept after seq {data.seq} at step {data.position.step}, and cannot go on "
                f"here: {error.text}",
                reason=Reason.SESSION_LOST,
            ) from error

        async def restore() -> None:
            await live.restore(data, data.seed)
            live.feed(data.feedback, data.epoch, data.tick - 1)
            if data.whole:  # it goes on now, so that what lies there is its past
                async with self._lock(id):
                    waiting = _Waiting(replace(data, whole=False), live.session.replies.after(0), data.epoch)
                    await self._save(store, live, waiting)

        await self._enter(live, restore, "restore", name)
        self._known.pop(id, None)
        _recalls.inc(how="whole" if data.whole else "doubtful")

    def _continued(self, id: str, token: str, data: SnapshotData, base: Base) -> Live:
        if data.pipeline not in self._pool.routes:
            raise UnknownName(f"pipeline {data.pipeline!r} is not served")
        route = self._pool.routes[data.pipeline]
        check_fits(data, route)
        replies = [decode_result(pb.TickReply.FromString(raw), route.graph.spec, _LIMITS) for raw in data.replies]
        machine = SessionMachine(
            epoch=data.epoch,
            tick=data.tick,
            position=data.position,
            accepted=data.seq,
            answered=data.answered,
            kept=[reply.seq for reply in replies],
            forgotten=data.forgotten,
            attachment=data.attachment + _ATTACHMENTS,
        )
        log = self._manager.log()
        log.clear(base)
        session = self._manager.open(
            data.pipeline,
            data.seed,
            data.prompt,
            data.keys,
            data.options,
            machine,
            log,
            data.owner,
            id=id,
            token=token,
        )
        session.chunk, session.doubtful, session.kept_at = data.chunk, not data.whole, (data.epoch, data.tick)
        for reply in replies:
            session.remember(reply)
        return Live(session, route)

    async def _forget_unclaimed(self, store: SessionStore, after_s: float) -> None:
        names = await asyncio.to_thread(store.names)
        kept = [name.removeprefix(_PREFIX) for name in names if reserved(name)]
        await self._clock.sleep(after_s)
        for session in kept:
            async with self._recalling:
                if session not in self._manager:
                    await asyncio.to_thread(store.discard, _PREFIX + session)
                    self._known.pop(session, None)


def _store(store: SessionStore, name: str, waiting: _Waiting) -> tuple[SnapshotData, Saved]:
    """Off the loop: what can be large is encoded here."""
    replies = tuple(encode_result(reply).SerializeToString(deterministic=True) for reply in waiting.replies)
    data = replace(waiting.data, replies=replies)
    return data, store.save(name, data)


def _behind(live: Live, received: int) -> StateError:
    machine = live.session.machine
    return StateError(
        f"the server was lost, and with it what this session did after seq {machine.accepted}, "
        f"at step {machine.position.step}; to go on from there attach with last_received_seq {machine.accepted}, not "
        f"{received}",
        reason=Reason.SESSION_LOST,
    )


def _hash(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()


def _same(known: tuple[str, str], token: str, owner: str) -> bool:
    fits = hmac.compare_digest(known[0], _hash(token))
    return fits & hmac.compare_digest(known[1].encode(), owner.encode("utf-8", "surrogatepass"))


def _version(data: SnapshotData) -> Version:
    return Version(data.epoch, data.tick - 1, data.position, data.chunk)


def _failed(live: Live, error: OmniLoopError) -> None:
    """The session goes on; it would not outlive the server as it stands."""
    _saves.inc(how="failed")
    _log.error("session %s could not be kept: %s", live.session.id, error.text)
