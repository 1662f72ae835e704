"""The reliability board: rows by name, each a test with a number, run by one command.

A row is a function of a seed and of whether it is the whole row or the scaled one that CI runs. It returns what it
measured, or raises :class:`Broken`. A row that is not built, or not asked for, did not run, and never passes.
"""

from __future__ import annotations

import importlib
import json
import secrets
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from ..errors import UnknownName, nearest

Scale = Literal["ci", "full"]
Measure = Callable[[int, bool], float]
CI_SEEDS, FULL_SEEDS = 3, 50


class Broken(Exception):
    """A row does not hold; the text says what was found."""


class NotRun(Exception):
    """What a row needs is not on this machine; the text says what. It did not run."""


def expect(true: bool, otherwise: str) -> None:
    """Raise :class:`Broken` unless ``true``. Not an assert: a board holds under ``python -O`` too."""
    if not true:
        raise Broken(otherwise)


@dataclass(frozen=True, slots=True)
class Row:
    """``measure`` is ``module:function``, imported when the row runs; empty: not built. ``repeats``: it is run with
    several seeds, and its number is the sum; else once. ``below``: what the number must stay under."""

    name: str
    title: str
    unit: str = ""
    measure: str = ""
    repeats: bool = False
    below: float | None = None

    def load(self) -> Measure:
        module, _, function = self.measure.partition(":")
        found: Measure = getattr(importlib.import_module(f"{__package__}.rows.{module}"), function)
        return found


@dataclass(frozen=True, slots=True)
class Line:
    """One row's outcome. ``seed``: the first that was run, or the one that failed. ``number`` None: there is none.
    ``passed`` None: it did not run."""

    row: str
    seed: int
    scale: Scale
    commit: str
    number: float | None
    unit: str
    passed: bool | None
    why: str = ""
    seconds: float = 0.0

    def json(self) -> str:
        """``{row, seed, number, pass, ...}``; ``pass`` is true, false, or null for a row that did not run."""
        values: dict[str, object] = {"row": self.row, "seed": self.seed, "number": self.number, "pass": self.passed}
        values |= {"unit": self.unit, "scale": self.scale, "commit": self.commit}
        if self.passed is not None:
            values["seconds"] = self.seconds
        if self.why:
            values["why"] = self.why
        return json.dumps(values)


ROWS: tuple[Row, ...] = (
    Row("L1", "64 live sessions at 5 Hz", "ms p99", "load:live"),
    Row("L2", "512 sessions at 1 Hz, and one too many", "ms p99", "load:wide"),
    Row("L3", "8 sessions for 24 simulated hours", "MB per simulated hour", "long:measure", below=1.0),
    Row("L4", "10,000 sessions opened and left", "sessions opened", "churn:measure"),
    Row("L5", "a session that floods", "times the p99 of others", "load:fair"),
    Row("F1", "the connection is cut at every message", "cuts survived", "streams:cuts", repeats=True),
    Row("F2", "two clients claim one session", "streams fenced", "streams:claims", repeats=True),
    Row("F3", "a stage is killed"),
    Row("F4", "a stage hangs"),
    Row("F5", "consumers that are slow or stopped", "times the p99 of others", "consumers:consumers"),
    Row("F6", "out of KV blocks", "refusals and evictions survived", "room:measure", repeats=True),
    Row("F7", "model outputs that cannot be", "faults survived", "outputs:measure", repeats=True),
    Row("F8", "observations doubled, late, reordered, stale or missing", "requests", "seqs:measure", repeats=True),
    Row("F9", "the wall clock jumps", "jumps", "wall_clock:measure", repeats=True),
    Row("F10", "the disk is full while recording", "ticks served meanwhile", "recording:measure", repeats=True),
    Row("F11", "a snapshot is corrupt", "corruptions found", "snapshots:measure", repeats=True),
    Row("F12", "SIGTERM under load", "sessions gone on with", "outlive:stopped"),
    Row("F13", "the server is killed", "sessions gone on with", "outlive:killed"),
    Row("F14", "TCP delays, cuts, silence and flips", "faults survived", "network:measure", repeats=True),
    Row("B1", "codec fuzz", "inputs", "codec_fuzz:measure"),
    Row("B2", "valid messages on a live server", "messages", "valid_fuzz:measure"),
    Row("B3", "named bad inputs", "cases refused", "named:measure"),
    Row("B4", "raw HTTP/2 garbage", "connections", "garbage:measure"),
    Row("B5", "bad configuration", "refusals and answers", "config:measure"),
    Row("S1", "TLS", "connections, files and binds refused", "tls:measure"),
    Row("S2", "every call needs a token", "calls refused", "tokens:measure"),
    Row("S3", "no code from data", "inputs", "no_code:measure"),
    Row("S4", "names stay inside their root", "names refused", "names:measure"),
    Row("S5", "bombs", "bombs", "bombs:measure"),
    Row("S6", "exhaustion", "takings refused", "exhaustion:measure"),
    Row("S7", "nothing leaks out", "answers and lines read", "leaks:measure"),
    Row(
        "S8",
        "supply; pip-audit at full scale, where the index knows vulnerabilities",
        "findings, pins and licences",
        "supply:measure",
    ),
)


