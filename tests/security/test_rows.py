"""The rows of the reliability board about security, at the scale of CI; a failure names its seed."""

from __future__ import annotations

import secrets

import pytest

from omni_loop.testing import board

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("name", ["S1", "S2", "S4", "S6", "S7", "S8"])
def test_row(name: str) -> None:
    seed = secrets.randbelow(1 << 31)
    line = board.run_row(board.row_named(name), seed)
    print(line.json())
    assert line.passed, line.json()
    assert line.number
