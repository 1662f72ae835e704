"""Options that are refused before a worker is started."""

from __future__ import annotations

from typing import Any

import pytest

from omni_loop import registry
from omni_loop.errors import ConfigError


@pytest.mark.parametrize("name", ["worker", "robosuite", "libero"])
@pytest.mark.parametrize(("option", "value"), [("start_s", 0), ("answer_s", -1), ("answer_s", float("nan"))])
def test_times_that_are_none_are_refused(name: str, option: str, value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omni_loop_envs.worker.registered.command", lambda name: pytest.fail("a worker was started"))
    options = {option: value} | ({"env": "pusht"} if name == "worker" else {"images": False})
    with pytest.raises(ConfigError, match=f"{option} is {value:g}, wanted more than 0"):
        registry.build(registry.ENVS, name, options)


@pytest.mark.parametrize("task", [1.5, True, None])
def test_a_task_of_libero_is_a_number_or_a_name(task: Any) -> None:
    with pytest.raises(ConfigError, match=r"'task' of 'libero' is .*; it must be a number or a name"):
        registry.build(registry.ENVS, "libero", {"task": task})
