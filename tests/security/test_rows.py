"""The rows of the reliability board about security, at the scale of CI; a failure names its seed."""

from __future__ import annotations

import pytest

from omni_loop.testing import board

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("name", ["S1", "S2", "S4", "S6", "S7", "S8"])
def test_row(name: str) -> None:
    number = board.held(name)
    assert number
