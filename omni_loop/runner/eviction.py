"""Whose state makes room for others, in which order.

Expired sessions first, then those whose log can rebuild them, then the most bytes per cost to rebuild, then the least
recently used. Never a session that is pinned or has a tick under way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from .kv_cell import KVCell
from .stage_state import StageState

Policy = Literal["recomputable", "any", "none"]


@dataclass(slots=True, eq=False)
class Session:
    """What the manager knows of a session. An evicted one has no ``stages`` any more, only their ``names``."""

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

    def may_go(self, policy: Policy) -> bool:
        """Whether ``policy`` allows evicting it now."""
        if self.evicted or self.pins or self.undecided or policy == "none":
            return False
        return policy == "any" or self.recomputable or self.expired


def victims(
    sessions: Mapping[str, Session], policy: Policy, helps: Callable[[Session], bool], spared: Iterable[str] = ()
) -> list[str]:
    """Sessions that may go and would help, the first to go first. O(sessions), when room is needed only."""
    spared = frozenset(spared)
    found = [n for n, s in sessions.items() if n not in spared and s.may_go(policy) and helps(s)]
    return sorted(found, key=lambda name: _rank(sessions[name]))


def _rank(session: Session) -> tuple[bool, bool, float, int]:
    per_cost = session.nbytes / max(session.cost_ms, 1e-3)
    return (not session.expired, not session.recomputable, -per_cost, session.used)
