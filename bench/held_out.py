"""Demonstrations no model was trained on, found or made."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from omni_loop.errors import ConfigError
from omni_loop.training.demos import Demos
from omni_loop_envs.pusht.demos import PUSHT_DEMOS, PushTDemos, Split

from .rows import Settings

_DATA = Path("data/pusht")  # where `omni-loop train` keeps them
_SMALL = {"expert": 20, "perturbed": 20, "random": 20, "poses": 4}
_QUICK = {"expert": 1, "perturbed": 1, "random": 1, "poses": 1}


def held_out(settings: Settings) -> Demos:
    """The test split of ``settings.data`` or of ``data/pusht``; else a small one of the same seeds, made once by
    the experts and kept in the user's cache folder.

    Raises:
        ConfigError: ``settings.data`` has no test split, or what is there holds seeds of the training split.
    """
    folder = (settings.data or _DATA) / "test"
    if settings.data is None and not folder.exists():
        folder = small(PUSHT_DEMOS, _QUICK if settings.quick else _SMALL, settings.say)
    try:
        demos = Demos(folder, PUSHT_DEMOS.kinds)
    except FileNotFoundError as e:
        raise ConfigError(f"{e}; give --data a folder with a split 'test'") from None
    if seen := PUSHT_DEMOS.split("train").seeds() & set(map(int, demos.column("seed"))):
        raise ConfigError(f"{folder}: seed {min(seen)} is one of training: nothing is held out")
    return demos


def small(demos: PushTDemos, counts: dict[str, int], say: Callable[[str], None]) -> Path:
    """The first ``counts`` episodes per kind of the test split, all framed, in the cache folder."""
    first = demos.split("test").first_seed
    name = f"{demos.name}-held-out-{first}-{'-'.join(str(n) for n in counts.values())}"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "omni-loop"
    if (folder := cache / name).exists():
        return folder / "test"
    # Made beside and renamed when complete: an interrupted run leaves no half of a set behind.
    partial = cache / f".{name}.{os.getpid()}.partial"
    try:
        subset = replace(demos, splits={"test": Split(counts, counts, first)})
        subset.generate(partial, progress=lambda split, made, total: say(f"held-out episode {made} of {total}"))
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder / "test"
