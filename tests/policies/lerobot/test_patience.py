"""Loading says why it takes its time, once."""

from __future__ import annotations

import logging
import sys

import pytest

pytest.importorskip("lerobot")

from omni_loop_policies.lerobot.load import load


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What this project warned of: where loggers were made talkative before, more is said, by libraries too."""
    records = [r for r in caplog.records if r.name.startswith("omni_loop") and r.levelno >= logging.WARNING]
    return [record.getMessage() for record in records]


def test_the_import_of_lerobot_is_announced(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    load("fetch-act")
    caplog.clear()
    load("fetch-act")
    assert said(caplog) == []
    monkeypatch.delitem(sys.modules, "lerobot.policies")
    load("fetch-act")
    assert said(caplog) == ["importing LeRobot takes about 20 s of CPU"]
