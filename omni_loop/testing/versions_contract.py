"""The second half of the state contract: forks, branches, shared prefixes, versions to go back to, transfer, eviction.

Derive from :class:`VersionsContract` and say how to make a manager of :data:`~.state_contract.STAGES`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import numpy as np
import pytest

from ..errors import Exhausted, InvalidInput, OmniLoopError, Reason, SnapshotError, StateError, UnknownName
from .state_contract import EVERY, Manager, blocks, facts, fill, tokens, write_all


class VersionedManager(Manager, Protocol):
    """See :class:`omni_loop.runner.state.StateManager`."""

    def commit(
        self,
        session: str,
        tick: int,
        stages: Iterable[str],
        epoch: int = 0,
        recomputable: bool = False,
        cost_ms: float = 0.0,
    ) -> None: ...
    def reset(self, session: str, epoch: int = 0) -> None: ...
    def fork(self, session: str, child: str) -> None: ...
    def rewind(self, session: str, to_epoch: int, to_tick: int) -> None: ...
    def versions(self, session: str) -> tuple[tuple[int, int], ...]: ...
    def export(self, session: str) -> Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]]: ...
    def import_(self, session: str, stages: Mapping[str, Any], epoch: int = 0) -> None: ...
    def evict(self, session: str) -> int: ...
    def pin(self, session: str) -> None: ...
    def unpin(self, session: str) -> None: ...


def tick(manager: Manager, session: str, n: int, value: float | None = None) -> None:
    """A committed tick of ``p/a`` that writes ``value``, or its own number."""
    write_all(manager.begin(session, "p/a", n), n if value is None else value)
    manager.commit(session, n, ["p/a"])


def seen(manager: Manager, session: str) -> tuple[Any, ...]:
    """What ``p/a`` sees now, between ticks."""
    found = facts(manager.begin(session, "p/a", 9999))
    manager.discard(session, 9999, ["p/a"])
    return found


class VersionsContract:
    def make(self, max_sessions: int = 4) -> VersionedManager:
        """A manager with room for ``max_sessions``, which keeps 4 versions."""
        raise NotImplementedError

    @pytest.fixture
    def manager(self) -> VersionedManager:
        manager = self.make()
        manager.open("s")
        return manager

    def test_a_fork_is_the_same_and_then_apart(self, manager: VersionedManager) -> None:
        for n in range(5):
            tick(manager, "s", n)
        manager.fork("s", "f")
        before = seen(manager, "s")
        assert seen(manager, "f") == before
        tick(manager, "f", 5, 50)
        assert seen(manager, "s") == before
        tick(manager, "s", 5, 60)
        assert seen(manager, "f")[-1] == 50
        assert seen(manager, "s")[-1] == 60
        manager.close("s")
        assert seen(manager, "f")[-1] == 50
        manager.check()

    def test_forks_of_forks_and_the_same_continuation(self, manager: VersionedManager) -> None:
        for n in range(3):
            tick(manager, "s", n)
        manager.fork("s", "f")
        manager.fork("f", "g")
        for session in ("s", "f", "g"):
            for n in range(3, 7):
                tick(manager, session, n)
        assert seen(manager, "s") == seen(manager, "f") == seen(manager, "g")

    def test_a_fork_needs_a_decided_tick_and_a_new_name(self, manager: VersionedManager) -> None:
        write_all(manager.begin("s", "p/a", 1), 1)
        with pytest.raises(StateError) as caught:
            manager.fork("s", "f")
        assert caught.value.reason is Reason.BUSY
        manager.discard("s", 1, ["p/a"])
        with pytest.raises(StateError):
            manager.fork("s", "s")
        manager.fork("s", "f")

    def test_rewind_brings_everything_back(self, manager: VersionedManager) -> None:
        was = {-1: seen(manager, "s")}
        for n in range(4):
            tick(manager, "s", n)
            was[n] = seen(manager, "s")
        assert manager.versions("s") == ((0, -1), (0, 0), (0, 1), (0, 2), (0, 3))
        for n in (2, 2, 1, -1):
            manager.rewind("s", 0, n)
            assert seen(manager, "s") == was[n]
            manager.check()
        tick(manager, "s", 8)
        assert manager.versions("s") == ((0, -1), (0, 8))

    def test_what_is_too_far_back_is_refused_and_changes_nothing(self, manager: VersionedManager) -> None:
        for n in range(9):
            tick(manager, "s", n)
        before, known = seen(manager, "s"), manager.versions("s")
        assert known == ((0, 4), (0, 5), (0, 6), (0, 7), (0, 8))
        with pytest.raises(StateError, match="4 of epoch 0") as caught:
            manager.rewind("s", 0, 3)
        assert caught.value.reason is Reason.BAD_REQUEST
        assert (seen(manager, "s"), manager.versions("s")) == (before, known)

    def test_rewind_discards_what_is_staged(self, manager: VersionedManager) -> None:
        tick(manager, "s", 0)
        before = seen(manager, "s")
        write_all(manager.begin("s", "p/a", 1), 9)
        manager.rewind("s", 0, 0)
        assert seen(manager, "s") == before

    def test_stages_go_back_to_their_own_last_version(self, manager: VersionedManager) -> None:
        for n in range(4):
            view = manager.begin("s", "p/b", n)
            if n % 2 == 0:
                view.counter("ticks").set(n)
            write_all(manager.begin("s", "p/a", n), n)
            manager.commit("s", n, EVERY)
        manager.rewind("s", 0, 1)
        assert seen(manager, "s")[-1] == 1
        assert manager.begin("s", "p/b", 9).counter("ticks").get() == 0

    def test_the_second_commit_of_a_tick_is_the_same_version(self, manager: VersionedManager) -> None:
        for n in range(5):
            tick(manager, "s", n)
        write_all(manager.begin("s", "p/a", 4), 40)
        manager.commit("s", 4, ["p/a"])
        write_all(manager.begin("s", "p/a", 4), 41)
        manager.commit("s", 4, ["p/a"])
        assert manager.versions("s") == tuple((0, n) for n in range(5))
        after = seen(manager, "s")
        assert after[-1] == 41
        manager.rewind("s", 0, 4)
        assert seen(manager, "s") == after
        manager.check()
        manager.rewind("s", 0, 3)
        assert seen(manager, "s")[3] == [*range(4), *range(1, 5), *range(2, 6), *range(3, 7)]
        manager.check()

    def test_epochs_order_versions(self, manager: VersionedManager) -> None:
        tick(manager, "s", 0)
        tick(manager, "s", 1)
        manager.rewind("s", 0, 0)
        write_all(manager.begin("s", "p/a", 0), 70)
        manager.commit("s", 0, ["p/a"], epoch=1)
        assert manager.versions("s") == ((0, -1), (0, 0), (1, 0))
        manager.rewind("s", 0, 5)
        assert seen(manager, "s")[-1] == 0
        manager.reset("s", epoch=2)
        assert manager.versions("s") == ((2, -1),)

    def test_exported_state_goes_on_elsewhere_bit_for_bit(self, manager: VersionedManager) -> None:
        for n, imagined in enumerate([False, True, False, True, True]):
            write_all(manager.begin("s", "p/a", n), n, imagined)
            manager.commit("s", n, ["p/a"])
        image = manager.export("s")
        other = self.make()
        other.import_("t", image, epoch=3)
        assert seen(other, "t") == seen(manager, "s")
        assert other.versions("t") == ((3, -1),)
        for one, session in ((manager, "s"), (other, "t")):
            view = one.begin(session, "p/a", 9)
            view.kv("kv").drop_imagined()
            write_all(view, 9)
            one.commit(session, 9, ["p/a"])
        assert seen(other, "t") == seen(manager, "s")
        tick(manager, "s", 10)
        other.import_("u", image)
        assert seen(other, "u") != seen(manager, "s")  # what was exported is a copy
        other.check()

    def test_state_as_opened_can_be_exported(self, manager: VersionedManager) -> None:
        image = manager.export("s")
        manager.import_("t", image)
        assert seen(manager, "t") == seen(manager, "s")
        with pytest.raises(StateError):
            manager.import_("t", image)
        write_all(manager.begin("s", "p/a", 1), 1)
        with pytest.raises(StateError):
            manager.export("s")

    @pytest.mark.parametrize(
        ("where", "name", "value"),
        [
            ("arrays", "kv.blocks", np.zeros((2, 2, 3, 4, 2, 2), np.float32)),
            ("arrays", "kv.blocks", np.zeros((2, 2, 2, 4, 2, 3), np.float32)),  # fewer than the facts say
            ("arrays", "kv.blocks", np.zeros((2, 2, 3, 4, 2, 3), np.float64)),
            ("arrays", "kv.blocks", np.full((2, 2, 3, 4, 2, 3), np.nan, np.float32)),
            ("arrays", "mean", np.zeros((3, 2), np.float32)),
            ("arrays", "mean", np.full((2, 3), np.inf, np.float32)),
            ("arrays", "mean", np.array(["x"])),
            ("arrays", "recent", np.zeros((4, 2), np.float32)),
            ("arrays", "recent", np.zeros((3,), np.float32)),
            ("arrays", "more", np.zeros(1, np.float32)),
            ("arrays", "mean", None),
            ("facts", "kv.sink", 0),
            ("facts", "kv.sink", True),
            ("facts", "kv.window", 1),
            ("facts", "kv.end", -1),
            ("facts", "kv.end", 2),
            ("facts", "kv.end", 3.0),
            ("facts", "kv.observed", "[[0, 9]]"),
            ("facts", "kv.observed", "[[2, 3], [0, 1]]"),
            ("facts", "kv.observed", "[[0]]"),
            ("facts", "kv.observed", '["ab"]'),
            ("facts", "kv.observed", "7"),
            ("facts", "kv.observed", "{"),
            ("facts", "ticks", "3"),
            ("facts", "ticks", None),
            ("facts", "more", 1),
        ],
    )
    def test_what_does_not_fit_is_refused_as_a_whole(
        self, manager: VersionedManager, where: str, name: str, value: Any
    ) -> None:
        for n in range(3):
            tick(manager, "s", n)
        arrays, meta = (dict(part) for part in manager.export("s")["p/a"])
        part = arrays if where == "arrays" else meta
        part[name] = value
        if value is None:
            del part[name]
        with pytest.raises(SnapshotError, match="p/a"):
            manager.import_("t", {**manager.export("s"), "p/a": (arrays, meta)})
        manager.open("t")  # nothing of it is there
        manager.check()

    def test_stages_nobody_has_are_refused(self, manager: VersionedManager) -> None:
        with pytest.raises(UnknownName, match="p/a"):
            manager.import_("t", {"p/aa": ({}, {})})

    def test_an_evicted_session_says_so_until_it_is_reset(self, manager: VersionedManager) -> None:
        for n in range(3):
            tick(manager, "s", n)
        image = manager.export("s")
        assert manager.evict("s") > 0
        tries = (
            lambda: manager.begin("s", "p/a", 3),
            lambda: manager.seal("s", "p/a"),
            lambda: manager.commit("s", 3, ["p/a"]),
            lambda: manager.discard("s", 3, ["p/a"]),
            lambda: manager.fork("s", "f"),
            lambda: manager.rewind("s", 0, 1),
            lambda: manager.versions("s"),
            lambda: manager.export("s"),
            lambda: manager.evict("s"),
            lambda: manager.pin("s"),
        )
        for do in tries:
            with pytest.raises(StateError) as caught:
                do()
            assert caught.value.reason is Reason.EVICTED
        manager.check()
        manager.reset("s", epoch=1)
        assert seen(manager, "s")[0] == 0
        manager.evict("s")
        manager.import_("s", image)
        assert seen(manager, "s")[-1] == 2
        manager.evict("s")
        manager.close("s")
        manager.open("s")
        manager.check()

    def test_what_is_pinned_or_under_way_is_not_evicted(self, manager: VersionedManager) -> None:
        tick(manager, "s", 0)
        manager.pin("s")
        manager.pin("s")
        for _ in range(2):
            with pytest.raises(StateError, match="pinned"):
                manager.evict("s")
            manager.unpin("s")
        with pytest.raises(StateError, match="not pinned"):
            manager.unpin("s")
        manager.begin("s", "p/a", 1)
        with pytest.raises(StateError, match="under way"):
            manager.evict("s")
        manager.discard("s", 1, ["p/a"])
        manager.evict("s")

    def test_versions_make_room_before_anybody_is_refused(self) -> None:
        manager = self.make(max_sessions=1)
        manager.open("s")
        for n in range(8):
            tick(manager, "s", n)
        assert len(manager.versions("s")) > 1
        opened: list[str] = []
        with pytest.raises(Exhausted) as caught:
            fill(manager, opened)
        assert caught.value.missing_bytes > 0
        assert len(manager.versions("s")) == 1
        assert seen(manager, "s")[3] == [*range(4), *range(5, 9), *range(6, 10), *range(7, 11)]
        for session in (*opened, "s"):
            assert len(manager.versions(session)) == 1
            manager.close(session)
        manager.check()

    def test_a_prefix_is_computed_once(self, manager: VersionedManager) -> None:
        calls = []

        def compute() -> Any:
            calls.append(1)
            return blocks(100)

        for session in ("s", "t", "u"):
            if session != "s":
                manager.open(session)
            view = manager.begin(session, "p/a", 1)
            view.kv("kv").prefix(b"key", compute)
            view.kv("kv").append(blocks(8))
            assert tokens(view) == [*range(100, 104), *range(8, 12)]
            if session == "t":
                manager.discard(session, 1, ["p/a"])
            else:
                manager.commit(session, 1, ["p/a"])
            manager.check()
        assert len(calls) == 1
        manager.begin("t", "p/a", 2).kv("kv").prefix(b"other", lambda: blocks(50))
        assert tokens(manager.begin("t", "p/a", 2)) == list(range(50, 54))
        with pytest.raises(StateError, match="empty"):
            manager.begin("t", "p/a", 2).kv("kv").prefix(b"key", compute)

    def test_a_prefix_that_cannot_be_computed_leaves_nothing(self, manager: VersionedManager) -> None:
        def fail() -> Any:
            raise RuntimeError("no model")

        kv = manager.begin("s", "p/a", 1).kv("kv")
        with pytest.raises(RuntimeError):
            kv.prefix(b"key", fail)
        with pytest.raises(OmniLoopError):
            kv.prefix(b"key", lambda: blocks(1) * np.nan)
        assert kv.total == 0
        kv.prefix(b"key", lambda: blocks(1))
        assert kv.total == 4

    def test_branches_diverge_and_leave_no_trace(self, manager: VersionedManager) -> None:
        tick(manager, "s", 0)
        view = manager.begin("s", "p/a", 1)
        view.kv("kv").append(blocks(10))
        base = tokens(view)
        one, two = view.kv("kv").branches(2)
        one.append(blocks(20), imagined=True)
        two.append(blocks(30), imagined=True)
        (three,) = one.branches(1)
        three.append(blocks(40))
        values = [np.asarray(kv.gather())[0, 0, :, 0, 0].tolist() for kv in (one, two, three)]
        assert values == [[*base, *range(20, 24)], [*base, *range(30, 34)], [*base, *range(20, 24), *range(40, 44)]]
        assert tokens(view) == base
        assert (one.total, one.drop_imagined()) == (12, 8)
        two.release()
        two.release()  # of what is gone already: nothing
        with pytest.raises(StateError):
            two.append(blocks(1))
        with pytest.raises(StateError):
            view.kv("kv").release()
        with pytest.raises(InvalidInput):
            view.kv("kv").branches(0)
        manager.check()
        manager.commit("s", 1, ["p/a"])
        with pytest.raises(StateError):
            one.append(blocks(1))
        assert seen(manager, "s")[3] == base
        manager.check()
