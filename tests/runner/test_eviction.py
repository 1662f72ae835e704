from __future__ import annotations

import numpy as np
import pytest

from omni_loop.errors import Exhausted
from omni_loop.runner.eviction import Policy
from omni_loop.runner.state import Budget, StateManager
from omni_loop.stage import KVSpec, StateSpec, TensorSpec

KV = KVSpec(layers=1, kv_heads=1, head_dim=1, block_size=1, window_blocks=4, scratch_blocks=4)
STAGES: dict[str, dict[str, StateSpec]] = {"p/a": {"kv": KV}, "p/b": {"kv": KV}}


def make(evict: Policy = "any", blocks: int = 8) -> StateManager:
    return StateManager(STAGES, Budget(8, blocks=blocks, evict=evict))


def tick(manager: StateManager, session: str, n: int, value: int, cost: float = 1.0, recomputable: bool = True) -> None:
    """A committed tick that appends ``n`` blocks."""
    kv = manager.begin(session, "p/a", value).kv("kv")
    kv.append(np.full((1, 2, n, 1, 1), value, np.float32))
    manager.commit(session, value, ["p/a"], 0, recomputable, cost)


def gone(manager: StateManager) -> list[str]:
    return [session for session in manager.sessions() if manager.evicted(session)]


def filled(manager: StateManager, **costs: float) -> StateManager:
    """Sessions of two blocks each."""
    for i, (session, cost) in enumerate(costs.items()):
        manager.open(session)
        tick(manager, session, 2, i, cost)
    return manager


def test_the_least_recently_used_goes_first_among_equals() -> None:
    manager = filled(make(), a=1, b=1, c=1, d=1)
    manager.touch("a")
    manager.open("new")
    tick(manager, "new", 1, 9)
    assert gone(manager) == ["b"]
    tick(manager, "new", 2, 10)
    assert gone(manager) == ["b", "c"]


def test_most_bytes_per_cost_goes_before_idle() -> None:
    manager = filled(make(), a=5, b=1, c=3, d=4)
    manager.open("new")
    tick(manager, "new", 3, 9)
    assert gone(manager) == ["b", "c"]


def test_expired_then_recomputable_then_the_rest() -> None:
    manager = make()
    for i, (session, recomputable) in enumerate([("a", False), ("b", True), ("c", False), ("d", True)]):
        manager.open(session)
        tick(manager, session, 2, i, 1.0, recomputable)
    manager.expire("c")
    manager.open("new")
    order = []
    for n in range(4):
        tick(manager, "new", 1 if n == 3 else 2, 9 + n)
        order += [session for session in gone(manager) if session not in order]
    assert order[:3] == ["c", "b", "d"]


@pytest.mark.parametrize(("evict", "lost"), [("any", ["a"]), ("recomputable", ["b"]), ("none", [])])
def test_the_policy_says_whose_state_may_go(evict: Policy, lost: list[str]) -> None:
    manager = make(evict, blocks=4)
    for i, session in enumerate(("a", "b")):
        manager.open(session)
        tick(manager, session, 2, i, cost=1.0 + 9 * i, recomputable=session == "b")
    if evict == "any":  # the dearer one is spared unless it alone can be rebuilt
        manager.begin("b", "p/b", 5)
    manager.open("new")
    if lost:
        tick(manager, "new", 1, 9)
    else:
        with pytest.raises(Exhausted, match="lacks 1 of 1"):
            tick(manager, "new", 1, 9)
    assert gone(manager) == lost


def test_who_holds_nothing_of_what_is_missing_is_left_alone() -> None:
    manager = filled(make(blocks=4), a=1, b=1)
    manager.open("bystander")
    kv = manager.begin("bystander", "p/b", 1).kv("kv")
    kv.append(np.zeros((1, 2, 4, 1, 1), np.float32))
    manager.commit("bystander", 1, ["p/b"], 0, True, 0.001)
    manager.open("new")
    tick(manager, "new", 4, 9)
    assert gone(manager) == ["a", "b"]


