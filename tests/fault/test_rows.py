"""The rows of the reliability board about faults, each with three seeds drawn anew; a failure names its seed."""

from __future__ import annotations

import secrets

import pytest

from omni_loop.testing import board

pytestmark = pytest.mark.timeout(400)  # a busy machine; none takes a tenth of it alone


@pytest.mark.parametrize("name", ["F1", "F2", "F5", "F6", "F7", "F8", "F9", "F11", "F12", "F13", "F14"])
def test_row(name: str) -> None:
    seed = secrets.randbelow(1 << 31)
    print(f"seed {seed}")
    line = board.run_row(board.row_named(name), seed)
    print(line.json())
    assert line.passed, line.json()
    assert line.number
    if name == "F1":
        assert line.number >= 200, "cut points of a run"
