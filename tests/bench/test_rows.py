"""The rules every bench shares: bars, selection, JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from omni_loop.errors import MissingExtra, UnknownName
from omni_loop_bench.rows import BENCHES, Bar, Bench, Measured, Settings, find, write

DOCS = Path(__file__).resolve().parent.parent.parent / "docs" / "bench.md"


@contextmanager
def _subject(settings: Settings) -> Iterator[float]:
    yield 4.0


@pytest.fixture
def bench() -> Bench[float]:
    made: Bench[float] = Bench("toy", _subject)

    @made.row("ms", Bar("ratio", "<=", 1.5), "times")
    def fast(subject: float) -> Measured:
        """How fast."""
        return Measured(subject, 3.0)

    @made.row("dB", Bar("ours - baseline", ">=", 3), "looks")
    def clear(subject: float) -> Measured:
        """How
        clear."""
        return Measured(subject, 2.0)

    @made.row("count", group="looks")
    def many(subject: float) -> Measured:
        """How many."""
        return Measured(math.nan)

    return made


@pytest.mark.parametrize(
    ("bar", "value", "reached"),
    [
        (Bar("ours", ">=", 3), Measured(3), True),
        (Bar("ours", ">", 3), Measured(3), False),
        (Bar("ours", "<", 3), Measured(2.9), True),
        (Bar("ours", "<=", 3), Measured(3.1), False),
        (Bar("ratio", "<=", 1), Measured(2, 2), True),
        (Bar("ratio", ">=", 4), Measured(2, 1), False),
        (Bar("ratio", ">=", 4), Measured(2, 0), False),
        (Bar("ours - baseline", ">=", 3), Measured(25, 21), True),
        (Bar("ours - baseline", ">", 0), Measured(21, 21), False),
        (Bar("ours - baseline", ">", 0), Measured(21), False),
        (Bar("baseline / ours", ">=", 2.5), Measured(2, 5), True),
        (Bar("baseline / ours", ">=", 2.5), Measured(2.1, 5), False),
        (Bar("baseline / ours", ">=", 2.5), Measured(2), False),
        (Bar("baseline / ours", ">=", 2.5), Measured(0, 5), False),
        (Bar("ours", "<", 3), Measured(-math.inf), False),
        (Bar("ours", ">=", 0), Measured(math.nan), False),
    ],
)
def test_bars(bar: Bar, value: Measured, reached: bool) -> None:
    assert bar.reached(value) is reached


def test_rows_are_chosen_by_name_and_group(bench: Bench[float]) -> None:
    def names(*wanted: str) -> list[str]:
        return [row.name for row in bench.select(wanted)]

    assert names() == ["fast", "clear", "many"]
    assert names("looks") == ["clear", "many"]
    assert names("many", "fast") == ["fast", "many"]
    assert names("clear", "looks") == ["clear", "many"]
    with pytest.raises(UnknownName, match=r"bench 'toy' has no row 'cleer'\. Did you mean 'clear'\?"):
        bench.select(["cleer"])


def test_json_rows(bench: Bench[float], tmp_path: Path) -> None:
    heard: list[str] = []
    results = bench.run(on_result=lambda result: heard.append(result.row.name))
    assert heard == ["fast", "clear", "many"]
    write(tmp_path / "deep" / "rows.json", results)
    fast, clear, many = json.loads((tmp_path / "deep" / "rows.json").read_text())
    keys = ("row", "ours", "baseline", "unit", "ratio", "bar", "pass")
    assert fast == dict(zip(keys, ("fast", 4.0, 3.0, "ms", 1.33333, "ratio <= 1.5", True), strict=True))
    assert clear == dict(zip(keys, ("clear", 4.0, 2.0, "dB", None, "ours - baseline >= 3", False), strict=True))
    assert many == dict(zip(keys, ("many", None, None, "count", None, None, None), strict=True))
    assert results[1].row.what == "How clear."


def test_a_quick_run_judges_nothing(bench: Bench[float]) -> None:
    assert [result.passed for result in bench.run(settings=Settings(quick=True))] == [None, None, None]


def test_a_row_whose_extra_is_missing_is_no_number_unless_it_was_asked_for(bench: Bench[float]) -> None:
    @bench.row("ms", Bar("ours", "<=", 1))
    def elsewhere(subject: float) -> Measured:
        """How it is elsewhere."""
        raise MissingExtra("needs the package elsewhere")

    *others, result = bench.run()
    assert len(others) == 3
    assert (result.as_json()["ours"], result.passed) == (None, None)
    with pytest.raises(MissingExtra, match="elsewhere"):
        bench.run(["elsewhere"])


def test_an_unknown_bench_is_named() -> None:
    with pytest.raises(UnknownName, match=r"no bench is called 'wrld'\. Did you mean 'world'\?"):
        find("wrld")


@pytest.mark.parametrize("name", BENCHES)
def test_the_documentation_lists_every_row_with_its_bar(name: str) -> None:
    text = DOCS.read_text(encoding="utf-8")
    section = text.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
    listed = {cells[1]: cells for line in section.splitlines() if len(cells := line.split("|")) > 4}
    listed = {name.strip().strip("`"): cells for name, cells in listed.items()}
    rows = find(name).rows
    assert rows.keys() == listed.keys() - {"row", "---"}
    for row in rows.values():
        assert row.what, f"{row.name} does not say what it measures"
        assert listed[row.name][2].strip() == row.unit
        assert listed[row.name][3].strip() == str(row.bar or "")
    assert f"omni-loop bench {name}" in section
