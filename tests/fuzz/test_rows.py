"""The rows of the reliability board about bad inputs, as CI runs them; a failure names its seed."""

from __future__ import annotations

import secrets

import pytest

from omni_loop.testing import board

pytestmark = pytest.mark.timeout(400)  # a busy machine; none takes a tenth of it alone


@pytest.mark.parametrize("name", ["B1", "B2", "B3", "B4", "B5", "S3", "S5"])
def test_row(name: str) -> None:
    seed = secrets.randbelow(1 << 31)
    print(f"seed {seed}")
    line = board.run_row(board.row_named(name), seed)
    print(line.json())
    assert line.passed, line.json()
    assert line.number
