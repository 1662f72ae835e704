"""Demonstrations on disk: a folder of ``.npy`` columns, memory-mapped.

Rows of all episodes lie behind each other. ``frames uint8[n_framed, h, w, 3]`` may cover a prefix of the
rows only; the other columns cover all: ``state``, ``points float32[n, p, 2]`` (the scene's points in -1..1),
``action``, ``label`` and ``coverage``. ``action[i]`` leads from row i to
row i + 1 of the same episode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..env import EVALUATION_SEED
from ..errors import ConfigError

_COLUMNS = ("frames", "state", "points", "action", "label", "coverage", "length", "kind", "success", "seed")


class DemoSet(Protocol):
    """What an env registers so that its demonstrations can be made anywhere: splits ``train`` and ``test``."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """Names of the values of the ``kind`` column."""

    def generate(
        self, folder: Path, workers: int = 2, progress: Callable[[str, int, int], None] | None = None
    ) -> Mapping[str, Path]:
        """Write every split to ``folder/<split>``; ``progress`` hears (split, episodes made, of how many)."""

    def load(self, folder: Path) -> Mapping[str, Demos]:
        """The splits in ``folder``, after checking that they share no seeds."""


@dataclass(frozen=True)
class Demos:
    """A dataset of episodes. ``kinds`` names the values of the ``kind`` column."""

    folder: Path
    kinds: tuple[str, ...]

    def __post_init__(self) -> None:
        missing = [c for c in _COLUMNS if not (self.folder / f"{c}.npy").exists()]
        if missing:
            raise FileNotFoundError(f"{self.folder} is no demonstration set: {', '.join(missing)} missing")

    def column(self, name: str) -> NDArray[Any]:
        column: NDArray[Any] = np.load(self.folder / f"{name}.npy", mmap_mode="c" if name == "frames" else None)
        return column

    @cached_property
    def frames(self) -> NDArray[np.uint8]:
        return self.column("frames")

    @cached_property
    def state(self) -> NDArray[np.float32]:
        return self.column("state")

    @cached_property
    def points(self) -> NDArray[np.float32]:
        return self.column("points")

    @cached_property
    def action(self) -> NDArray[np.float32]:
        return self.column("action")

    @cached_property
    def label(self) -> NDArray[np.float32]:
        return self.column("label")

    @cached_property
    def coverage(self) -> NDArray[np.float32]:
        return self.column("coverage")

    @cached_property
    def length(self) -> NDArray[np.int64]:
        return self.column("length")

    @cached_property
    def start(self) -> NDArray[np.int64]:
        """First row of each episode."""
        return np.concatenate([[0], np.cumsum(self.length)[:-1]])

    @cached_property
    def success(self) -> NDArray[np.bool_]:
        return self.column("success")

    def episodes(self, *kinds: str, framed: bool = False, successful: bool = False) -> NDArray[np.int64]:
        """Indices of the episodes of these kinds (all kinds when none is named)."""
        kind = self.column("kind")
        keep = np.isin(kind, [self.kinds.index(k) for k in kinds]) if kinds else np.ones(len(kind), bool)
        if framed:
            keep &= self.start + self.length <= len(self.frames)
        if successful:
            keep &= self.success
        return np.flatnonzero(keep)

    def rows(self, episodes: NDArray[np.int64]) -> NDArray[np.int64]:
        """All rows of these episodes."""
        return np.concatenate([np.arange(self.start[e], self.start[e] + self.length[e]) for e in episodes])


def check_seeds(name: str, splits: Mapping[str, Iterable[int]]) -> None:
    """Refuse a set ``name`` in which a seed stands twice or belongs to evaluation (:class:`ConfigError`)."""
    seen: dict[int, str] = {}
    for split, seeds in splits.items():
        for seed in seeds:
            if seed >= EVALUATION_SEED:
                raise ConfigError(f"{name}/{split}: seed {seed} belongs to evaluation ({EVALUATION_SEED} and up)")
            if seed in seen:
                raise ConfigError(f"{name}: seed {seed} is in both {seen[seed]} and {split}")
            seen[seed] = split


def load_splits(folder: Path, splits: Iterable[str], kinds: tuple[str, ...]) -> dict[str, Demos]:
    """The splits in ``folder``, by name. Raises :class:`ConfigError` when two share a seed or one has evaluation's."""
    loaded = {split: Demos(folder / split, kinds) for split in splits}
    seen: dict[int, str] = {}
    for split, demos in loaded.items():
        for seed in map(int, demos.column("seed")):
            if seen.setdefault(seed, split) != split or seed >= EVALUATION_SEED:
                raise ConfigError(f"{folder.name}/{split}: seed {seed} is also in {seen[seed]} or in evaluation")
    return loaded
