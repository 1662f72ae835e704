"""One session's state in one stage: what is staged, what is committed, and the versions before it.

A version costs no copy: it names the committed values it saw, and keeps what later commits dropped of them. Each
element (block, tensor) is kept by the newest version that needs it, so that it is given back when that one goes::

    versions   (0, 4)        (0, 5)        committed (0, 6)
    blocks     a b c         b c d         c d e
    dropped       a             b
"""

from __future__ import annotations

import itertools
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from ..errors import UnknownName, nearest
from .books import PoolCorrupt
from .cells import Cell, CounterCell, RingCell, Scope, TensorCell
from .kv_cell import KVCell

T = TypeVar("T")
Key = tuple[int, int]  # (epoch, tick) of the commit; (epoch, -1) as opened or reset
_serials = itertools.count()


class Version:
    """What was committed under ``key``, until the next commit: one value per cell, and per cell what that commit (or
    several under its key) dropped of it. ``serial`` orders versions of all sessions by age."""

    __slots__ = ("dropped", "key", "serial", "values")

    def __init__(self, key: Key, values: tuple[Any, ...]) -> None:
        self.key, self.values = key, values
        self.serial = next(_serials)
        self.dropped: dict[Cell, list[Sequence[Any]]] = {}


class Chronicle:
    """Versions of one stage of all sessions, the one that was replaced first first: it is the first to make room."""

    __slots__ = ("_states", "keep")

    def __init__(self, keep: int) -> None:
        self.keep = keep  # versions per session besides the committed one
        self._states: OrderedDict[Version, StageState] = OrderedDict()

    def __len__(self) -> int:
        return len(self._states)

    @property
    def oldest(self) -> int:
        """Serial of the oldest version, of which there must be one."""
        return next(iter(self._states)).serial

    def add(self, version: Version, state: StageState) -> None:
        self._states[version] = state

    def remove(self, version: Version) -> None:
        del self._states[version]

    def drop_oldest(self) -> None:
        next(iter(self._states.values())).forget_oldest()


class StageState:
    """The :class:`~omni_loop.stage.StateView` a stage is given, and what its manager does with it."""

    __slots__ = ("_cells", "_chronicle", "_names", "key", "scope", "stage", "tick", "versions")

    def __init__(self, stage: str, cells: Mapping[str, Cell], scope: Scope, chronicle: Chronicle, key: Key) -> None:
        self.stage, self.scope, self.key = stage, scope, key
        self._names = cells
        self._cells = tuple(cells.values())
        self._chronicle = chronicle
        self.tick: int | None = None  # of the transaction that is not decided yet
        self.versions: deque[Version] = deque()

    @property
    def cells(self) -> Mapping[str, Cell]:
        return self._names

    def kv(self, name: str) -> KVCell:
        return self._cell(name, KVCell, "paged KV")

    def tensor(self, name: str) -> TensorCell:
        return self._cell(name, TensorCell, "tensor")

    def ring(self, name: str) -> RingCell:
        return self._cell(name, RingCell, "ring")

    def counter(self, name: str) -> CounterCell:
        return self._cell(name, CounterCell, "counter")

    def commit(self, key: Key) -> None:
        """Make permanent what the tick staged, as version ``key``: a second commit under one key is one version.
        Cannot fail."""
        scope, versions = self.scope, self.versions
        scope.open, self.tick = False, None
        if not scope.written:
            return
        anew = key != self.key
        version = versions[-1] if versions else None
        if anew and (keep := self._chronicle.keep):
            version = Version(self.key, tuple([cell.value for cell in self._cells]))
        for cell in scope.written:
            if not (dropped := cell.commit()):
                continue
            if version is None:
                cell.drop(dropped)
            elif anew:
                cell.keep(dropped)
                version.dropped[cell] = [dropped]
            else:
                self._drop_again(cell, dropped, version)
        scope.written.clear()
        self.key = key
        if anew and version is not None:
            versions.append(version)
            self._chronicle.add(version, self)
            if len(versions) > keep:
                self.forget_oldest()

    def discard(self) -> None:
        """Leave no trace of the tick."""
        self.scope.open, self.tick = False, None
        for cell in self.scope.written:
            cell.discard()
        self.scope.written.clear()

    def reachable(self, key: Key) -> bool:
        """Whether the state as of ``key`` is still known."""
        return not self._cells or (self.versions[0].key if self.versions else self.key) <= key

    def known(self) -> list[Key]:
        """Of all versions, the oldest first."""
        return [*(version.key for version in self.versions), self.key]

    def rewind(self, key: Key) -> None:
        """Between ticks: go back to the last version not after ``key``, which is reachable, and forget later ones."""
        undone: list[Version] = []
        while self.key > key and self.versions:
            version = self.versions.pop()
            self._chronicle.remove(version)
            self.key = version.key
            undone.append(version)
        if not undone:
            return
        for cell, value in zip(self._cells, undone[-1].values, strict=True):
            cell.rewind(value, [dropped for version in undone for dropped in version.dropped.get(cell, ())])

    def forget_oldest(self) -> None:
        """Give up the oldest version."""
        version = self.versions.popleft()
        self._chronicle.remove(version)
        for cell, lists in version.dropped.items():
            for dropped in lists:
                cell.forget(dropped)

    def forget_versions(self) -> None:
        while self.versions:
            self.forget_oldest()

    def copy_to(self, child: StageState) -> None:
        """What is committed, by reference; not the versions before it."""
        child.key = self.key
        for cell, other in zip(self._cells, child._cells, strict=True):
            cell.copy_to(other)

    def reset(self, key: Key) -> None:
        self.discard()
        self.forget_versions()
        self.key = key
        for cell in self._cells:
            cell.reset()

    def free(self) -> None:
        self.discard()
        self.forget_versions()
        for cell in self._cells:
            cell.free()

    def check(self) -> None:
        """Verify that every version's blocks are held, and that what is kept is what versions dropped.

        Raises:
            PoolCorrupt: they are not.
        """
        for i, cell in enumerate(self._cells):
            if not isinstance(cell, KVCell):
                continue
            dropped = {id(dropped) for version in self.versions for dropped in version.dropped.get(cell, ())}
            if dropped != cell.table.kept.keys():
                raise PoolCorrupt(f"stage {self.stage!r} keeps blocks that no version needs, or forgot some")
            held = set(cell.table.references)
            for version in self.versions:
                if lost := set(version.values[i].blocks) - held:
                    raise PoolCorrupt(f"stage {self.stage!r}: version {version.key} lost its blocks {sorted(lost)}")

    def _drop_again(self, cell: Cell, dropped: Sequence[Any], before: Version) -> None:
        """A second commit under one key dropped elements; some of them the version before may need."""
        value = before.values[self._cells.index(cell)]
        needed = set(map(_identity, cell.elements(value)))
        cell.drop([element for element in dropped if _identity(element) not in needed])
        if kept := [element for element in dropped if _identity(element) in needed]:
            cell.keep(kept)
            before.dropped.setdefault(cell, []).append(kept)

    def _cell(self, name: str, kind: type[T], called: str) -> T:
        cell = self._names.get(name)
        if not isinstance(cell, kind):
            known = [n for n, c in self._names.items() if isinstance(c, kind)]
            raise UnknownName(f"stage {self.stage!r} declared no {called} {name!r}.{nearest(name, known)}")
        return cell


def _identity(element: Any) -> int:
    """Blocks are their numbers; tensors are told apart by identity."""
    return element if isinstance(element, int) else id(element)
