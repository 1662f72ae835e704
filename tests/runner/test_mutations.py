"""Bugs planted in pool and state, one at a time: the machines must find every one of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from omni_loop.runner import kv_pool
from omni_loop.runner.block_table import BlockTable, Layout
from omni_loop.runner.cells import RingCell, TensorCell
from omni_loop.runner.eviction import Room
from omni_loop.runner.kv_cell import KVCell
from omni_loop.runner.kv_pool import KVPool
from omni_loop.runner.sessions import Session
from omni_loop.runner.stage_state import StageState

from .test_pool_machine import PoolMachine
from .test_state_machine import StateMachine

Bug = tuple[str, type, str, Callable[[Any], Callable[..., Any]]]  # its name, where it is, how it is made of what stood


def instead(function: Callable[..., Any]) -> Callable[[Any], Callable[..., Any]]:
    return lambda original: function


def _adopt_uncounted(self: KVPool, table: BlockTable, layout: Layout) -> None:
    table.committed = layout


def _keep_the_staged(original: Callable[..., Any]) -> Callable[..., Any]:
    def settle(self: BlockTable, commit: bool) -> Any:
        fresh, release = original(self, commit)
        return fresh, release if commit else release[1:]

    return settle


def _drop_one_too_few(original: Callable[..., Any]) -> Callable[..., Any]:
    def truncate(self: BlockTable, end: int) -> None:
        original(self, end)
        del self.dropped[-1:]

    return truncate


def _reserve_half(original: Callable[..., Any]) -> Callable[..., Any]:
    def reserve(self: KVPool, table: BlockTable, n: int, imagined: bool = False) -> Any:
        if n > 1 and n > self.free_blocks + self.stats().cached > 0:
            original(self, table, 1, imagined)
        return original(self, table, n, imagined)

    return reserve


def _forget_the_last_write(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, blocks, kv: original(self, blocks[:-1], kv[:, :, :-1]) if len(blocks) > 1 else None


def _rewind_too_far(original: Callable[..., Any]) -> Callable[..., Any]:
    def rewind(self: StageState, key: tuple[int, int]) -> None:
        original(self, key)
        if self.versions and self.key != key:
            original(self, self.versions[-1].key)

    return rewind


def _place_imagined(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, table, layout, content: original(
        self, table, Layout(layout.blocks, layout.sink, layout.end), content
    )


def _share_uncounted(original: Callable[..., Any]) -> Callable[..., Any]:
    def share(self: KVPool, table: BlockTable, key: bytes) -> Any:
        before = self._shares
        found = original(self, table, key)
        self._shares = before
        return found

    return share


POOL: list[Bug] = [
    ("a fork takes no references", KVPool, "adopt", instead(_adopt_uncounted)),
    ("staged and committed are one list", Layout, "copy", instead(lambda self: self)),
    ("a discarded block is never freed", BlockTable, "settle", _keep_the_staged),
    ("truncate loses a block", BlockTable, "truncate", _drop_one_too_few),
    ("exhaustion half-allocates", KVPool, "reserve", _reserve_half),
    ("the last block is not written", KVPool, "write", _forget_the_last_write),
    ("a prefix is used without a reference", KVPool, "share", _share_uncounted),
    (
        "imagined blocks pass for real ones",
        BlockTable,
        "append",
        lambda f: lambda s, blocks, imagined: f(s, blocks, False),
    ),
    ("what comes in is imagined", KVPool, "place", _place_imagined),
    ("scattered blocks pass for neighbours", kv_pool, "_run", instead(lambda blocks: blocks[0])),  # type: ignore[list-item]
]
STATE: list[Bug] = [
    ("a version does not keep its blocks", KVCell, "keep", instead(lambda self, dropped: self.pool.release(dropped))),
    ("a version's blocks are never given back", KVCell, "forget", instead(lambda self, d: self.table.forget(d))),
    ("a failed tick leaves its tensor", TensorCell, "discard", instead(lambda self: None)),
    ("a failed tick leaves its ring", RingCell, "discard", instead(lambda self: None)),
    ("what a ring drops is not counted", RingCell, "keep", instead(lambda self, dropped: None)),
    ("a second commit frees what a version needs", StageState, "_drop_again", instead(lambda s, c, d, v: c.drop(d))),
    ("rewind goes one version too far", StageState, "rewind", _rewind_too_far),
    ("reset keeps versions", StageState, "forget_versions", instead(lambda self: None)),
    ("branches outlive their tick", KVCell, "_end", instead(lambda self: setattr(self, "_gathered", None))),
    ("a tick under way is evicted", Session, "undecided", instead(property(lambda self: False))),  # type: ignore[arg-type]
    ("what is pinned is evicted", Room, "_may_go", lambda f: lambda s, e: not e.evicted and not e.undecided),
]


@pytest.fixture(autouse=True)
def books_balance() -> None:
    """Not here: they are broken on purpose."""


@pytest.fixture(autouse=True)
def balanced_pools() -> None:
    """Not here either."""


def _case(machine: type[RuleBasedStateMachine], bug: Bug) -> Any:
    return pytest.param(machine, bug, id=bug[0].replace(" ", "-"))


@pytest.mark.parametrize(
    ("machine", "bug"), [*(_case(PoolMachine, bug) for bug in POOL), *(_case(StateMachine, bug) for bug in STATE)]
)
def test_a_planted_bug_is_found(
    machine: type[RuleBasedStateMachine], bug: Bug, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, owner, name, plant = bug
    quick = settings(
        max_examples=200,
        stateful_step_count=50,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, plant(getattr(owner, name)))
        with pytest.raises(BaseException):  # noqa: B017, PT011 -- whatever it breaks, or an error that is missing
            run_state_machine_as_test(machine, settings=quick)
