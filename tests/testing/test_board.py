from __future__ import annotations

import json
import sys
import types
from pathlib import Path

import pytest

from omni_loop.errors import ConfigError, UnknownName
from omni_loop.testing import board, board_table
from omni_loop.testing.board import Broken, Row, expect


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """A board of four rows, one of them not built; which seeds ran."""
    ran: list[tuple[int, bool]] = []
    module = types.ModuleType("omni_loop.testing.rows.toy")

    def good(seed: int, full: bool) -> float:
        ran.append((seed, full))
        return 0.5

    def bad(seed: int, full: bool) -> float:
        ran.append((seed, full))
        expect(seed % 10 != 8, "the eighth is one too many")
        return 1.0

    def worse(seed: int, full: bool) -> float:
        raise ZeroDivisionError("of nothing")

    def lacking(seed: int, full: bool) -> float:
        raise board.NotRun("no uv on this machine")

    for function in (good, bad, worse, lacking):
        setattr(module, function.__name__, function)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    table = (
        Row("A1", "good", "MB", "toy:good", below=1.0),
        Row("A2", "bad", "things", "toy:bad", repeats=True),
        Row("A3", "worse", measure="toy:worse"),
        Row("A4", "not built"),
    )
    monkeypatch.setattr(board, "ROWS", table)
    return ran


def passed(lines: list[board.Line]) -> dict[str, bool | None]:
    return {line.row: line.passed for line in lines}


def test_every_row_has_a_line_and_what_did_not_run_did_not_pass(rows: list[tuple[int, bool]]) -> None:
    lines = list(board.run(seed=3))
    assert passed(lines) == {"A1": True, "A2": True, "A3": False, "A4": None}
    assert rows == [(3, False), (3, False), (4, False), (5, False)]
    only = list(board.run(["a1"], seed=3))
    assert passed(only) == {"A1": True, "A2": None, "A3": None, "A4": None}


def test_a_line_says_what_was_measured_of_which_commit(rows: list[tuple[int, bool]]) -> None:
    first, second, third, fourth = (json.loads(line.json()) for line in board.run(seed=3))
    assert first.pop("seconds") >= 0
    assert first == {
        "row": "A1",
        "seed": 3,
        "number": 0.5,
        "pass": True,
        "unit": "MB",
        "scale": "ci",
        "commit": board.commit(),
    }
    assert second["number"] == 3.0  # of three seeds
    assert third["why"] == "ZeroDivisionError: of nothing"
    assert (third["number"], third["pass"]) == (0.0, False)
    assert (fourth["number"], fourth["pass"], fourth["why"]) == (None, None, "not built")
    assert "seconds" not in fourth


def test_a_failure_names_its_seed_and_ends_the_row(rows: list[tuple[int, bool]]) -> None:
    line = board.run_row(board.ROWS[1], 6)
    assert (line.passed, line.seed, line.number) == (False, 8, 2.0)
    assert line.why == "the eighth is one too many"


def test_a_number_must_stay_below_its_bound(rows: list[tuple[int, bool]]) -> None:
    line = board.run_row(Row("A1", "", "MB", "toy:good", below=0.5), 1)
    assert (line.passed, line.why) == (False, "0.5 MB, expected less than 0.5")


def test_the_full_board_takes_fifty_seeds(rows: list[tuple[int, bool]]) -> None:
    board.run_row(Row("A2", "", "", "toy:good", repeats=True), 100, "full")
    assert rows == [(seed, True) for seed in range(100, 150)]


def test_an_unknown_row_is_named() -> None:
    with pytest.raises(UnknownName, match="no row 'F99'"):
        board.chosen(["L3", "F99"])


def test_what_is_built_can_be_loaded() -> None:
    built = [row for row in board.ROWS if row.measure]
    assert len({row.name for row in board.ROWS}) == len(board.ROWS) == 32
    assert {row.name for row in built} >= {"L3", "F6", "F7", "F11"}
    for row in built:
        assert callable(row.load())


def test_a_row_whose_needs_are_not_here_did_not_run(rows: list[tuple[int, bool]]) -> None:
    line = board.run_row(Row("A5", "", "things", "toy:lacking"), 1)
    assert (line.passed, line.number, line.why) == (None, None, "no uv on this machine")


def test_the_table_merges_runs_and_hides_nothing(rows: list[tuple[int, bool]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(board_table, "_GROUPS", {"A": "All"})
    parts = [*board.run(["A1"], 3), *board.run(["A2"], 8), *board.run(["A3"], 3, "full")]
    text = board_table.table([json.loads(line.json()) for line in parts])
    shown = {line.split("|")[1].strip(): line for line in text.splitlines() if line.startswith("| A")}
    assert "| 0.5 MB | pass | `--rows A1 --scale ci --seed 3` at " in shown["A1"]
    assert "| 0 things | **fail**: the eighth is one too many |" in shown["A2"]
    assert "**fail**: ZeroDivisionError" in shown["A3"]
    assert "--scale full" in shown["A3"]
    assert shown["A4"] == "| A4 | not built | | not run: not built | |"
    again = board_table.table([json.loads(line.json()) for line in [*parts, *board.run(["A2"], 3)]])
    assert "| A2 | bad | 3 things | pass |" in again


def test_what_is_no_line_of_the_board_is_named(tmp_path: Path) -> None:
    path = tmp_path / "board.jsonl"
    for text in ("nonsense", "[]", '{"row": "F1"}'):
        path.write_text(board.Line("F1", 1, "ci", "c", 1.0, "", True).json() + f"\n{text}\n")
        with pytest.raises(ConfigError, match=r"line 2 of .*board.jsonl is no line of the board"):
            board_table.read([path])
    with pytest.raises(ConfigError, match="cannot read"):
        board_table.read([tmp_path / "none"])


def test_expect_holds_without_asserts() -> None:
    with pytest.raises(Broken, match="so it is"):
        expect(False, "so it is")
