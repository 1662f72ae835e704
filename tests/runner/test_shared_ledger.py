"""Runners in threads of one process draw on one budget per device."""

from __future__ import annotations

import pytest

from omni_loop.errors import ConfigError, Exhausted
from omni_loop.runner.ledger import Ledger
from omni_loop.runner.sizing import pool_sizes
from omni_loop.runner.state import Budget, StateManager
from omni_loop.testing.state_contract import STAGES

SPECS = {"p/b": STAGES["p/b"]}


def _pools(sessions: int) -> int:
    """Bytes of the pools of a manager made for ``sessions``."""
    return sum(p.total_bytes for p in StateManager(SPECS, Budget(sessions)).stats().pools.values())


def test_a_second_runner_has_what_the_first_left() -> None:
    budget = Budget(4, nbytes=_pools(4) + _pools(2))
    ledger = Ledger({"cpu": budget.nbytes})
    first, second = (StateManager(SPECS, budget, ledger=ledger) for _ in range(2))
    whole, rest = (sum(p.total for p in m.stats().pools.values()) for m in (first, second))
    assert rest == whole // 2
    assert ledger.used() == {"cpu": budget.nbytes}
    assert first.stats().used_bytes == second.stats().used_bytes == budget.nbytes


def test_a_runner_for_which_nothing_is_left_does_not_start() -> None:
    budget = Budget(4, nbytes=_pools(4))
    ledger = Ledger({"cpu": budget.nbytes})
    StateManager(SPECS, budget, ledger=ledger)
    with pytest.raises(ConfigError, match="budget_bytes"):
        StateManager(SPECS, budget, ledger=ledger)


def test_what_a_runner_gives_back_another_may_take() -> None:
    budget = Budget(4, nbytes=_pools(4))
    ledger = Ledger({"cpu": budget.nbytes})
    first = StateManager(SPECS, budget, ledger=ledger)
    first.open("s")
    first.free()
    assert ledger.used() == {"cpu": 0}
    assert sum(p.total for p in StateManager(SPECS, budget, ledger=ledger).stats().pools.values())


def test_one_runners_sessions_are_refused_for_the_bytes_of_another() -> None:
    specs = {"p/a": {"mean": STAGES["p/a"]["mean"]}}
    assert pool_sizes(specs, 1, 1 << 20, None) == {}
    need = StateManager(specs, Budget(1))
    need.open("s")
    each = need.stats().reserved_bytes
    ledger = Ledger({"cpu": 2 * each})
    first, second = (StateManager(specs, Budget(4, nbytes=2 * each), ledger=ledger) for _ in range(2))
    first.open("s")
    second.open("s")
    with pytest.raises(Exhausted) as refused:
        second.open("t")
    assert refused.value.missing_bytes == each
    first.close("s")
    second.open("t")
