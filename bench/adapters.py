"""``omni-loop bench adapters``: what models, engines and stores of others, and the edges between stages, cost.

Each part is a module of its own with a ``BENCH``, a :class:`~.rows.Bench` called like the part; here their rows stand
together, each under its part as group. A part's subject is made when the first of its rows is measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from .rows import Bench, Measured, Row, Settings

PARTS = ("edges", "imagined", "lerobot", "record", "vllm")  # modules adapters_<part>; one that is not there has no rows


class Adapters:
    """The subjects of the parts that were asked for."""

    def __init__(self, settings: Settings, stack: ExitStack) -> None:
        self._settings, self._stack = settings, stack
        self._subjects: dict[str, Any] = {}

    def measure(self, bench: Bench[Any], row: Row[Any]) -> Measured:
        if bench.name not in self._subjects:
            self._subjects[bench.name] = self._stack.enter_context(bench.subject(self._settings))
        return row.measure(self._subjects[bench.name])


@contextmanager
def _subject(settings: Settings) -> Iterator[Adapters]:
    with ExitStack() as stack:
        yield Adapters(settings, stack)


def _measure(bench: Bench[Any], row: Row[Any], adapters: Adapters) -> Measured:
    return adapters.measure(bench, row)


BENCH: Bench[Adapters] = Bench("adapters", _subject)

for _part in PARTS:
    if find_spec(f".adapters_{_part}", __package__) is None:
        continue
    _bench: Bench[Any] = import_module(f".adapters_{_part}", __package__).BENCH
    for _row in _bench.rows.values():
        if _row.name in BENCH.rows:
            raise ValueError(f"two parts of bench adapters have a row {_row.name!r}")
        BENCH.rows[_row.name] = replace(_row, group=_row.group or _part, measure=partial(_measure, _bench, _row))
