"""The contract of typed session state: derive from :class:`StateContract` and say how to make a manager.

A manager of another device, engine or storage passes the same suite; arrays go in as numpy and are compared as numpy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import numpy as np
import pytest

from ..errors import Exhausted, InvalidInput, OmniLoopError, StateError, TensorError, UnknownName, UnknownSession
from ..stage import CounterSpec, KVSpec, RingSpec, StateSpec, StateView, TensorSpec

KV = KVSpec(layers=2, kv_heads=2, head_dim=3, block_size=4, window_blocks=3, sink_blocks=1, scratch_blocks=2)
STAGES: dict[str, dict[str, StateSpec]] = {
    "p/a": {"kv": KV, "mean": TensorSpec((2, 3), fill=1.5), "recent": RingSpec((2,), 3), "ticks": CounterSpec(5)},
    "p/b": {"kv": KV, "ticks": CounterSpec()},
}
EVERY = tuple(STAGES)


class Manager(Protocol):
    """What the suite drives; see :class:`omni_loop.runner.state.StateManager`."""

    def open(self, session: str, stages: Iterable[str] = ()) -> None: ...
    def begin(self, session: str, stage: str, tick: int) -> StateView: ...
    def seal(self, session: str, stage: str) -> None: ...
    def commit(self, session: str, tick: int, stages: Iterable[str]) -> None: ...
    def discard(self, session: str, tick: int, stages: Iterable[str]) -> None: ...
    def reset(self, session: str) -> None: ...
    def close(self, session: str) -> None: ...
    def check(self) -> None: ...


def blocks(first: float, n: int = 1) -> Any:
    """``n`` blocks of KV, every token with a value of its own starting at ``first``."""
    tokens = np.arange(first, first + n * KV.block_size, dtype=np.float32)
    return np.broadcast_to(tokens[None, None, :, None, None], (2, 2, len(tokens), 2, 3)).copy()


def tokens(view: StateView, name: str = "kv") -> list[float]:
    """The values :func:`blocks` wrote, as gathered; the same in every layer, key, head and dim."""
    gathered = np.asarray(view.kv(name).gather())
    assert gathered.shape == (2, 2, view.kv(name).length, 2, 3)
    assert (gathered == gathered[:1, :1, :, :1, :1]).all()
    return [float(x) for x in gathered[0, 0, :, 0, 0]]


def facts(view: StateView) -> tuple[Any, ...]:
    """Everything stage ``p/a`` can see of its state."""
    kv = view.kv("kv")
    recent = [np.asarray(x).tolist() for x in view.ring("recent").items()]
    mean = np.asarray(view.tensor("mean").get()).tolist()
    return (kv.length, kv.total, kv.sink_length, tokens(view), mean, recent, view.counter("ticks").get())


def write_all(view: StateView, value: float, imagined: bool = False) -> None:
    """Stage something in every state of ``p/a``."""
    view.kv("kv").append(blocks(value), imagined)
    view.tensor("mean").set(np.full((2, 3), value, np.float32))
    view.ring("recent").push(np.full(2, value, np.float32))
    view.counter("ticks").set(int(value))


class StateContract:
    def make(self, max_sessions: int = 4) -> Manager:
        """A manager of :data:`STAGES` with room for ``max_sessions``."""
        raise NotImplementedError

    @pytest.fixture
    def manager(self) -> Manager:
        manager = self.make()
        manager.open("s")
        return manager

    def test_opens_as_declared(self, manager: Manager) -> None:
        view = manager.begin("s", "p/a", 1)
        assert facts(view) == (0, 0, 0, [], [[1.5] * 3] * 2, [], 5)

    def test_staged_is_seen_at_once_and_committed_together(self, manager: Manager) -> None:
        view = manager.begin("s", "p/a", 1)
        write_all(view, 8)
        want = (4, 4, 4, [8, 9, 10, 11], [[8.0] * 3] * 2, [[8.0, 8.0]], 8)
        assert facts(view) == want
        other = manager.begin("s", "p/b", 1)
        other.counter("ticks").set(1)
        manager.commit("s", 1, EVERY)
        assert facts(manager.begin("s", "p/a", 2)) == want
        assert manager.begin("s", "p/b", 2).counter("ticks").get() == 1

    def test_discard_leaves_no_trace(self, manager: Manager) -> None:
        write_all(manager.begin("s", "p/a", 1), 8)
        manager.commit("s", 1, ["p/a"])
        view = manager.begin("s", "p/a", 2)
        before = facts(view)
        write_all(view, 20, imagined=True)
        view.kv("kv").truncate(0)
        view.ring("recent").clear()
        manager.discard("s", 2, ["p/a"])
        assert facts(manager.begin("s", "p/a", 3)) == before

    def test_discard_of_nothing_and_of_another_tick_changes_nothing(self, manager: Manager) -> None:
        manager.discard("s", 1, EVERY)
        view = manager.begin("s", "p/a", 2)
        write_all(view, 8)
        staged = facts(view)
        manager.discard("s", 1, EVERY)
        assert facts(view) == staged

    def test_another_tick_is_refused_while_one_is_undecided(self, manager: Manager) -> None:
        view = manager.begin("s", "p/a", 1)
        write_all(view, 8)
        with pytest.raises(StateError, match="tick 2"):
            manager.begin("s", "p/a", 2)
        write_all(manager.begin("s", "p/a", 1), 12)  # the same tick goes on
        manager.commit("s", 1, ["p/a"])
        assert tokens(manager.begin("s", "p/a", 2)) == list(range(8, 16))

    def test_a_commit_that_one_stage_cannot_make_is_made_by_none(self, manager: Manager) -> None:
        view = manager.begin("s", "p/a", 1)
        write_all(view, 8)
        staged = facts(view)
        with pytest.raises(StateError, match="p/b"):
            manager.commit("s", 1, EVERY)
        with pytest.raises(StateError, match="tick 1"):
            manager.commit("s", 2, ["p/a"])
        assert facts(view) == staged
        manager.discard("s", 1, ["p/a"])
        assert facts(manager.begin("s", "p/a", 2))[0] == 0

    def test_the_window_slides_behind_the_sink(self, manager: Manager) -> None:
        for tick in range(12):
            kv = manager.begin("s", "p/a", tick).kv("kv")
            kv.append(blocks(4 * tick))
            total = 4 * (tick + 1)
            recent = list(range(max(4, total - 12), total))
            assert tokens(manager.begin("s", "p/a", tick)) == [*range(4), *recent][:total]
            assert (kv.total, kv.sink_length, kv.length) == (total, 4, 4 + len(recent))
            manager.commit("s", tick, ["p/a"])
            manager.check()

    def test_a_rollout_has_no_last_frame(self, manager: Manager) -> None:
        for tick in range(500):
            manager.begin("s", "p/a", tick).kv("kv").append(blocks(tick), imagined=True)
            manager.commit("s", tick, ["p/a"])
        kv = manager.begin("s", "p/a", 500).kv("kv")
        assert (kv.total, kv.length) == (2000, 16)
        assert kv.drop_imagined() == 0

    def test_truncate_rewinds_to_a_block_boundary(self, manager: Manager) -> None:
        for tick in range(6):
            manager.begin("s", "p/a", tick).kv("kv").append(blocks(4 * tick))
            manager.commit("s", tick, ["p/a"])
        view = manager.begin("s", "p/a", 6)
        kv = view.kv("kv")
        for wrong in (3, -4, 28):
            with pytest.raises(InvalidInput):
                kv.truncate(wrong)
        kv.truncate(16)
        assert (kv.total, tokens(view)) == (16, [*range(4), *range(12, 16)])
        kv.append(blocks(100))
        manager.commit("s", 6, ["p/a"])
        view = manager.begin("s", "p/a", 7)
        assert tokens(view) == [*range(4), *range(12, 16), *range(100, 104)]
        view.kv("kv").truncate(8)  # further back than the window: what it dropped long ago stays gone
        assert (view.kv("kv").total, tokens(view)) == (8, list(range(4)))
        view.kv("kv").truncate(0)
        view.kv("kv").append(blocks(50))
        assert (view.kv("kv").total, view.kv("kv").sink_length) == (4, 4)

    def test_drop_imagined_drops_the_tail_only(self, manager: Manager) -> None:
        for tick, imagined in enumerate([False, True, False, True, True, True, True, True]):
            manager.begin("s", "p/a", tick).kv("kv").append(blocks(4 * tick), imagined)
            manager.commit("s", tick, ["p/a"])
        view = manager.begin("s", "p/a", 9)
        assert view.kv("kv").drop_imagined() == 12  # also of the tail the window dropped
        assert tokens(view) == list(range(4))
        assert view.kv("kv").drop_imagined() == 12
        view.kv("kv").append(blocks(12))
        assert view.kv("kv").total == 16
        manager.discard("s", 9, ["p/a"])
        assert manager.begin("s", "p/a", 10).kv("kv").total == 32

    def test_after_a_rewind_the_tail_is_what_is_imagined_now(self, manager: Manager) -> None:
        for tick, imagined in enumerate([False, True, False]):
            manager.begin("s", "p/a", tick).kv("kv").append(blocks(4 * tick), imagined)
            manager.commit("s", tick, ["p/a"])
        view = manager.begin("s", "p/a", 3)
        view.kv("kv").truncate(8)
        assert view.kv("kv").drop_imagined() == 4
        assert tokens(view) == list(range(4))

    @pytest.mark.parametrize("n", [1, 2, 3, 6])
    def test_only_whole_blocks_of_the_right_shape_are_taken(self, manager: Manager, n: int) -> None:
        view = manager.begin("s", "p/a", 1)
        before = facts(view)
        for wrong in ((2, 2, n, 2, 3), (2, 2, 4, 2), (1, 2, 4, 2, 3), (2, 2, 0, 2, 3), (2, 2, 4, 2, 4)):
            with pytest.raises(TensorError):
                view.kv("kv").append(np.zeros(wrong, np.float32))
        assert facts(view) == before

    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
    def test_values_that_are_not_finite_never_become_state(self, manager: Manager, bad: float) -> None:
        view = manager.begin("s", "p/a", 1)
        before = facts(view)
        poisoned = blocks(1)
        poisoned[1, 1, 3, 1, 2] = bad
        writes: tuple[Callable[[], None], ...] = (
            lambda: view.kv("kv").append(poisoned),
            lambda: view.tensor("mean").set(np.full((2, 3), bad, np.float32)),
            lambda: view.tensor("mean").set(np.full((2, 3), 1e300)),  # overflows when cast
            lambda: view.ring("recent").push(np.array([0, bad], np.float32)),
        )
        for write in writes:
            with pytest.raises(OmniLoopError, match="finite"):
                write()
        assert facts(view) == before

    def test_wrong_shapes_dtypes_and_names_are_refused_by_name(self, manager: Manager) -> None:
        view = manager.begin("s", "p/a", 1)
        with pytest.raises(TensorError, match="mean"):
            view.tensor("mean").set(np.zeros((3, 2), np.float32))
        with pytest.raises(TensorError, match="recent"):
            view.ring("recent").push(np.zeros(2, np.complex64))
        with pytest.raises(InvalidInput, match="ticks"):
            view.counter("ticks").set(1.5)  # type: ignore[arg-type]
        with pytest.raises(UnknownName, match="recent"):
            view.ring("recnt")
        with pytest.raises(UnknownName, match="mean"):
            view.ring("mean")

    def test_what_was_set_is_a_copy(self, manager: Manager) -> None:
        view = manager.begin("s", "p/a", 1)
        mean, item, kv = np.zeros((2, 3), np.float32), np.zeros(2, np.float32), blocks(0)
        view.tensor("mean").set(mean)
        view.ring("recent").push(item)
        view.kv("kv").append(kv)
        before = facts(view)
        for array in (mean, item, kv):
            array += 1
        assert facts(view) == before

    def test_a_ring_keeps_the_last_items(self, manager: Manager) -> None:
        for tick in range(5):
            manager.begin("s", "p/a", tick).ring("recent").push(np.full(2, tick, np.float32))
            manager.commit("s", tick, ["p/a"])
        ring = manager.begin("s", "p/a", 5).ring("recent")
        assert [float(np.asarray(x)[0]) for x in ring.items()] == [2, 3, 4]

    def test_a_kept_view_cannot_write_after_its_stage_ran(self, manager: Manager) -> None:
        view = manager.begin("s", "p/a", 1)
        write_all(view, 8)
        manager.seal("s", "p/a")
        before = facts(view)
        writes: tuple[Callable[[], None], ...] = (
            lambda: view.kv("kv").append(blocks(1)),
            lambda: view.kv("kv").truncate(0),
            lambda: view.tensor("mean").set(np.zeros((2, 3))),
            lambda: view.ring("recent").clear(),
            lambda: view.counter("ticks").set(0),
        )
        for write in writes:
            with pytest.raises(StateError):
                write()
        assert facts(view) == before
        manager.commit("s", 1, ["p/a"])

    def test_one_tick_stages_no_more_than_declared(self, manager: Manager) -> None:
        view = manager.begin("s", "p/a", 1)
        view.kv("kv").append(blocks(0, 2))
        before = facts(view)
        with pytest.raises(Exhausted) as caught:
            view.kv("kv").append(blocks(8))
        assert not caught.value.retryable
        assert facts(view) == before

    def test_sessions_are_apart(self, manager: Manager) -> None:
        manager.open("t")
        write_all(manager.begin("s", "p/a", 1), 8)
        write_all(manager.begin("t", "p/a", 1), 16)
        manager.commit("s", 1, ["p/a"])
        manager.discard("t", 1, ["p/a"])
        manager.close("t")
        assert tokens(manager.begin("s", "p/a", 2)) == [8, 9, 10, 11]
        manager.check()

    def test_reset_is_as_freshly_opened(self, manager: Manager) -> None:
        fresh = facts(manager.begin("s", "p/a", 0))
        write_all(manager.begin("s", "p/a", 0), 8)
        manager.commit("s", 0, ["p/a"])
        write_all(manager.begin("s", "p/a", 1), 12)  # undecided
        manager.reset("s")
        assert facts(manager.begin("s", "p/a", 7)) == fresh
        manager.check()

    def test_close_frees_what_is_committed_and_staged(self) -> None:
        manager = self.make(max_sessions=1)
        for round_ in range(20):
            manager.open("s")
            for tick in range(6):
                write_all(manager.begin("s", "p/a", tick), tick)
                if tick < 5:
                    manager.commit("s", tick, ["p/a"])
            manager.close("s")
            manager.check()
            with pytest.raises(UnknownSession):
                manager.begin("s", "p/a", round_)

    def test_exhaustion_half_allocates_nothing_and_passes(self) -> None:
        manager = self.make(max_sessions=1)
        opened: list[str] = []
        with pytest.raises(Exhausted) as caught:
            fill(manager, opened)
        assert caught.value.retryable
        assert len(opened) > 1
        manager.check()
        assert tokens(manager.begin("s0", "p/a", 4)) == [*range(4), *range(1, 5), *range(2, 6), *range(3, 7)]
        for session in opened:
            manager.close(session)
        manager.open("again")
        manager.begin("again", "p/a", 0).kv("kv").append(blocks(0))
        manager.check()

    def test_unknown_and_doubled_names_are_refused(self, manager: Manager) -> None:
        with pytest.raises(StateError):
            manager.open("s")
        with pytest.raises(UnknownName, match="p/a"):
            manager.open("t", ["p/aa"])
        with pytest.raises(UnknownSession):
            manager.begin("t", "p/a", 1)  # refused means: not opened in part
        manager.open("t", ["p/a"])
        with pytest.raises(UnknownName):
            manager.begin("t", "p/b", 1)
        for call in (manager.close, manager.reset):
            with pytest.raises(UnknownSession):
                call("nobody")


def fill(manager: Manager, opened: list[str]) -> None:
    """Open sessions and fill their windows until the manager refuses."""
    while True:
        session = f"s{len(opened)}"
        manager.open(session)
        opened.append(session)
        for tick in range(4):
            view = manager.begin(session, "p/a", tick)
            before = tokens(view)
            try:
                view.kv("kv").append(blocks(tick))
            except Exhausted:
                assert tokens(view) == before
                raise
            manager.commit(session, tick, ["p/a"])
