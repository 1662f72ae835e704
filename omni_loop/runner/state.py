"""The typed session state of one runner: the one authority, in transactions of (session, stage, tick).

``begin`` opens a transaction and hands the stage its view; everything written there is staged. ``commit`` makes what
several stages staged permanent together, ``discard`` leaves no trace of it. Memory is sized at start from a budget of
bytes: pools are allocated once, and what a session's tensors and rings can take is reserved when it opens.

What may be missing is looked for in this order: shared prefixes nobody uses, the oldest versions kept to go back to,
idle sessions whose state may go (:mod:`.eviction`). Then it is refused, with the bytes missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from ..errors import Exhausted, Reason, StateError, UnknownName, UnknownSession, nearest
from ..stage import CounterSpec, KVSpec, RingSpec, StateSpec, TensorSpec
from .cells import Cell, CounterCell, RingCell, Scope, TensorCell
from .eviction import Policy, Session, victims
from .kv_cell import KVCell
from .kv_pool import KVPool, PoolCorrupt, PoolStats
from .ledger import Ledger
from .sizing import StageSpecs, pool_sizes, reserved_bytes
from .stage_state import Chronicle, Key, StageState
from .transfer import StageImage, export_stage, place, read_stage

_PATIENCE_MS = (10.0, 1000.0)  # a retry helps after as long as the ticks under way may take, within these bounds


@dataclass(frozen=True, slots=True)
class Budget:
    """Bytes for KV blocks and typed state of all sessions together. ``blocks``: of each pool; None: enough for
    ``max_sessions``, or for as many as fit. ``rewind_ticks``: versions kept per session and stage besides the
    committed one. ``evict``: whose state may make room for others'."""

    max_sessions: int = 64
    nbytes: int = 1 << 30
    blocks: int | None = None
    rewind_ticks: int = 8
    evict: Policy = "recomputable"


@dataclass(frozen=True, slots=True)
class StateStats:
    """``reserved_bytes`` are what tensors and rings of open sessions can take, ``history_bytes`` what versions kept
    hold besides; ``used_bytes`` of ``budget_bytes`` are those and the pools, in all runners on the same ledger."""

    sessions: int
    evicted: int  # of ``sessions``: have no state any more
    evictions: int  # ever
    versions: int
    reserved_bytes: int
    history_bytes: int
    used_bytes: int
    budget_bytes: int
    pools: Mapping[str, PoolStats]


