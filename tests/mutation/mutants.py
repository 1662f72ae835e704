"""Planted bugs of state, batching, logs and snapshots: each a change of one real function, and the check that must find
it. What only pool and state could get wrong is in ``tests/runner/test_mutations.py``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from omni_loop.loop import orchestrator, rebuild, results
from omni_loop.loop.live import Live
from omni_loop.loop.tick import TickRun
from omni_loop.record import sealed
from omni_loop.runner import payloads, state
from omni_loop.runner.batcher import Batcher
from omni_loop.runner.block_table import BlockTable
from omni_loop.runner.eviction import Room
from omni_loop.runner.kv_cell import KVCell
from omni_loop.runner.kv_pool import KVPool
from omni_loop.runner.ledger import Account
from omni_loop.runner.runner import Runner
from omni_loop.runner.sessions import Session
from omni_loop.runner.stage_state import StageState
from omni_loop.runner.state import StateManager
from omni_loop.session.log import SessionLog
from omni_loop.session.machine import SessionMachine
from omni_loop.stage import StageItem

from . import checks
from .checks import NOBODY_GOES, contract, row

Change = Callable[[Any], Any]  # the function as it stands -> the one with the bug


@dataclass(frozen=True, slots=True)
class Mutant:
    bug: str
    owner: Any
    name: str
    change: Change
    found_by: str
    check: Callable[[], None]


def instead(value: Any) -> Change:
    return lambda original: value


def _fork_uncounted(self: KVPool, table: BlockTable, layout: Any) -> None:
    table.committed = layout


def _truncate_one_late(original: Any) -> Any:
    return lambda self, end: original(self, min(end + 1, self.layout.end))


def _all_is_real(original: Any) -> Any:
    return lambda self, blocks, imagined: original(self, blocks, False)


def _discard_keeps(original: Any) -> Any:
    def settle(self: BlockTable, commit: bool) -> Any:
        fresh, released = original(self, commit)
        return fresh, released if commit else []

    return settle


def _window_early(original: Any) -> Any:
    def append(self: BlockTable, blocks: Sequence[int], imagined: bool) -> None:
        original(self, blocks, imagined)
        layout = self.layout
        if len(layout.blocks) - layout.sink == self.window_blocks:
            self._drop_window(layout, 1)

    return append


def _one_prefix_for_all(original: Any) -> Any:
    return lambda self, key, compute: original(self, b"", compute)


def _one_version_too_far(original: Any) -> Any:
    def rewind(self: StageState, key: tuple[int, int]) -> None:
        original(self, key)
        if self.versions:
            original(self, self.versions[-1].key)

    return rewind


def _first_stage_only(original: Any) -> Any:
    def commit(self: StateManager, session: str, tick: int, stages: Any, *more: Any, **named: Any) -> None:
        original(self, session, tick, tuple(stages)[:1], *more, **named)

    return commit


def _count_every_holder(original: Any) -> Any:
    def hold(self: Account, tensors: Any, nbytes: int) -> None:
        held = tuple(tensors)
        before = self._held
        original(self, held, nbytes)
        self._held = before + nbytes * len(held)

    return hold


def _rows_swapped(original: Any) -> Any:
    """Two sessions of a batch are given each other's outputs."""

    def run(self: Batcher, lane: Any, works: list[Any]) -> None:
        stage = lane.stage
        if len(works) > 1 and lane.stepped is None:
            lane.stage = _Swapped(stage)
        try:
            original(self, lane, works)
        finally:
            lane.stage = stage

    return run


class _Swapped:
    def __init__(self, stage: Any) -> None:
        self._stage = stage

    def run(self, items: Any) -> Any:
        given = list(self._stage.run(items))
        return [*given[:-2], given[-1], given[-2]]


def _noise_without(part: str) -> Change:
    def change(original: Any) -> Any:
        def noise_seed(self: StageItem, stage: str) -> int:
            from dataclasses import replace

            seed: int = original(replace(self, **{part: 0}), stage)
            return seed

        return noise_seed

    return change


def _without_the_first(original: Any) -> Any:
    return lambda self, version: original(self, version)[1:]


def _unchecked(original: Any) -> Any:
    """Every digest is the one that is expected: that of nothing."""
    return lambda content: "0" * 64


def _ring_reversed(original: Any) -> Any:
    def place(fresh: Any, values: Any) -> None:
        original(fresh, values)
        for cell in fresh.cells.values():
            if isinstance(cell.value, tuple):
                cell.value = cell.value[::-1]

    return place


def _keeps_counting(original: Any) -> Any:
    def undone(self: SessionMachine) -> None:
        original(self)
        self.tick += 1

    return undone


