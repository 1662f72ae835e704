"""A benchmark of several parts, each a module of its own with a ``BENCH``: here their rows stand together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

from .rows import Bench, Measured, Row, Settings


class Parts:
    """The subjects of the parts that were asked for; each is made when the first of its rows is measured."""

    def __init__(self, settings: Settings, stack: ExitStack) -> None:
        self._settings, self._stack = settings, stack
        self._subjects: dict[str, Any] = {}

    def measure(self, bench: Bench[Any], row: Row[Any]) -> Measured:
        if bench.name not in self._subjects:
            self._subjects[bench.name] = self._stack.enter_context(bench.subject(self._settings))
        return row.measure(self._subjects[bench.name])


def gathered(name: str, modules: Mapping[str, str]) -> Bench[Parts]:
    """The rows of all ``modules``, by part; a row's group is its own, else its part."""
    bench: Bench[Parts] = Bench(name, _subject)
    for part, module in modules.items():
        own: Bench[Any] = import_module(f".{module}", __package__).BENCH
        for row in own.rows.values():
            if row.name in bench.rows:
                raise ValueError(f"two parts of bench {name} have a row {row.name!r}")
            bench.rows[row.name] = replace(row, group=row.group or part, measure=partial(_measure, own, row))
    return bench


@contextmanager
def _subject(settings: Settings) -> Iterator[Parts]:
    with ExitStack() as stack:
        yield Parts(settings, stack)


def _measure(bench: Bench[Any], row: Row[Any], parts: Parts) -> Measured:
    return parts.measure(bench, row)
