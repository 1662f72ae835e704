"""The rows of the reliability board about faults, each with three seeds drawn anew; a failure names its seed."""

from __future__ import annotations

import pytest

from omni_loop.testing import board

pytestmark = pytest.mark.timeout(400)  # a busy machine; none takes a tenth of it alone


@pytest.mark.parametrize("name", ["F1", "F2", "F5", "F6", "F7", "F8", "F9", "F11", "F12", "F13", "F14"])
def test_row(name: str) -> None:
    number = board.held(name)
    assert number
    if name == "F1":
        assert number >= 200, "cut points of a run"