class StateManager:
    """All sessions' state of a runner. One thread owns it. Every method that names a session raises UnknownSession
    when there is none, and all but ``close``, ``reset``, ``import_`` and ``touch`` StateError(EVICTED) when its state
    made room for others'."""

    def __init__(
        self,
        specs: StageSpecs,
        budget: Budget = Budget(),
        device: torch.device | str = "cpu",
        ledger: Ledger | None = None,
    ) -> None:
        """``ledger``: of several runners together; None: this one's own, of ``budget.nbytes``."""
        self._specs, self._device, self._budget = specs, device, budget
        self._account = (ledger or Ledger({str(device): budget.nbytes})).account(device)
        self._reserved = {stage: reserved_bytes(stage, named) for stage, named in specs.items()}
        sizes = pool_sizes(specs, budget.max_sessions, budget.nbytes, budget.blocks)
        self._pools: dict[tuple[str, str], KVPool] = {}
        for (stage, name), (spec, blocks) in sizes.items():
            room = partial(self._make_blocks, stage, name)
            pool = KVPool(spec, blocks, name=f"{stage}.{name}", device=device, make_room=room)
            self._account.charge(pool.stats().total_bytes, f"the pool {pool.name!r}")
            self._pools[stage, name] = pool
        self._chronicles = {stage: Chronicle(budget.rewind_ticks) for stage in specs}
        self._sessions: dict[str, Session] = {}
        self._used = 0  # bytes reserved
        self._uses = 0  # of any session, ever
        self._evicted = self._evictions = 0
        self._tick_ms = 0.0  # of a committed tick, lately

    # Opening and closing

    def open(self, session: str, stages: Iterable[str] = ()) -> None:
        """Allocate the session's state in ``stages`` (none named: in all), or nothing at all.

        Raises:
            StateError: it is open already.
            UnknownName: no such stage.
            Exhausted: the budget has no room; ``missing_bytes`` says how much.
        """
        self._check_new(session)
        names = tuple(dict.fromkeys(stages)) or tuple(self._specs)
        for stage in names:
            if stage not in self._specs:
                raise UnknownName(f"no stage is called {stage!r} here.{nearest(stage, self._specs)}")
        self._sessions[session] = self._allocate(names, (0, -1))

    def close(self, session: str) -> None:
        """Free everything of the session."""
        entry = self._session(session)
        self._free(entry)
        self._evicted -= entry.evicted
        del self._sessions[session]

    def reset(self, session: str, epoch: int = 0) -> None:
        """All state of the session as freshly opened, in ``epoch``; what is staged is discarded and no version kept.
        An evicted session lives again.

        Raises:
            Exhausted: it was evicted, and there is no room; it stays so.
        """
        entry = self._session(session)
        if entry.evicted:
            self._revive(session, self._allocate(entry.names, (epoch, -1)))
        else:
            for state in entry.stages.values():
                state.reset((epoch, -1))
            entry.cost_ms, entry.recomputable = 0.0, False
        self.touch(session)

    def free(self) -> None:
        """Close every session and give the pools' bytes back to the ledger; the manager must not be used again."""
        for session in tuple(self._sessions):
            self.close(session)
        for pool in self._pools.values():
            self._account.credit(pool.stats().total_bytes)
        self._pools.clear()

    # Transactions

    def begin(self, session: str, stage: str, tick: int) -> StageState:
        """The stage's view, open for writing until :meth:`seal`. A stage that runs again in the same tick goes on
        with what it staged.

        Raises:
            StateError: another tick of this stage is staged and not decided.
        """
        entry = self._live(session)
        state = self._state(entry, stage)
        if state.tick != tick:
            if state.tick is not None:
                raise StateError(
                    f"stage {stage!r} cannot run tick {tick}: tick {state.tick} is staged and not decided yet",
                    reason=Reason.BUSY,
                )
            state.tick = tick
        state.scope.open = True
        self._uses += 1
        entry.used = self._uses
        return state

    def seal(self, session: str, stage: str) -> None:
        """The stage has run: its view can no longer be written."""
        self._find(session, stage).scope.open = False

    def commit(
        self,
        session: str,
        tick: int,
        stages: Iterable[str],
        epoch: int = 0,
        recomputable: bool = False,
        cost_ms: float = 0.0,
    ) -> None:
        """Make permanent, together, what ``stages`` staged in ``tick``: version ``(epoch, tick)`` of each.

        ``recomputable``: the session's log is complete, so that its state may go. ``cost_ms``: what the tick cost.

        Raises:
            StateError: one of them has nothing undecided of that tick. Then none is committed.
        """
        entry = self._live(session)
        states = [self._state(entry, stage) for stage in stages]
        for state in states:
            if state.tick != tick:
                what = f"tick {state.tick} is" if state.tick is not None else "nothing is"
                raise StateError(f"cannot commit tick {tick} of stage {state.stage!r}: {what} staged there")
        key = (epoch, tick)
        for state in states:
            state.commit(key)
        entry.recomputable = recomputable
        if cost_ms:
            entry.cost_ms += cost_ms
            self._tick_ms += 0.1 * (cost_ms - self._tick_ms)
        if self._account.over:
            self._forget_while(lambda: self._account.over > 0)

    def discard(self, session: str, tick: int, stages: Iterable[str]) -> None:
        """Leave no trace of ``tick`` in ``stages``. Where that tick staged nothing, nothing happens."""
        entry = self._live(session)
        for state in [self._state(entry, stage) for stage in stages]:
            if state.tick == tick:
                state.discard()

    def abandon(self, session: str) -> None:
        """Discard whatever is undecided in any stage: the session has moved on. Of an evicted one, nothing is."""
        for state in self._session(session).stages.values():
            if state.tick is not None:
                state.discard()

    # Forks, versions, transfer

    def fork(self, session: str, child: str) -> None:
        """Open ``child`` with the committed state of ``session``, in its stages. No block and no tensor is copied,
        now or later; versions before it stay the parent's.

        Raises:
            StateError: a tick of ``session`` is undecided, or ``child`` is open already.
            Exhausted: the budget has no room for another session.
        """
        entry = self._live(session)
        self._check_new(child)
        if entry.undecided:
            raise StateError("a session can be forked only between ticks", reason=Reason.BUSY)
        made = self._allocate(entry.names, (0, -1), spared=session)
        for stage, state in entry.stages.items():
            state.copy_to(made.stages[stage])
        made.recomputable, made.cost_ms = entry.recomputable, entry.cost_ms
        self._sessions[child] = made

    def versions(self, session: str) -> tuple[Key, ...]:
        """Keys ``(epoch, tick)`` that :meth:`rewind` can go back to, in order; the last one is the present."""
        states = self._live(session).stages.values()
        keys = sorted({key for state in states if state.cells for key in state.known()})
        return tuple(key for key in keys if all(state.reachable(key) for state in states))

    def rewind(self, session: str, to_epoch: int, to_tick: int) -> None:
        """Bring every stage back to its last version not after ``(to_epoch, to_tick)``; later ones are forgotten, what
        is staged is discarded.

        Raises:
            StateError: a stage does not know that version any more. Then nothing changes.
        """
        entry = self._live(session)
        key = (to_epoch, to_tick)
        if not all(state.reachable(key) for state in entry.stages.values()):
            known = ", ".join(f"{tick} of epoch {epoch}" for epoch, tick in self.versions(session))
            raise StateError(
                f"the state after tick {to_tick} of epoch {to_epoch} is gone; there are those after tick {known}",
                reason=Reason.BAD_REQUEST,
            )
        for state in entry.stages.values():
            state.discard()
            state.rewind(key)

    def export(self, session: str) -> dict[str, StageImage]:
        """Committed state by stage as ``(arrays, facts)``; see :mod:`.transfer`. The arrays are copies.

        Raises:
            StateError: a tick is undecided.
        """
        entry = self._live(session)
        if entry.undecided:
            raise StateError("a session can be exported only between ticks", reason=Reason.BUSY)
        return {stage: export_stage(state) for stage, state in entry.stages.items()}

    def import_(self, session: str, stages: Mapping[str, StageImage], epoch: int = 0) -> None:
        """Open ``session`` (or revive it, when it was evicted) with exported state: all of it or nothing.

        Raises:
            StateError: it is open already.
            UnknownName: no such stage.
            SnapshotError: what is given does not fit the specs.
            Exhausted: no room.
        """
        known = self._sessions.get(session)
        if known is None or not known.evicted:
            self._check_new(session)
        for stage in stages:
            if stage not in self._specs:
                raise UnknownName(f"no stage is called {stage!r} here.{nearest(stage, self._specs)}")
        values = {stage: read_stage(stage, self._specs[stage], image) for stage, image in stages.items()}
        entry = self._allocate(tuple(stages), (epoch, -1))
        try:
            for stage, state in entry.stages.items():
                place(state, values[stage])
        except BaseException:
            self._free(entry)
            raise
        if known is not None:
            self._revive(session, entry)
        self._sessions[session] = entry

    # Room

    def touch(self, session: str) -> None:
        """The session is in use: the last to be evicted for idleness, and not expired."""
        entry = self._session(session)
        self._uses += 1
        entry.used, entry.expired = self._uses, False

    def expire(self, session: str) -> None:
        """Nobody waits for the session any more: the first to be evicted, unless policy is "none"."""
        self._session(session).expired = True

    def pin(self, session: str) -> None:
        """Never evict it until it is unpinned as often."""
        self._live(session).pins += 1

    def unpin(self, session: str) -> None:
        entry = self._session(session)
        if entry.pins == 0:
            raise StateError("the session is not pinned", reason=Reason.BAD_REQUEST)
        entry.pins -= 1

    def evict(self, session: str) -> int:
        """Free everything of the session but the memory that there was one; the bytes freed.

        Raises:
            StateError: it is pinned or has a tick under way.
        """
        entry = self._live(session)
        if entry.pins or entry.undecided:
            why = "is pinned" if entry.pins else "has a tick under way"
            raise StateError(f"the session {why} and cannot be evicted", reason=Reason.BUSY)
        before = self._occupied()
        self._free(entry)
        entry.stages, entry.reserved, entry.evicted = {}, 0, True
        self._evicted += 1
        self._evictions += 1
        return before - self._occupied()

    def make_room(self, nbytes: int, spared: Iterable[str] = ()) -> int:
        """Give up versions, then sessions but ``spared``, until ``nbytes`` more fit the budget; bytes still missing."""
        account = self._account
        self._forget_while(lambda: account.missing(nbytes) > 0)
        self._evict_while(lambda: account.missing(nbytes) > 0, lambda entry: entry.reserved > 0, spared)
        return account.missing(nbytes)

    # What there is

    def sessions(self) -> tuple[str, ...]:
        return tuple(self._sessions)

    def evicted(self, session: str) -> bool:
        """Whether the session's state made room for others'."""
        return self._session(session).evicted

    def owns_memory(self, address: int) -> bool:
        """Whether a pool's storage lies at ``address``: memory that is reused once a tick is decided."""
        for pool in self._pools.values():
            begin = pool.storage.data_ptr()
            if begin <= address < begin + pool.storage.nbytes:
                return True
        return False

    def stats(self) -> StateStats:
        """O(1) in sessions."""
        account = self._account
        return StateStats(
            sessions=len(self._sessions),
            evicted=self._evicted,
            evictions=self._evictions,
            versions=sum(map(len, self._chronicles.values())),
            reserved_bytes=self._used,
            history_bytes=account.held,
            used_bytes=account.used,
            budget_bytes=account.limit,
            pools={pool.name: pool.stats() for pool in self._pools.values()},
        )

    def check(self) -> None:
        """Verify the books. O(sessions + blocks).

        Raises:
            PoolCorrupt: they do not balance.
        """
        for pool in self._pools.values():
            pool.check()
        reserved = sum(entry.reserved for entry in self._sessions.values())
        if reserved != self._used:
            raise PoolCorrupt(f"{self._used} bytes of typed state on the books, {reserved} reserved")
        versions = 0
        for entry in self._sessions.values():
            for state in entry.stages.values():
                state.check()
                versions += len(state.versions)
        if versions != self.stats().versions:
            raise PoolCorrupt(f"{self.stats().versions} versions on the books, {versions} kept")

    def _check_new(self, session: str) -> None:
        if session in self._sessions:
            raise StateError("the session is open already", reason=Reason.BUSY)

    def _allocate(self, names: tuple[str, ...], key: Key, spared: str = "") -> Session:
        """State as freshly opened, in a session that has no name yet; or nothing."""
        need = sum(self._reserved[stage] for stage in names)
        if self._account.missing(need):
            self.make_room(need, (spared,))
        try:
            self._account.charge(need, "a session")
        except Exhausted as e:
            e.retry_after_ms = self._patience()
            raise
        entry = Session(names, {}, need)
        self._used += need
        try:
            for stage in names:
                entry.stages[stage] = self._make(stage, key)
        except BaseException:
            self._free(entry)
            raise
        self._uses += 1
        entry.used = self._uses
        return entry

    def _make(self, stage: str, key: Key) -> StageState:
        scope = Scope()
        cells: dict[str, Cell] = {}
        try:
            for name, spec in self._specs[stage].items():
                cells[name] = self._cell(stage, name, spec, scope)
        except BaseException:
            for cell in cells.values():
                cell.free()
            raise
        return StageState(stage, cells, scope, self._chronicles[stage], key)

    def _cell(self, stage: str, name: str, spec: StateSpec, scope: Scope) -> Cell:
        match spec:
            case KVSpec():
                return KVCell(name, self._pools[stage, name], scope)
            case TensorSpec():
                return TensorCell(name, spec, scope, self._account)
            case RingSpec():
                return RingCell(name, spec, scope, self._account)
            case CounterSpec():
                return CounterCell(name, spec, scope)

    def _free(self, entry: Session) -> None:
        for state in entry.stages.values():
            state.free()
        self._account.credit(entry.reserved)
        self._used -= entry.reserved

    def _revive(self, session: str, entry: Session) -> None:
        entry.pins = self._sessions[session].pins
        self._sessions[session] = entry
        self._evicted -= 1

    def _occupied(self) -> int:
        """Bytes that sessions and their versions keep from others."""
        pools = self._pools.values()
        return self._account.held + self._used + sum(pool.stats().owned_bytes for pool in pools)

    def _make_blocks(self, stage: str, name: str, n: int) -> float:
        """Have ``n`` more blocks of a pool free if that can be; after how many ms a retry may find them otherwise."""
        pool = self._pools[stage, name]
        goal = pool.stats().free + n

        def short() -> bool:
            pool.give_up_prefixes(goal - pool.stats().free)
            return pool.stats().free < goal

        chronicle = self._chronicles[stage]
        while len(chronicle) and short():
            chronicle.drop_oldest()
        self._evict_while(short, lambda entry: stage in entry.stages and entry.stages[stage].kv(name).total > 0)
        return self._patience()

    def _forget_while(self, short: Callable[[], bool]) -> None:
        """Give up versions of any stage, the oldest first."""
        while short():
            known = [c for c in self._chronicles.values() if len(c)]
            if not known:
                return
            min(known, key=lambda c: c.oldest or 0).drop_oldest()

    def _evict_while(
        self, short: Callable[[], bool], helps: Callable[[Session], bool], spared: Iterable[str] = ()
    ) -> None:
        if not short():
            return
        for session in victims(self._sessions, self._budget.evict, helps, spared):
            self.evict(session)
            if not short():
                return

    def _patience(self) -> float:
        """Ms after which what the ticks under way hold may be free."""
        busy = sum(entry.undecided for entry in self._sessions.values())
        return min(max(busy * self._tick_ms, _PATIENCE_MS[0]), _PATIENCE_MS[1]) if busy else _PATIENCE_MS[1]

    def _session(self, session: str) -> Session:
        try:
            return self._sessions[session]
        except KeyError:
            raise UnknownSession("this runner has no such session") from None

    def _live(self, session: str) -> Session:
        entry = self._sessions.get(session)
        if entry is None or entry.evicted:
            entry = self._session(session)
            raise StateError("the session's state made room for others'", reason=Reason.EVICTED)
        return entry

    def _state(self, entry: Session, stage: str) -> StageState:
        try:
            return entry.stages[stage]
        except KeyError:
            raise UnknownName(f"the session has no stage {stage!r} here.{nearest(stage, entry.stages)}") from None

    def _find(self, session: str, stage: str) -> StageState:
        return self._state(self._live(session), stage)
