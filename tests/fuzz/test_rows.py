"""The rows of the reliability board about bad inputs, as CI runs them; a failure names its seed."""

from __future__ import annotations

import pytest

from omni_loop.testing import board

pytestmark = pytest.mark.timeout(400)  # a busy machine; none takes a tenth of it alone


@pytest.mark.parametrize("name", ["B1", "B2", "B3", "B4", "B5", "S3", "S5"])
def test_row(name: str) -> None:
    number = board.held(name)
    assert number