def _besides_unnoted(original: Any) -> Any:
    async def besides(self: Any, live: Any, flight: Any, run: Any, entry: Any, answer: Any) -> Any:
        result = await original(self, live, flight, run, entry, answer)
        entry.besides = False
        return result

    return besides


def _replay_as_of_now(original: Any) -> Any:
    """A replayed tick has the number of its place in the log."""

    async def again(live: Any, entry: Any, next_epoch: int) -> None:
        from dataclasses import replace

        version = replace(entry.version, tick=entry.version.tick + 1)
        await original(live, replace(entry, version=version), next_epoch)

    return again


def _policy_ignored(original: Any) -> Any:
    return lambda self, entry: not (entry.evicted or entry.pins or entry.undecided)


def _forgets(original: Any) -> Any:
    async def release(self: TickRun, stages: Sequence[str]) -> None:
        for stage in stages:
            self._done.pop(stage)

    return release


def _finite(original: Any) -> Any:
    return lambda tensor: True


MUTANTS = (
    Mutant("a fork takes no references", KVPool, "adopt", instead(_fork_uncounted), "F6", row("F6")),
    Mutant(
        "truncate keeps a block",
        BlockTable,
        "truncate",
        _truncate_one_late,
        "truncate_rewinds_to_a_block_boundary",
        contract("truncate_rewinds_to_a_block_boundary"),
    ),
    Mutant(
        "what is imagined is committed as observed",
        BlockTable,
        "append",
        _all_is_real,
        "drop_imagined_drops_the_tail_only",
        contract("drop_imagined_drops_the_tail_only"),
    ),
    Mutant("discard leaks what the tick took", BlockTable, "settle", _discard_keeps, "F7", row("F7")),
    Mutant(
        "the window drops a block early",
        BlockTable,
        "append",
        _window_early,
        "the_window_slides_behind_the_sink",
        contract("the_window_slides_behind_the_sink"),
    ),
    Mutant(
        "every prefix has the same key",
        KVCell,
        "prefix",
        _one_prefix_for_all,
        "a_prefix_is_computed_once",
        contract("a_prefix_is_computed_once"),
    ),
    Mutant(
        "rewind goes a version too far",
        StageState,
        "rewind",
        _one_version_too_far,
        "rewind_brings_everything_back",
        contract("rewind_brings_everything_back"),
    ),
    Mutant(
        "eviction takes what is staged",
        Session,
        "undecided",
        instead(property(lambda self: False)),
        "what_is_pinned_or_under_way_is_not_evicted",
        contract("what_is_pinned_or_under_way_is_not_evicted"),
    ),
    Mutant("eviction asks no policy", Room, "_may_go", _policy_ignored, "F6 without eviction", row("F6", NOBODY_GOES)),
    Mutant("the ledger counts an aliased storage twice", Account, "hold", _count_every_holder, "F6", row("F6")),
    Mutant("a tick commits its first stage alone", StateManager, "commit", _first_stage_only, "F7", row("F7")),
    Mutant("a batch mixes up two sessions", Batcher, "_run", _rows_swapped, "F7", row("F7")),
    Mutant("a split batch keeps what was staged", Runner, "undo", instead(lambda s, c: None), "F7", row("F7")),
    Mutant("outputs are not checked for NaN", payloads, "is_finite", _finite, "F7", row("F7")),
    Mutant("actions are not checked", results, "_expect", instead(lambda *a: None), "F7", row("F7")),
    Mutant("a failed tick draws other noise", SessionMachine, "undone", _keeps_counting, "F7", row("F7")),
    Mutant("noise ignores the epoch", StageItem, "noise_seed", _noise_without("epoch"), "noise", checks.noise),
    Mutant("noise ignores the tick", StageItem, "noise_seed", _noise_without("tick"), "noise", checks.noise),
    Mutant("a replay skips a tick", SessionLog, "until", _without_the_first, "F6", row("F6")),
    Mutant("a replay draws other noise", rebuild, "_again", _replay_as_of_now, "F6", row("F6")),
    Mutant(
        "what ran besides is not replayed", orchestrator.Orchestrator, "_besides", _besides_unnoted, "F6", row("F6")
    ),
    Mutant("a child is fed nothing", Live, "fed", instead(lambda self: {}), "F6", row("F6")),
    Mutant("the log has no bound", SessionLog, "_shrink", instead(lambda self: None), "L3", row("L3")),
    Mutant("payloads of a tick stay", TickRun, "_release_outputs", _forgets, "F7", row("F7")),
    Mutant("a restored ring is reversed", state, "place", _ring_reversed, "F11", row("F11")),
    Mutant("the store believes every file", sealed, "digest", _unchecked, "F11", row("F11")),
)
