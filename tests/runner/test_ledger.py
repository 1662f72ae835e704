from __future__ import annotations

import numpy as np
import pytest
import torch

from omni_loop.errors import Exhausted, Reason
from omni_loop.runner.ledger import Ledger
from omni_loop.runner.state import Budget, StateManager
from omni_loop.stage import RingSpec, TensorSpec
from omni_loop.testing.state_contract import STAGES

KB = {"p/a": {"t": TensorSpec((256,))}}  # one KB committed, one staged


def put(manager: StateManager, session: str, tick: int) -> None:
    manager.begin(session, "p/a", tick).tensor("t").set(np.full(256, tick, np.float32))
    manager.commit(session, tick, ["p/a"])


def test_a_charge_is_all_or_nothing_and_says_what_is_missing() -> None:
    account = Ledger({"cpu": 100}).account("cpu")
    account.charge(80, "one")
    with pytest.raises(Exhausted, match="two needs 30 bytes of state, 10 more than left") as caught:
        account.charge(30, "two")
    assert (caught.value.missing_bytes, caught.value.reason) == (10, Reason.OUT_OF_BYTES)
    assert account.used == 80
    account.credit(80)
    account.charge(100, "all")
    assert (account.missing(1), account.over) == (1, 0)


def test_a_storage_counts_once_however_many_hold_it() -> None:
    account = Ledger({"cpu": 100}).account("cpu")
    one, two = torch.zeros(10), torch.zeros(10)
    account.hold([one, two, one], 40)
    account.hold([one.view(2, 5)], 40)
    assert (account.held, account.used) == (80, 80)
    account.release([one, one, two], 40)
    assert account.held == 40
    account.release([one], 40)
    assert account.held == 0


def test_devices_have_accounts_of_their_own() -> None:
    ledger = Ledger({"cpu": 10, "cuda": 20})
    ledger.account("cuda:0").charge(15, "x")
    assert ledger.used() == {"cpu": 0, "cuda:0": 15}
    with pytest.raises(Exhausted, match="cuda:1") as caught:
        ledger.account("cuda:1")
    assert not caught.value.retryable


def test_runners_share_one_ledger() -> None:
    ledger = Ledger({"cpu": 7000})
    one = StateManager(KB, Budget(2, 7000), ledger=ledger)
    two = StateManager(KB, Budget(2, 7000), ledger=ledger)
    for manager in (one, two):
        manager.open("s")
    one.open("t")
    with pytest.raises(Exhausted) as caught:
        two.open("t")
    assert caught.value.missing_bytes == 4 * 2048 - 7000
    one.free()
    two.open("t")
    two.free()
    assert ledger.used() == {"cpu": 0}


def test_versions_are_counted_by_storage_and_kept_as_far_as_the_budget_reaches() -> None:
    manager = StateManager(KB, Budget(4, 2 * 2048 + 3 * 1024, rewind_ticks=8))
    manager.open("s")
    for tick in range(3):
        put(manager, "s", tick)
    assert manager.stats().history_bytes == 2048  # what was never set costs nothing
    manager.fork("s", "f")
    put(manager, "s", 3)
    put(manager, "f", 3)
    assert manager.stats().history_bytes == 3 * 1024  # both keep the same tensor of tick 2
    put(manager, "f", 4)
    stats = manager.stats()
    assert (stats.history_bytes, stats.used_bytes) == (3 * 1024, stats.budget_bytes)
    assert manager.versions("s")[0] == (0, 1)  # the oldest versions went: as opened, and that of tick 0
    manager.close("s")
    manager.close("f")
    assert manager.stats().used_bytes == 0


def test_a_session_that_opens_takes_the_room_of_versions() -> None:
    manager = StateManager(KB, Budget(4, 2 * 2048, rewind_ticks=8))
    manager.open("s")
    for tick in range(4):
        put(manager, "s", tick)
    assert len(manager.versions("s")) == 3
    manager.open("t")
    assert manager.versions("s") == ((0, 3),)
    with pytest.raises(Exhausted) as caught:
        manager.fork("s", "u")
    assert caught.value.missing_bytes == 2048
    assert caught.value.retry_after_ms > 0
    assert manager.sessions() == ("s", "t")


def test_what_a_ring_drops_is_kept_for_its_versions_alone() -> None:
    manager = StateManager({"p/a": {"r": RingSpec((256,), 2)}}, Budget(1, 1 << 20, rewind_ticks=2))
    manager.open("s")
    for tick in range(9):
        ring = manager.begin("s", "p/a", tick).ring("r")
        if tick % 3 == 2:
            last = ring.items()[-1]
            ring.clear()
            ring.push(last)
            assert ring.items()[0] is last  # what is committed is taken back as it is
        else:
            ring.push(np.full(256, tick, np.float32))
        manager.commit("s", tick, ["p/a"])
        manager.check()
    assert [int(x[0]) for x in manager.begin("s", "p/a", 9).ring("r").items()] == [7]
    manager.discard("s", 9, ["p/a"])
    assert manager.stats().history_bytes == 2 * 1024  # 6, and 4 before it
    manager.rewind("s", 0, 6)
    assert [int(x[0]) for x in manager.begin("s", "p/a", 9).ring("r").items()] == [4, 6]
    assert manager.stats().history_bytes == 0


def test_stats_are_of_all_sessions() -> None:
    manager = StateManager(STAGES, Budget(4))
    for i in range(3):
        manager.open(f"s{i}")
    manager.evict("s0")
    stats = manager.stats()
    assert (stats.sessions, stats.evicted, stats.evictions) == (3, 1, 1)
    assert stats.reserved_bytes == 2 * 2 * (6 * 4 + 3 * 2 * 4)
    assert stats.used_bytes == stats.reserved_bytes + sum(pool.total_bytes for pool in stats.pools.values())
    manager.close("s0")
    assert (manager.stats().sessions, manager.stats().evicted) == (2, 0)
