"""A runner's sessions: who there is, whose state lives, and what each holds of the pools and of the budget."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from ..errors import Reason, StateError, UnknownName, UnknownSession, nearest
from ..stage import CounterSpec, KVSpec, RingSpec, StateSpec, TensorSpec
from .books import PoolCorrupt
from .cells import Cell, CounterCell, RingCell, Scope, TensorCell
from .kv_cell import KVCell
from .kv_pool import KVPool
from .ledger import Account
from .sizing import StageSpecs, reserved_bytes
from .stage_state import Chronicle, Key, StageState


@dataclass(slots=True, eq=False)
class Session:
    """What is known of a session. An evicted one has no ``stages`` any more, only their ``names``."""

    names: tuple[str, ...]
    stages: dict[str, StageState]
    reserved: int  # bytes charged for tensors and rings
    used: int = 0  # when it was last used, as a count of uses of all sessions
    pins: int = 0
    recomputable: bool = False
    expired: bool = False
    evicted: bool = False
    cost_ms: float = 0.0  # of all committed ticks: what it takes to rebuild

    @property
    def undecided(self) -> bool:
        """Whether a tick is staged in any stage."""
        return any(state.tick is not None for state in self.stages.values())

    @property
    def nbytes(self) -> int:
        """Bytes it holds, shared blocks counted in full."""
        return self.reserved + sum(
            len(cell.table.references) * cell.pool.block_bytes
            for state in self.stages.values()
            for cell in state.cells.values()
            if isinstance(cell, KVCell)
        )

    def state(self, stage: str) -> StageState:
        try:
            return self.stages[stage]
        except KeyError:
            raise UnknownName(f"the session has no stage {stage!r} here.{nearest(stage, self.stages)}") from None


class Sessions:
    """By name. ``reserved`` are the bytes charged for all of them."""

    def __init__(
        self,
        specs: StageSpecs,
        pools: Mapping[tuple[str, str], KVPool],
        chronicles: Mapping[str, Chronicle],
        account: Account,
    ) -> None:
        self._specs, self._pools, self._chronicles, self._account = specs, pools, chronicles, account
        self._each = {stage: reserved_bytes(stage, named) for stage, named in specs.items()}
        self._entries: dict[str, Session] = {}
        self._uses = 0  # of any session, ever
        self.reserved = 0
        self.evicted = 0  # have no state any more
        self.evictions = 0  # ever

    def __getitem__(self, name: str) -> Session:
        """Raises UnknownSession."""
        try:
            return self._entries[name]
        except KeyError:
            raise UnknownSession("this runner has no such session") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def items(self) -> Iterable[tuple[str, Session]]:
        return self._entries.items()

    def values(self) -> Iterable[Session]:
        return self._entries.values()

    def live(self, name: str) -> Session:
        """Raises UnknownSession, and StateError(EVICTED) when its state made room for others'."""
        entry = self._entries.get(name)
        if entry is None or entry.evicted:
            entry = self[name]
            raise StateError("the session's state made room for others'", reason=Reason.EVICTED)
        return entry

    def check_new(self, name: str) -> None:
        if name in self._entries:
            raise StateError("the session is open already", reason=Reason.BUSY)

    def check_stages(self, names: Iterable[str]) -> None:
        for stage in names:
            if stage not in self._specs:
                raise UnknownName(f"no stage is called {stage!r} here.{nearest(stage, self._specs)}")

    def touch(self, entry: Session) -> None:
        self._uses += 1
        entry.used = self._uses

    def need(self, stages: tuple[str, ...]) -> int:
        """Bytes to reserve for a session in ``stages``."""
        return sum(self._each[stage] for stage in stages)

    def allocate(self, stages: tuple[str, ...], key: Key) -> Session:
        """State as freshly opened, in a session that has no name yet; or nothing.

        Raises:
            Exhausted: the account has no room.
        """
        need = self.need(stages)
        self._account.charge(need, "a session")
        entry = Session(stages, {}, need)
        self.reserved += need
        try:
            for stage in stages:
                entry.stages[stage] = self._make(stage, key)
        except BaseException:
            self.free(entry)
            raise
        self.touch(entry)
        return entry

    def add(self, name: str, entry: Session) -> None:
        """Name it; it takes the place of an evicted one."""
        if old := self._entries.get(name):
            entry.pins = old.pins
            self.evicted -= 1
        self._entries[name] = entry

    def remove(self, name: str) -> None:
        entry = self[name]
        self.free(entry)
        self.evicted -= entry.evicted
        del self._entries[name]

    def evict(self, entry: Session) -> None:
        """Free all of it but its name."""
        self.free(entry)
        entry.stages, entry.reserved, entry.evicted = {}, 0, True
        self.evicted += 1
        self.evictions += 1

    def free(self, entry: Session) -> None:
        for state in entry.stages.values():
            state.free()
        self._account.credit(entry.reserved)
        self.reserved -= entry.reserved

    def check(self) -> None:
        """Verify the books of typed state and versions. O(sessions).

        Raises:
            PoolCorrupt: they do not balance.
        """
        reserved = sum(entry.reserved for entry in self._entries.values())
        if reserved != self.reserved:
            raise PoolCorrupt(f"{self.reserved} bytes of typed state on the books, {reserved} reserved")
        kept = 0
        for entry in self._entries.values():
            for state in entry.stages.values():
                state.check()
                kept += len(state.versions)
        booked = sum(map(len, self._chronicles.values()))
        if kept != booked:
            raise PoolCorrupt(f"{booked} versions on the books, {kept} kept")
        for (stage, name), pool in self._pools.items():
            known = [entry.stages[stage].kv(name).tables for entry in self.values() if stage in entry.stages]
            if sum(known) != pool.stats().tables:
                raise PoolCorrupt(f"pool {pool.name!r} has {pool.stats().tables} tables, sessions know {sum(known)}")

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
