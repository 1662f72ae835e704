"""The typed session state of one runner: the one authority, in transactions of (session, stage, tick).

``begin`` opens a transaction and hands the stage its view; everything written there is staged. ``commit`` makes what
several stages staged permanent together, ``discard`` leaves no trace of it. Memory is sized at start from a budget of
bytes: pools are allocated once, the fixed state of a session when it opens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch

from ..errors import ConfigError, Exhausted, InvalidInput, Reason, StateError, UnknownName, UnknownSession, nearest
from ..stage import CounterSpec, KVSpec, RingSpec, StateSpec, TensorSpec
from .cells import Cell, CounterCell, KVCell, RingCell, Scope, TensorCell, torch_dtype
from .kv_pool import KVPool, PoolCorrupt, PoolStats, block_bytes, blocks_per_session

T = TypeVar("T")
StageSpecs = Mapping[str, Mapping[str, StateSpec]]  # stage -> name -> spec


@dataclass(frozen=True, slots=True)
class Budget:
    """Bytes for KV blocks and typed state of all sessions together. ``blocks``: of each pool; None: enough for
    ``max_sessions``, or for as many as fit."""

    max_sessions: int = 64
    nbytes: int = 1 << 30
    blocks: int | None = None


@dataclass(frozen=True, slots=True)
class StateStats:
    """``fixed_bytes`` are tensors and rings, counted in full from the session's opening."""

    sessions: int
    fixed_bytes: int
    budget_bytes: int
    pools: Mapping[str, PoolStats]


class StageState:
    """One session's state in one stage: the :class:`~omni_loop.stage.StateView` its stage is given."""

    def __init__(self, stage: str, cells: Mapping[str, Cell], scope: Scope) -> None:
        self._stage, self._cells, self.scope = stage, cells, scope
        self.tick: int | None = None  # of the transaction that is not decided yet

    def kv(self, name: str) -> KVCell:
        return self._cell(name, KVCell, "paged KV")

    def tensor(self, name: str) -> TensorCell:
        return self._cell(name, TensorCell, "tensor")

    def ring(self, name: str) -> RingCell:
        return self._cell(name, RingCell, "ring")

    def counter(self, name: str) -> CounterCell:
        return self._cell(name, CounterCell, "counter")

    def settle(self, commit: bool) -> None:
        self.scope.open = False
        self.tick = None
        for cell in self._cells.values():
            cell.settle(commit)

    def reset(self) -> None:
        self.scope.open = False
        self.tick = None
        for cell in self._cells.values():
            cell.reset()

    def free(self) -> None:
        self.scope.open = False
        for cell in self._cells.values():
            cell.free()

    def _cell(self, name: str, kind: type[T], called: str) -> T:
        cell = self._cells.get(name)
        if not isinstance(cell, kind):
            known = [n for n, c in self._cells.items() if isinstance(c, kind)]
            raise UnknownName(f"stage {self._stage!r} declared no {called} {name!r}.{nearest(name, known)}")
        return cell