def chosen(names: Iterable[str]) -> tuple[str, ...]:
    """``names`` of rows, each known; none: all. UnknownName otherwise."""
    known = [row.name for row in ROWS]
    wanted = tuple(dict.fromkeys(name.strip().upper() for name in names if name.strip()))
    for name in wanted:
        if name not in known:
            raise UnknownName(f"the board has no row {name!r}.{nearest(name, known)}")
    return wanted or tuple(known)


def run(names: Sequence[str] = (), seed: int | None = None, scale: Scale = "ci") -> Iterator[Line]:
    """A line for every row of the board, in order; rows not named are not run. ``seed`` None: one is drawn."""
    wanted = set(chosen(names))
    first = secrets.randbelow(1 << 31) if seed is None else seed
    at = commit()
    for row in ROWS:
        if row.name in wanted and row.measure:
            yield run_row(row, first, scale, at)
        else:
            why = "" if row.measure else "not built"
            yield Line(row.name, first, scale, at, None, row.unit, None, why)


def run_row(row: Row, seed: int, scale: Scale = "ci", at: str = "") -> Line:
    """Run one row that is built, with ``seed`` and those after it. Whatever it raises is a failure."""
    full = scale == "full"
    count = (FULL_SEEDS if full else CI_SEEDS) if row.repeats else 1
    number, now, began = 0.0, seed, time.monotonic()
    passed, why = True, ""
    try:
        measure = row.load()
        for now in range(seed, seed + count):
            number += measure(now, full)
        now = seed
        if row.below is not None:
            expect(number < row.below, f"{number:g} {row.unit}, expected less than {row.below:g}")
    except NotRun as e:
        return Line(row.name, seed, scale, at, None, row.unit, None, str(e))
    except Exception as e:  # the board goes on, and says what it met
        passed, why = False, str(e) if isinstance(e, Broken) else f"{type(e).__name__}: {e}"
    return Line(row.name, now, scale, at, number, row.unit, passed, why, round(time.monotonic() - began, 1))


def held(name: str) -> float:
    """The number of row ``name`` as CI runs it, with a seed drawn now. AssertionError when it does not hold, with the
    line, whose seed finds the failure again."""
    line = run_row(row_named(name), secrets.randbelow(1 << 31))
    print(line.json())
    if not line.passed or line.number is None:
        raise AssertionError(line.json())
    return line.number


def row_named(name: str) -> Row:
    """Raises UnknownName."""
    (known,) = chosen([name])
    return next(row for row in ROWS if row.name == known)


def commit() -> str:
    """The commit this code is of, "-dirty" when it was changed since; outside of a repository its version."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude", "*"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        done = None
    if done is None or done.returncode:
        return metadata.version("omni-loop")
    return done.stdout.strip()
