"""The rows of the reliability board about load, scaled; a failure names its seed."""

from __future__ import annotations

import gc

import pytest

from omni_loop.testing import board
from omni_loop.testing.rows import long

pytestmark = pytest.mark.timeout(400)  # a busy machine; it takes seconds alone


@pytest.mark.parametrize("name", ["L1", "L2", "L3", "L4", "L5"])
def test_row(name: str) -> None:
    board.held(name)


def test_a_small_leak_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """One small object a tick, in the model's hands, is far more than a megabyte an hour."""
    from omni_loop.testing.rows.toys import Act

    leak: list[object] = []
    outputs = Act.outputs

    def leaking(self: Act, item):  # type: ignore[no-untyped-def]
        leak.append(object())
        return outputs(self, item)

    monkeypatch.setattr(Act, "outputs", leaking)
    monkeypatch.setattr(long, "SCALED", long.SCALED / 2)
    try:
        assert long.measure(1, full=False) > 1.0
    finally:
        leak.clear()
        gc.collect()
