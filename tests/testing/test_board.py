from __future__ import annotations

import json
import sys
import types

import pytest

from omni_loop.errors import UnknownName
from omni_loop.testing import board
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

    for function in (good, bad, worse):
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


def verdicts(lines: list[board.Line]) -> dict[str, str]:
    return {line.name: line.verdict for line in lines}


def test_every_row_has_a_line_and_what_did_not_run_did_not_pass(rows: list[tuple[int, bool]]) -> None:
    lines = list(board.run(seed=3))
    assert verdicts(lines) == {"A1": "pass", "A2": "pass", "A3": "fail", "A4": "not run"}
    assert rows == [(3, False), (3, False), (4, False), (5, False)]
    only = list(board.run(["a1"], seed=3))
    assert verdicts(only) == {"A1": "pass", "A2": "not run", "A3": "not run", "A4": "not run"}


def test_a_line_says_what_was_measured_of_which_commit(rows: list[tuple[int, bool]]) -> None:
    first, second, third, fourth = (json.loads(line.json()) for line in board.run(seed=3))
    assert first == {"name": "A1", "seed": 3, "commit": board.commit(), "number": 0.5, "unit": "MB", "pass": "pass"}
    assert second["number"] == 3.0  # of three seeds
    assert third["why"] == "ZeroDivisionError: of nothing"
    assert (fourth["number"], fourth["pass"]) == (None, "not run")


def test_a_failure_names_its_seed_and_ends_the_row(rows: list[tuple[int, bool]]) -> None:
    line = board.run_row(board.ROWS[1], 6, False, "c")
    assert (line.verdict, line.seed, line.number) == ("fail", 8, 2.0)
    assert line.why == "the eighth is one too many"


def test_a_number_must_stay_below_its_bound(rows: list[tuple[int, bool]]) -> None:
    line = board.run_row(Row("A1", "", "MB", "toy:good", below=0.5), 1, False, "c")
    assert (line.verdict, line.why) == ("fail", "0.5 MB, expected less than 0.5")


def test_the_full_board_takes_fifty_seeds(rows: list[tuple[int, bool]]) -> None:
    board.run_row(Row("A2", "", "", "toy:good", repeats=True), 100, True, "c")
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


def test_expect_holds_without_asserts() -> None:
    with pytest.raises(Broken, match="so it is"):
        expect(False, "so it is")
