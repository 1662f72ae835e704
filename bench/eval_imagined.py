"""Whether what is imagined foretells what happens: ``omni-loop eval twin`` over PushT's shipped policies."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from omni_loop.errors import EnvFailed

from .eval_runs import MAIN, spend
from .rows import Bar, Bench, Measured, Settings

_QUICK = ("--policies", "hold,random", "--runs", "2", "--episodes", "2", "--imagined-episodes", "0")


class Twin:
    """One experiment, run when the first row asks for it."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self._settings, self._folder = settings, folder

    @cached_property
    def agreement(self) -> dict[str, dict[str, Any]]:
        """``twin.json``'s: by what is held against what.

        Raises:
            EnvFailed: the command did not finish; the text ends with what it said.
        """
        self._settings.say("omni-loop eval twin pusht: an hour of CPU")
        quick = _QUICK if self._settings.quick else ()
        spent = spend([sys.executable, "-c", MAIN, "eval", "twin", "pusht", "--out", str(self._folder), *quick])
        if spent.code:
            raise EnvFailed(f"omni-loop eval twin ended with {spent.code}:\n{spent.said}")
        found: dict[str, dict[str, Any]] = json.loads((self._folder / "twin.json").read_text())["agreement"]
        return found

    def figure(self, pair: str, name: str) -> Measured:
        """NaN where there is none: too few policies, or all of them alike."""
        value = self.agreement.get(pair, {}).get(name)
        return Measured(math.nan if value is None else float(value))


@contextmanager
def _subject(settings: Settings) -> Iterator[Twin]:
    with TemporaryDirectory() as folder:
        yield Twin(settings, Path(folder))


BENCH: Bench[Twin] = Bench("imagined", _subject)


@BENCH.row("r", Bar("ours", ">=", 0.8))
def imagined_pearson(twin: Twin) -> Measured:
    """Correlation of PushT's policies: what they reach in the world model from branches, with real success."""
    return twin.figure("success", "r")


@BENCH.row("success")
def imagined_mmrv(twin: Twin) -> Measured:
    """Mean maximum rank violation: by how much success one errs who trusts the order that imagination gives."""
    return twin.figure("success", "mmrv")
