"""Loading says why it takes its time, once."""

from __future__ import annotations

import sys

import pytest

pytest.importorskip("lerobot")

from omni_loop_policies.lerobot.load import load


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What this project said: libraries say more where their loggers were made talkative before."""
    return [record.getMessage() for record in caplog.records if record.name.startswith("omni_loop")]


def test_the_import_of_lerobot_is_announced(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    load("fetch-act")
    caplog.clear()
    load("fetch-act")
    assert said(caplog) == []
    monkeypatch.delitem(sys.modules, "lerobot.policies")
    load("fetch-act")
    assert said(caplog) == ["importing LeRobot takes about 20 s of CPU"]
