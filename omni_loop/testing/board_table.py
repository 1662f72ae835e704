"""The reliability board as a table in Markdown, made of the JSON lines of one or several runs."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from . import board

_KEYS = {"row", "seed", "number", "pass", "unit", "scale", "commit"}
_GROUPS = {"L": "Load held", "F": "Faults survived", "B": "Bad inputs", "S": "Security"}


def read(files: Iterable[Path]) -> list[dict[str, Any]]:
    """All lines of ``files`` in order. Raises :class:`ConfigError` naming file and line."""
    lines = []
    for path in files:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as e:
            raise ConfigError(f"--table: cannot read {path}: {getattr(e, 'strerror', None) or e}") from None
        for number, line in enumerate(text.splitlines(), 1):
            try:
                values = json.loads(line)
            except ValueError:
                values = None
            if not isinstance(values, dict) or not values.keys() >= _KEYS:
                raise ConfigError(f"--table: line {number} of {path} is no line of the board")
            lines.append(values)
    return lines


def table(lines: Sequence[Mapping[str, Any]]) -> str:
    """Every row of the board, run or not. Of a row with several lines the last that ran counts."""
    latest: dict[str, Mapping[str, Any]] = {}
    for line in lines:
        if line["pass"] is not None or line["row"] not in latest:
            latest[line["row"]] = line
    text = [
        "# The reliability board",
        "",
        "One row is one test with a number. Made by `omni-loop check board --scale full --json FILE`, whole or in",
        "parts (`--rows L1,F8`), then `omni-loop check board --table FILE --out docs/board.md`. A row that did not run",
        "says so.",
    ]
    group = ""
    for row in board.ROWS:
        if row.name[0] != group:
            group = row.name[0]
            text += ["", f"## {_GROUPS[group]}", "", "| row | | number | result | how |", "|---|---|---|---|---|"]
        text.append(_line(row, latest.get(row.name)))
    return "\n".join(text) + "\n"


def _line(row: board.Row, line: Mapping[str, Any] | None) -> str:
    if line is None or line["pass"] is None:
        why = "" if line is None else line.get("why", "")
        return f"| {row.name} | {row.title} | | not run{f': {_cell(why)}' if why else ''} | |"
    number = f"{line['number']:.6g} {line['unit']}".strip()
    result = "pass" if line["pass"] else f"**fail**: {_cell(line.get('why', ''))}"
    return f"| {row.name} | {row.title} | {number} | {result} | {_how(line)} |"


def _how(line: Mapping[str, Any]) -> str:
    command = ["--rows", line["row"], "--scale", line["scale"], "--seed", str(line["seed"])]
    took = f", {line['seconds']:g} s" if "seconds" in line else ""
    return f"`{shlex.join(command)}` at {line['commit']}{took}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