def test_a_tick_is_never_robbed_of_its_own_state() -> None:
    manager = filled(make(blocks=4), a=1, b=1)
    kv = manager.begin("a", "p/a", 7).kv("kv")
    kv.append(np.full((1, 2, 2, 1, 1), 7, np.float32))
    assert gone(manager) == ["b"]
    assert kv.gather()[0, 0].flatten().tolist() == [0, 0, 7, 7]
    with pytest.raises(Exhausted) as caught:
        kv.append(np.zeros((1, 2, 1, 1, 1), np.float32))
    assert (caught.value.missing_bytes, caught.value.retryable) == (8, True)
    manager.commit("a", 7, ["p/a"])
    assert gone(manager) == ["b"]


def test_shared_prefixes_and_versions_go_before_sessions() -> None:
    manager = make(blocks=6)
    manager.open("a")
    manager.begin("a", "p/a", 0).kv("kv").prefix(b"k", lambda: np.zeros((1, 2, 2, 1, 1), np.float32))
    manager.discard("a", 0, ["p/a"])
    assert manager.stats().pools["p/a.kv"].cached == 2
    for n in range(1, 4):
        tick(manager, "a", 2, n)
    pool = manager.stats().pools["p/a.kv"]
    assert (pool.cached, pool.owned, manager.stats().versions) == (0, 6, 3)  # the prefix went
    tick(manager, "a", 2, 4)
    assert manager.versions("a") == ((0, 2), (0, 3), (0, 4)) or len(manager.versions("a")) < 4
    assert gone(manager) == []
    manager.check()


def test_the_oldest_version_of_all_sessions_goes_first() -> None:
    manager = make(blocks=8)
    for session in ("a", "b"):
        manager.open(session)
    for n, session in enumerate("abba"):
        kv = manager.begin(session, "p/a", n).kv("kv")
        kv.truncate(0)
        kv.append(np.full((1, 2, 2, 1, 1), n, np.float32))
        manager.commit(session, n, ["p/a"])
    manager.open("new")
    tick(manager, "new", 1, 9)  # the eight blocks are those of the versions after ticks 0 to 3
    assert manager.versions("a") == ((0, 0), (0, 3))
    assert manager.versions("b") == ((0, 2),)  # was replaced before a's
    tick(manager, "new", 2, 10)
    assert manager.versions("a") == ((0, 3),)
    assert gone(manager) == []


def test_typed_state_makes_room_too() -> None:
    specs: dict[str, dict[str, StateSpec]] = {"p/a": {"t": TensorSpec((256,))}}
    manager = StateManager(specs, Budget(2, 2 * 2048, evict="any"))
    manager.open("a")
    manager.open("b")
    manager.pin("a")
    manager.open("c")
    assert gone(manager) == ["b"]
    manager.pin("c")
    with pytest.raises(Exhausted):
        manager.open("d")
    with pytest.raises(Exhausted):
        manager.reset("b")
    assert gone(manager) == ["b"]  # still: a refused reset revives nobody
    manager.unpin("c")
    manager.reset("b")
    assert gone(manager) == ["c"]


def test_a_fork_is_not_paid_for_by_its_parent() -> None:
    specs: dict[str, dict[str, StateSpec]] = {"p/a": {"t": TensorSpec((256,))}}
    manager = StateManager(specs, Budget(1, 2048, evict="any"))
    manager.open("a")
    with pytest.raises(Exhausted):
        manager.fork("a", "b")
    assert gone(manager) == []


def test_what_a_retry_may_wait_for_follows_the_ticks_under_way() -> None:
    manager = make("none", blocks=4)
    for i, session in enumerate(("a", "b")):
        manager.open(session)
        for n in range(40):
            tick(manager, session, 1, 40 * i + n, cost=50.0)
            manager.begin(session, "p/a", 1000).kv("kv").truncate(0)
            manager.commit(session, 1000, ["p/a"])
    manager.open("c")
    manager.begin("a", "p/a", 2000).kv("kv").append(np.zeros((1, 2, 4, 1, 1), np.float32))
    with pytest.raises(Exhausted) as caught:
        manager.begin("c", "p/a", 1).kv("kv").append(np.zeros((1, 2, 1, 1, 1), np.float32))
    assert caught.value.retry_after_ms == pytest.approx(100, rel=0.05)  # two ticks of 50 ms
