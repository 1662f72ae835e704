"""The typed session state of one runner: the one authority, in transactions of (session, stage, tick).

``begin`` opens a transaction and hands the stage its view; everything written there is staged. ``commit`` makes what
several stages staged permanent together, ``discard`` leaves no trace of it. Memory is sized at start from a budget of
bytes: pools are allocated once, and what a session's tensors and rings can take is reserved when it opens.

What may be missing is looked for in this order: shared prefixes nobody uses, the oldest versions kept to go back to,
idle sessions whose state may go (:mod:`.eviction`). Then it is refused, with the bytes missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from numpy.typing import NDArray

from ..errors import Exhausted, Reason, StateError
from .books import PoolStats
from .eviction import Policy, Room
from .kv_pool import KVPool
from .ledger import Ledger
from .sessions import Session, Sessions
from .sizing import StageSpecs, pool_sizes
from .stage_state import Chronicle, Key, StageState
from .transfer import StageImage, export_stage, place, read_stage


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
        self._specs = specs
        ledger = ledger or Ledger({str(device): budget.nbytes})
        self._device = torch.device(device)
        self._account = ledger.account(device)
        self._pools: dict[tuple[str, str], KVPool] = {}
        self._chronicles = {stage: Chronicle(budget.rewind_ticks) for stage in specs}
        self._sessions = Sessions(specs, self._pools, self._chronicles, self._account)
        self._room = Room(self._sessions, self._pools, self._chronicles, self._account, budget.evict)
        with ledger.sizing:
            left = min(budget.nbytes, self._account.left)
            sizes = pool_sizes(specs, budget.max_sessions, left, budget.blocks)
            for (stage, name), (spec, blocks) in sizes.items():
                room = partial(self._room.make_blocks, stage, name)
                pool = KVPool(spec, blocks, name=f"{stage}.{name}", device=device, make_room=room)
                self._account.charge(pool.stats().total_bytes, f"the pool {pool.name!r}")
                self._pools[stage, name] = pool

    # Opening and closing

    def open(self, session: str, stages: Iterable[str] = ()) -> None:
        """Allocate the session's state in ``stages`` (none named: in all), or nothing at all.

        Raises:
            StateError: it is open already.
            UnknownName: no such stage.
            Exhausted: the budget has no room; ``missing_bytes`` says how much.
        """
        self._sessions.check_new(session)
        names = tuple(dict.fromkeys(stages)) or tuple(self._specs)
        self._sessions.check_stages(names)
        self._sessions.add(session, self._allocate(names, (0, -1)))

    def close(self, session: str) -> None:
        """Free everything of the session."""
        self._sessions.remove(session)

    def reset(self, session: str, epoch: int = 0) -> None:
        """All state of the session as freshly opened, in ``epoch``; what is staged is discarded and no version kept.
        An evicted session lives again.

        Raises:
            Exhausted: it was evicted, and there is no room; it stays so.
        """
        entry = self._sessions[session]
        if entry.evicted:
            self._sessions.add(session, self._allocate(entry.names, (epoch, -1)))
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
        entry = self._sessions.live(session)
        state = entry.state(stage)
        if state.tick != tick:
            if state.tick is not None:
                raise StateError(
                    f"stage {stage!r} cannot run tick {tick}: tick {state.tick} is staged and not decided yet",
                    reason=Reason.BUSY,
                )
            state.tick = tick
        state.scope.open = True
        self._sessions.touch(entry)
        return state

    def seal(self, session: str, stage: str) -> None:
        """The stage has run: its view can no longer be written."""
        self._sessions.live(session).state(stage).scope.open = False

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
        entry = self._sessions.live(session)
        states = [entry.state(stage) for stage in stages]
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
            self._room.note_tick(cost_ms)
        self._room.trim()

    def discard(self, session: str, tick: int, stages: Iterable[str]) -> None:
        """Leave no trace of ``tick`` in ``stages``. Where that tick staged nothing, nothing happens."""
        entry = self._sessions.live(session)
        for state in [entry.state(stage) for stage in stages]:
            if state.tick == tick:
                state.discard()

    def abandon(self, session: str) -> None:
        """Discard whatever is undecided in any stage: the session has moved on. Of an evicted one, nothing is."""
        for state in self._sessions[session].stages.values():
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
        entry = self._sessions.live(session)
        self._sessions.check_new(child)
        if entry.undecided:
            raise StateError("a session can be forked only between ticks", reason=Reason.BUSY)
        made = self._allocate(entry.names, (0, -1), spared=session)
        for stage, state in entry.stages.items():
            state.copy_to(made.stages[stage])
        made.recomputable, made.cost_ms = entry.recomputable, entry.cost_ms
        self._sessions.add(child, made)

    def versions(self, session: str) -> tuple[Key, ...]:
        """Keys ``(epoch, tick)`` that :meth:`rewind` can go back to, in order; the last one is the present."""
        states = self._sessions.live(session).stages.values()
        keys = sorted({key for state in states if state.cells for key in state.known()})
        return tuple(key for key in keys if all(state.reachable(key) for state in states))

    def rewind(self, session: str, to_epoch: int, to_tick: int) -> None:
        """Bring every stage back to its last version not after ``(to_epoch, to_tick)``; later ones are forgotten, what
        is staged is discarded.

        Raises:
            StateError: a stage does not know that version any more. Then nothing changes.
        """
        entry = self._sessions.live(session)
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
        entry = self._sessions.live(session)
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
        if session not in self._sessions or not self._sessions[session].evicted:
            self._sessions.check_new(session)
        self._sessions.check_stages(stages)
        values = {stage: read_stage(stage, self._specs[stage], image) for stage, image in stages.items()}
        entry = self._allocate(tuple(stages), (epoch, -1))
        try:
            for stage, state in entry.stages.items():
                place(state, values[stage])
        except BaseException:
            self._sessions.free(entry)
            raise
        self._sessions.add(session, entry)

    # Room

    def touch(self, session: str) -> None:
        """The session is in use: the last to be evicted for idleness, and not expired."""
        entry = self._sessions[session]
        entry.expired = False
        self._sessions.touch(entry)

    def expire(self, session: str) -> None:
        """Nobody waits for the session any more: the first to be evicted, unless policy is "none"."""
        self._sessions[session].expired = True

    def pin(self, session: str) -> None:
        """Never evict it until it is unpinned as often."""
        self._sessions.live(session).pins += 1

    def unpin(self, session: str) -> None:
        entry = self._sessions[session]
        if entry.pins == 0:
            raise StateError("the session is not pinned", reason=Reason.BAD_REQUEST)
        entry.pins -= 1

    def evict(self, session: str) -> int:
        """Free everything of the session but the memory that there was one; the bytes freed.

        Raises:
            StateError: it is pinned or has a tick under way.
        """
        entry = self._sessions.live(session)
        if entry.pins or entry.undecided:
            why = "is pinned" if entry.pins else "has a tick under way"
            raise StateError(f"the session {why} and cannot be evicted", reason=Reason.BUSY)
        return self._room.evict(entry)

    def make_room(self, nbytes: int, spared: Iterable[str] = ()) -> int:
        """Give up versions, then sessions but ``spared``, until ``nbytes`` more fit the budget; bytes still missing."""
        return self._room.make_bytes(nbytes, spared)

    # What there is

    def sessions(self) -> tuple[str, ...]:
        return tuple(self._sessions)

    def evicted(self, session: str) -> bool:
        """Whether the session's state made room for others'."""
        return self._sessions[session].evicted

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
            evicted=self._sessions.evicted,
            evictions=self._sessions.evictions,
            versions=sum(map(len, self._chronicles.values())),
            reserved_bytes=self._sessions.reserved,
            history_bytes=account.held,
            used_bytes=account.used,
            budget_bytes=account.limit,
            pools={pool.name: pool.stats() for pool in self._pools.values()},
        )

    def used(self) -> dict[str, int]:
        """Bytes by device, of all runners that share its ledger."""
        return {str(self._device): self._account.used}

    def through_device(self, array: NDArray[Any]) -> NDArray[Any]:
        """A copy of ``array``, made in memory taken on the device for it; torch's error when there is none."""
        there = torch.tensor(array, device=self._device)
        back: NDArray[Any] = there.cpu().numpy()
        return back

    def check(self) -> None:
        """Verify the books. O(sessions + blocks).

        Raises:
            PoolCorrupt: they do not balance.
        """
        for pool in self._pools.values():
            pool.check()
        self._sessions.check()

    def _allocate(self, stages: tuple[str, ...], key: Key, spared: str = "") -> Session:
        """State as freshly opened, in a session that has no name yet; or nothing."""
        need = self._sessions.need(stages)
        if self._account.missing(need):
            self._room.make_bytes(need, (spared,))
        try:
            return self._sessions.allocate(stages, key)
        except Exhausted as e:
            e.retry_after_ms = self._room.patience_ms()
            raise
