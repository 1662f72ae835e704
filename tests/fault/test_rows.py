"""The rows of the reliability board about faults, each with three seeds drawn anew; a failure names its seed."""

from __future__ import annotations

import secrets

import pytest

from omni_loop.testing import board

pytestmark = pytest.mark.timeout(400)  # a busy machine; none takes a tenth of it alone


@pytest.mark.parametrize("name", ["F6", "F7", "F11"])
def test_row(name: str) -> None:
    (row,) = (row for row in board.ROWS if row.name == name)
    seed = secrets.randbelow(1 << 31)
    print(f"seed {seed}")
    line = board.run_row(row, seed, full=False, at="")
    print(line.json())
    assert line.verdict == "pass", line.json()
    assert line.number
