"""Who makes room: shared prefixes nobody uses, then versions, the oldest first, then the state of idle sessions.

Of the sessions expired ones go first, then those whose log can rebuild them, then the most bytes per cost to rebuild,
then the least recently used. Never one that is pinned or has a tick under way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Literal

from .kv_pool import KVPool
from .ledger import Account
from .sessions import Session, Sessions
from .stage_state import Chronicle

Policy = Literal["recomputable", "any", "none"]
_PATIENCE_MS = (10.0, 1000.0)  # a retry helps after as long as the ticks under way may take, within these bounds


class Room:
    """Makes room for the sessions of one manager, as far as ``policy`` allows."""

    def __init__(
        self,
        sessions: Sessions,
        pools: Mapping[tuple[str, str], KVPool],
        chronicles: Mapping[str, Chronicle],
        account: Account,
        policy: Policy,
    ) -> None:
        self._sessions, self._pools, self._chronicles = sessions, pools, chronicles
        self._account, self._policy = account, policy
        self._tick_ms = 0.0  # what a committed tick cost, lately

    def make_blocks(self, stage: str, name: str, n: int) -> float:
        """Have ``n`` more blocks of a pool free if that can be, and answer 0; else after how many ms a retry may find
        them."""
        pool = self._pools[stage, name]
        goal = pool.free_blocks + n

        def short() -> bool:
            pool.give_up_prefixes(goal - pool.free_blocks)
            return pool.free_blocks < goal

        def helps(entry: Session) -> bool:
            return stage in entry.stages and entry.stages[stage].kv(name).length > 0

        chronicle = self._chronicles[stage]
        while len(chronicle) and short():
            chronicle.drop_oldest()
        self._evict_while(short, helps, ())
        return self.patience_ms() if short() else 0.0

    def make_bytes(self, nbytes: int, spared: Iterable[str] = ()) -> int:
        """Have ``nbytes`` more fit the budget if that can be; bytes still missing."""
        account = self._account

        def short() -> bool:
            return account.missing(nbytes) > 0

        self._forget_while(short)
        self._evict_while(short, lambda entry: entry.reserved > 0, spared)
        return account.missing(nbytes)

    def trim(self) -> None:
        """Versions are kept as far as the budget reaches."""
        if self._account.over:
            self._forget_while(lambda: self._account.over > 0)

    def evict(self, entry: Session) -> int:
        """Free an idle session's state; bytes freed."""
        before = self._occupied()
        self._sessions.evict(entry)
        return before - self._occupied()

    def note_tick(self, cost_ms: float) -> None:
        self._tick_ms += 0.1 * (cost_ms - self._tick_ms)

    def patience_ms(self) -> float:
        """Ms after which what the ticks under way hold may be free. O(sessions)."""
        busy = sum(entry.undecided for entry in self._sessions.values())
        return min(max(busy * self._tick_ms, _PATIENCE_MS[0]), _PATIENCE_MS[1]) if busy else _PATIENCE_MS[1]

    def victims(self, helps: Callable[[Session], bool], spared: Iterable[str] = ()) -> list[Session]:
        """Sessions that may go and would help, the first to go first. O(sessions), only when room is needed."""
        spared = frozenset(spared)
        entries = [entry for name, entry in self._sessions.items() if name not in spared]
        return sorted((entry for entry in entries if self._may_go(entry) and helps(entry)), key=_rank)

    def _may_go(self, entry: Session) -> bool:
        if entry.evicted or entry.pins or entry.undecided or self._policy == "none":
            return False
        return self._policy == "any" or entry.recomputable or entry.expired

    def _forget_while(self, short: Callable[[], bool]) -> None:
        """Give up versions of any stage, the oldest first."""
        while short():
            known = [c for c in self._chronicles.values() if len(c)]
            if not known:
                return
            min(known, key=lambda c: c.oldest).drop_oldest()

    def _evict_while(self, short: Callable[[], bool], helps: Callable[[Session], bool], spared: Iterable[str]) -> None:
        if not short():
            return
        for entry in self.victims(helps, spared):
            self._sessions.evict(entry)
            if not short():
                return

    def _occupied(self) -> int:
        """Bytes that sessions and their versions keep from others."""
        owned = sum(pool.stats().owned_bytes for pool in self._pools.values())
        return self._account.held + self._sessions.reserved + owned


def _rank(entry: Session) -> tuple[bool, bool, float, int]:
    per_cost = entry.nbytes / max(entry.cost_ms, 1e-3)
    return (not entry.expired, not entry.recomputable, -per_cost, entry.used)