class StateManager:
    """All sessions' state of a runner. One thread owns it."""

    def __init__(self, specs: StageSpecs, budget: Budget = Budget(), device: torch.device | str = "cpu") -> None:
        self._specs, self._device, self._budget = specs, device, budget
        self._fixed = {
            stage: sum(_fixed_bytes(f"{stage}.{name}", spec) for name, spec in named.items())
            for stage, named in specs.items()
        }
        self._pools = self._make_pools()
        self._pool_bytes = sum(pool.stats().total_bytes for pool in self._pools.values())
        self._used = 0
        self._sessions: dict[str, dict[str, StageState]] = {}

    def open(self, session: str, stages: Iterable[str] = ()) -> None:
        """Allocate the session's state in ``stages`` (none named: in all), or nothing at all.

        Raises:
            StateError: it is open already.
            UnknownName: no such stage.
            Exhausted: the budget has no room; the text names the bytes missing.
        """
        if session in self._sessions:
            raise StateError("the session is open already", reason=Reason.BUSY)
        names = tuple(dict.fromkeys(stages)) or tuple(self._specs)
        for stage in names:
            if stage not in self._specs:
                raise UnknownName(f"no stage is called {stage!r} here.{nearest(stage, self._specs)}")
        need = sum(self._fixed[stage] for stage in names)
        if (missing := self._pool_bytes + self._used + need - self._budget.nbytes) > 0:
            raise Exhausted(
                f"a session needs {need} bytes of state, {missing} more than left", reason=Reason.OUT_OF_BYTES
            )
        made: dict[str, StageState] = {}
        try:
            for stage in names:
                self._make(stage, made)
        except BaseException:
            for state in made.values():
                state.free()
            raise
        self._sessions[session] = made
        self._used += need

    def begin(self, session: str, stage: str, tick: int) -> StageState:
        """The stage's view, open for writing until :meth:`seal`. A stage that runs again in the same tick goes on
        with what it staged.

        Raises:
            StateError: another tick of this stage is staged and not decided.
        """
        state = self._find(session, stage)
        if state.tick is not None and state.tick != tick:
            raise StateError(
                f"stage {stage!r} cannot run tick {tick}: tick {state.tick} is staged and not decided yet",
                reason=Reason.BUSY,
            )
        state.tick = tick
        state.scope.open = True
        return state

    def seal(self, session: str, stage: str) -> None:
        """The stage has run: its view can no longer be written."""
        self._find(session, stage).scope.open = False

    def commit(self, session: str, tick: int, stages: Iterable[str]) -> None:
        """Make permanent, together, what ``stages`` staged in ``tick``.

        Raises:
            StateError: one of them has nothing undecided of that tick. Then none is committed.
        """
        states = [(stage, self._find(session, stage)) for stage in stages]
        for stage, state in states:
            if state.tick != tick:
                what = f"tick {state.tick} is" if state.tick is not None else "nothing is"
                raise StateError(f"cannot commit tick {tick} of stage {stage!r}: {what} staged there")
        for _, state in states:
            state.settle(commit=True)

    def discard(self, session: str, tick: int, stages: Iterable[str]) -> None:
        """Leave no trace of ``tick`` in ``stages``. Where that tick staged nothing, nothing happens."""
        for state in [self._find(session, stage) for stage in stages]:
            if state.tick == tick:
                state.settle(commit=False)

    def abandon(self, session: str) -> None:
        """Discard whatever is undecided in any stage: the session has moved on."""
        for state in self._session(session).values():
            if state.tick is not None:
                state.settle(commit=False)

    def reset(self, session: str) -> None:
        """All state of the session as freshly opened; what is staged is discarded."""
        for state in self._session(session).values():
            state.reset()

    def close(self, session: str) -> None:
        """Free everything of the session."""
        for stage, state in self._session(session).items():
            state.free()
            self._used -= self._fixed[stage]
        del self._sessions[session]

    def sessions(self) -> tuple[str, ...]:
        return tuple(self._sessions)

    def owns_memory(self, address: int) -> bool:
        """Whether a pool's storage lies at ``address``: memory that is reused once a tick is decided."""
        for pool in self._pools.values():
            begin = pool.storage.data_ptr()
            if begin <= address < begin + pool.storage.nbytes:
                return True
        return False

    def stats(self) -> StateStats:
        """O(1) in sessions."""
        pools = {f"{stage}.{name}": pool.stats() for (stage, name), pool in self._pools.items()}
        return StateStats(len(self._sessions), self._used, self._budget.nbytes, pools)

    def check(self) -> None:
        """Verify the books. O(sessions + blocks).

        Raises:
            PoolCorrupt: they do not balance.
        """
        for pool in self._pools.values():
            pool.check()
        held = sum(self._fixed[stage] for states in self._sessions.values() for stage in states)
        if held != self._used:
            raise PoolCorrupt(f"{self._used} bytes of fixed state on the books, {held} held")

    def _make_pools(self) -> dict[tuple[str, str], KVPool]:
        specs = {
            (stage, name): spec
            for stage, named in self._specs.items()
            for name, spec in named.items()
            if isinstance(spec, KVSpec)
        }
        kv = sum(blocks_per_session(spec) * block_bytes(spec) for spec in specs.values())
        fixed = sum(self._fixed.values())
        budget = self._budget
        fit = min(budget.max_sessions, budget.nbytes // (kv + fixed)) if kv + fixed else budget.max_sessions
        given = sum(block_bytes(spec) for spec in specs.values()) * (budget.blocks or 0)
        if fit < 1 or given + fixed > budget.nbytes:
            need = max(kv, given) + fixed
            raise ConfigError(f"the runner's pools need {need} bytes, but budget_bytes is {budget.nbytes}")
        return {
            key: KVPool(spec, budget.blocks or fit * blocks_per_session(spec), name=".".join(key), device=self._device)
            for key, spec in specs.items()
        }

    def _make(self, stage: str, made: dict[str, StageState]) -> None:
        scope = Scope()
        cells: dict[str, Cell] = {}
        made[stage] = StageState(stage, cells, scope)  # first, so that a failure half way is freed
        for name, spec in self._specs[stage].items():
            cells[name] = self._cell(stage, name, spec, scope)

    def _cell(self, stage: str, name: str, spec: StateSpec, scope: Scope) -> Cell:
        match spec:
            case KVSpec():
                return KVCell(name, self._pools[stage, name], scope)
            case TensorSpec():
                return TensorCell(name, spec, scope, self._device)
            case RingSpec():
                return RingCell(name, spec, scope, self._device)
            case CounterSpec():
                return CounterCell(name, spec, scope)

    def _session(self, session: str) -> dict[str, StageState]:
        try:
            return self._sessions[session]
        except KeyError:
            raise UnknownSession("this runner has no such session") from None

    def _find(self, session: str, stage: str) -> StageState:
        states = self._session(session)
        try:
            return states[stage]
        except KeyError:
            raise UnknownName(f"the session has no stage {stage!r} here.{nearest(stage, states)}") from None


def _fixed_bytes(owner: str, spec: StateSpec) -> int:
    """Bytes a session's state of ``spec`` always takes; raises InvalidInput for a spec that cannot be met."""
    match spec:
        case KVSpec():
            sizes = (spec.layers, spec.kv_heads, spec.head_dim, spec.block_size, spec.scratch_blocks)
            if min(sizes) < 1 or min(spec.window_blocks, spec.sink_blocks) < 0:
                raise InvalidInput(f"state {owner!r} has sizes that cannot be: {spec}", reason=Reason.BAD_SPEC)
            return 0
        case TensorSpec():
            count = 1
        case RingSpec():
            count = spec.capacity
        case CounterSpec():
            return 0
    if min((count, *spec.shape), default=1) < 1:
        raise InvalidInput(f"state {owner!r} has sizes that cannot be: {spec}", reason=Reason.BAD_SPEC)
    return count * math.prod(spec.shape) * torch_dtype(spec.dtype, owner).itemsize
