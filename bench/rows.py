"""What a benchmark is: rows measured on one subject, each with a unit and perhaps a bar it must reach."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from omni_loop.errors import MissingExtra, UnknownName, nearest

S = TypeVar("S")

#: Every benchmark; each is the module of this name, imported when it is asked for.
BENCHES = {
    "policy": "success rates on unseen seeds, and what context and history are worth",
    "plan": "what imagining many futures in one call saves, and what choosing among them is worth",
    "world": "quality of the world model on held-out episodes; paged KV against other caches",
    "state": "what batches gain, and what state, forks, long rollouts and idle sessions cost",
    "serve": "what the server adds to the models' forward passes; what it costs when idle",
    "player": "jumps where chunks meet and success under latency, with real-time chunking and without",
    "tick": "whether a tick gets slower over a session of 1,000",
    "context": "progress and done of the context model on held-out episodes",
    "eval": "success of the shipped suites, what an evaluation costs, and whether it can be trusted",
    "adapters": "what others' models, engines and stores, and the edges between stages, cost",
    "recipes": "parts trained anew against the shipped ones (--checkpoints)",
}


@dataclass(frozen=True, slots=True)
class Settings:
    """``checkpoints``: folder with ``codec``, ``world``, ``context``, ``act`` (empty: the shipped ones).
    ``data``: demonstrations with a split ``test`` (None: ``data/pusht``, else a small set is made).
    ``quick``: so few repetitions that figures mean nothing; no row is judged."""

    checkpoints: str = ""
    data: Path | None = None
    quick: bool = False
    say: Callable[[str], None] = lambda text: None


@dataclass(frozen=True, slots=True)
class Bar:
    """``on`` compared with ``limit``. A value that is not finite reaches no bar."""

    on: Literal["ours", "ratio", "ours - baseline", "baseline / ours"]
    sign: Literal["<", "<=", ">", ">="]
    limit: float

    def __str__(self) -> str:
        return f"{self.on} {self.sign} {self.limit:g}"

    def judged(self, value: Measured) -> float | None:
        """What is compared; None where it is no number."""
        given = {
            "ours": value.ours,
            "ratio": value.ratio,
            "ours - baseline": value.gain,
            "baseline / ours": value.speedup,
        }[self.on]
        return None if given is None or not math.isfinite(given) else given

    def reached(self, value: Measured) -> bool:
        given = self.judged(value)
        if given is None:
            return False
        return {
            "<": given < self.limit,
            "<=": given <= self.limit,
            ">": given > self.limit,
            ">=": given >= self.limit,
        }[self.sign]


@dataclass(frozen=True, slots=True)
class Measured:
    """A figure and what it is held against, in the row's unit."""

    ours: float
    baseline: float | None = None

    @property
    def ratio(self) -> float | None:
        return self.ours / self.baseline if self.baseline else None

    @property
    def speedup(self) -> float | None:
        return self.baseline / self.ours if self.ours and self.baseline is not None else None

    @property
    def gain(self) -> float | None:
        return None if self.baseline is None else self.ours - self.baseline


@dataclass(frozen=True, slots=True)
class Row(Generic[S]):
    """One figure: a function of the bench's subject, registered by its name."""

    name: str
    group: str
    unit: str
    bar: Bar | None
    what: str
    measure: Callable[[S], Measured]


@dataclass(frozen=True, slots=True)
class Result:
    """A measured row. ``passed`` is None where there is no bar, or none was judged."""

    row: Row[Any]
    value: Measured
    passed: bool | None

    def as_json(self) -> dict[str, Any]:
        """``{row, ours, baseline, unit, ratio, bar, pass}``; what is not finite is null, and so is a ratio of dB."""
        ratio = None if self.row.unit == "dB" else self.value.ratio
        return {
            "row": self.row.name,
            "ours": _finite(self.value.ours),
            "baseline": _finite(self.value.baseline),
            "unit": self.row.unit,
            "ratio": _finite(ratio),
            "bar": None if self.row.bar is None else str(self.row.bar),
            "pass": self.passed,
        }


@dataclass
class Bench(Generic[S]):
    """Rows that share a subject: models, a server, a session. ``picture`` draws the subject and what was measured,
    where that says more than figures do."""

    name: str
    subject: Callable[[Settings], AbstractContextManager[S]]
    rows: dict[str, Row[S]] = field(default_factory=dict)
    picture: Callable[[S, Sequence[Result], Path], None] | None = None

    def row(
        self, unit: str, bar: Bar | None = None, group: str = ""
    ) -> Callable[[Callable[[S], Measured]], Callable[[S], Measured]]:
        """Register the function as a row; the first sentence of its docstring says what is measured."""

        def register(measure: Callable[[S], Measured]) -> Callable[[S], Measured]:
            name = measure.__name__
            what = " ".join((measure.__doc__ or "").split())
            self.rows[name] = Row(name, group or self.name, unit, bar, what, measure)
            return measure

        return register

    def select(self, wanted: Sequence[str]) -> list[Row[S]]:
        """Rows by their names or groups, each once, in the bench's order; none named: all.

        Raises:
            UnknownName: no such row or group; the text names the nearest.
        """
        known = {*self.rows, *(row.group for row in self.rows.values())}
        for name in wanted:
            if name not in known:
                raise UnknownName(f"bench {self.name!r} has no row {name!r}.{nearest(name, known)}")
        return [row for row in self.rows.values() if not wanted or row.name in wanted or row.group in wanted]

    def run(
        self,
        wanted: Sequence[str] = (),
        settings: Settings = Settings(),
        picture: Path | None = None,
        on_result: Callable[[Result], None] | None = None,
    ) -> list[Result]:
        """Measure the rows ``wanted``; ``on_result`` hears of each as it is done. When all are measured, those that
        need an extra that is not installed are no numbers; asked for by name they raise MissingExtra."""
        chosen, results = self.select(wanted), []
        with self.subject(settings) as subject:
            for row in chosen:
                settings.say(row.what)
                judged = row.bar is not None and not settings.quick
                try:
                    value = row.measure(subject)
                except MissingExtra:
                    if wanted:
                        raise
                    value, judged = Measured(math.nan), False  # not run here, as a table and JSON show it
                result = Result(row, value, row.bar.reached(value) if row.bar is not None and judged else None)
                results.append(result)
                if on_result is not None:
                    on_result(result)
            if picture is not None and self.picture is not None:
                settings.say("drawing")
                self.picture(subject, results, picture)
        return results


def find(name: str) -> Bench[Any]:
    """The benchmark of this name.

    Raises:
        UnknownName: there is none; the text names the nearest.
    """
    if name not in BENCHES:
        raise UnknownName(f"no bench is called {name!r}.{nearest(name, BENCHES)}")
    bench: Bench[Any] = import_module(f".{name}", __package__).BENCH
    return bench


def write(path: Path, results: Sequence[Result]) -> None:
    """The rows as a JSON list."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([result.as_json() for result in results], indent=1, allow_nan=False) + "\n")


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")
