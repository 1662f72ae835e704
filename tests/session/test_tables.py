"""The tables that the docs print are the machine's."""

from __future__ import annotations

from pathlib import Path

import pytest

from omni_loop.session.machine import VERDICTS, Arrival, Standing, Verdict
from omni_loop.session.tables import filled, transitions, verdicts

DOCS = Path(__file__).parents[2] / "docs" / "sessions.md"


def test_the_docs_show_the_tables_as_they_are() -> None:
    text = DOCS.read_text("utf-8")
    assert filled(text) == text, "run: python -m omni_loop.session.tables docs/sessions.md"


def test_every_arrival_has_a_verdict_in_every_standing() -> None:
    assert set(VERDICTS) == {(standing, arrival) for standing in Standing for arrival in Arrival}
    assert set(VERDICTS.values()) == set(Verdict)


def test_a_table_reads_as_the_machine_does() -> None:
    assert "| `waiting` | `join` | `join` | `lost` | `closed` |" in verdicts()
    assert "| `rebuilt` |  |  |  | `running` |  | `idle` |  |" in transitions()


def test_a_text_without_a_place_is_refused() -> None:
    with pytest.raises(ValueError, match="0 places for verdicts"):
        filled("# Sessions\n")
