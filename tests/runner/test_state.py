from __future__ import annotations

import numpy as np
import pytest
import torch

from omni_loop.errors import ConfigError, Exhausted, InvalidInput, Reason
from omni_loop.runner.books import PoolCorrupt
from omni_loop.runner.cells import RingCell
from omni_loop.runner.kv_pool import block_bytes, blocks_per_session
from omni_loop.runner.state import Budget, StateManager
from omni_loop.stage import CounterSpec, KVSpec, PagedKV, RingSpec, StateSpec, StateView, TensorSpec
from omni_loop.testing.state_contract import KV, STAGES, StateContract, blocks, write_all
from omni_loop.types import ArraySpec


class TestStateManager(StateContract):
    def make(self, max_sessions: int = 4) -> StateManager:
        return StateManager(STAGES, Budget(max_sessions))


def test_views_fit_the_protocols_stages_are_written_against() -> None:
    manager = StateManager(STAGES)
    manager.open("s")
    view: StateView = manager.begin("s", "p/a", 1)
    kv: PagedKV = view.kv("kv")
    assert isinstance(kv.gather(), torch.Tensor)


def test_gather_is_done_once_per_tick_until_something_changes() -> None:
    manager = StateManager(STAGES)
    manager.open("s")
    kv = manager.begin("s", "p/a", 1).kv("kv")
    kv.append(blocks(0))
    first = kv.gather()
    assert kv.gather() is first
    kv.append(blocks(4))
    assert kv.gather().shape[2] == 8
    kv.truncate(4)
    assert kv.gather().shape[2] == 4


def test_pools_are_sized_for_the_sessions_or_by_the_budget() -> None:
    each = blocks_per_session(KV)
    assert each == 8
    stats = StateManager(STAGES, Budget(max_sessions=5)).stats()
    assert {name: pool.total for name, pool in stats.pools.items()} == {"p/a.kv": 5 * each, "p/b.kv": 5 * each}
    session = 2 * each * block_bytes(KV) + 2 * (6 * 4 + 3 * 2 * 4)  # committed and staged
    stats = StateManager(STAGES, Budget(5, nbytes=2 * session + 1)).stats()
    assert [pool.total for pool in stats.pools.values()] == [2 * each, 2 * each]
    assert [p.total for p in StateManager(STAGES, Budget(5, blocks=7)).stats().pools.values()] == [7, 7]
    with pytest.raises(ConfigError, match=str(session)):
        StateManager(STAGES, Budget(5, nbytes=session - 1))
    with pytest.raises(ConfigError, match="budget_bytes"):
        StateManager(STAGES, Budget(5, nbytes=session, blocks=1000))


def test_fixed_state_counts_against_the_budget() -> None:
    manager = StateManager({"p/a": {"big": TensorSpec((1000,)), "ring": RingSpec((10,), 5, "int64")}}, Budget(2, 18000))
    manager.open("one")
    assert manager.stats().reserved_bytes == 8800  # committed, and as much staged
    manager.open("two")
    with pytest.raises(Exhausted, match="8400 more than left") as caught:
        manager.open("three")
    assert (caught.value.reason, caught.value.missing_bytes) == (Reason.OUT_OF_BYTES, 8400)
    assert manager.sessions() == ("one", "two")
    manager.close("one")
    manager.open("three")
    manager.check()


def test_opening_some_stages_costs_only_those() -> None:
    manager = StateManager(STAGES)
    manager.open("s", ["p/b"])
    assert manager.stats().reserved_bytes == 0


@pytest.mark.parametrize(
    "spec",
    [
        TensorSpec((0,)),
        TensorSpec((-1, 3)),
        TensorSpec((3,), "float33"),
        TensorSpec((3,), "nn"),
        RingSpec((2,), 0),
        KVSpec(1, 1, 1, 0, window_blocks=1),
        KVSpec(1, 1, 1, 1, window_blocks=-1),
        KVSpec(1, 1, 1, 1, window_blocks=1, scratch_blocks=0),
    ],
)
def test_specs_that_cannot_be_met_are_refused_at_start(spec: StateSpec) -> None:
    with pytest.raises(InvalidInput, match=r"p/a\.x") as caught:
        StateManager({"p/a": {"x": spec}})
    assert caught.value.reason is Reason.BAD_SPEC


def test_a_newer_epoch_abandons_what_is_undecided() -> None:
    manager = StateManager(STAGES)
    manager.open("s")
    write_all(manager.begin("s", "p/a", 1), 8)
    manager.abandon("s")
    assert manager.begin("s", "p/a", 2).kv("kv").total == 0
    assert manager.stats().pools["p/a.kv"].owned == 0


def test_failing_half_way_through_opening_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = StateManager(STAGES)

    def full(*args: object, **kwargs: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(RingCell, "__init__", full)
        with pytest.raises(MemoryError):
            manager.open("s", ["p/b", "p/a"])
    assert [pool.tables for pool in manager.stats().pools.values()] == [0, 0]
    manager.open("s")
    manager.check()


def test_pool_memory_is_recognised() -> None:
    manager = StateManager(STAGES)
    manager.open("s")
    kv = manager.begin("s", "p/a", 1).kv("kv")
    kv.append(blocks(0))
    assert manager.owns_memory(kv.gather().data_ptr())
    assert not manager.owns_memory(torch.zeros(3).data_ptr())


def test_check_finds_bytes_that_do_not_balance() -> None:
    manager = StateManager(STAGES)
    manager.open("s")
    manager._sessions.reserved += 1
    with pytest.raises(PoolCorrupt):
        manager.check()
    manager._sessions.reserved -= 1


def test_values_are_cast_to_the_declared_dtype() -> None:
    manager = StateManager(
        {"p/a": {"t": TensorSpec((2,), "float16"), "n": TensorSpec((1,), "int32"), "c": CounterSpec()}}
    )
    manager.open("s")
    view = manager.begin("s", "p/a", 1)
    view.tensor("t").set(np.array([1.0, 2.0]))
    assert view.tensor("t").get().dtype is torch.float16
    with pytest.raises(InvalidInput, match="'n'"):
        view.tensor("n").set(np.array([1.5]))


def test_a_spec_that_is_none_is_named() -> None:
    with pytest.raises(InvalidInput) as caught:
        StateManager({"x/y": {"velocity": ArraySpec("velocity", "float32", (2,))}}, Budget(1, nbytes=1 << 20))  # type: ignore[dict-item]
    want = "state 'x/y.velocity' is ArraySpec; it must be KVSpec, TensorSpec, RingSpec or CounterSpec"
    assert (caught.value.text, caught.value.reason) == (want, Reason.BAD_SPEC)
