"""Episodes of two versions of a simulator are not of one run, and no pairs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from omni_loop import registry
from omni_loop.errors import ConfigError
from omni_loop_sim_eval import compare, leaderboard, stored
from omni_loop_sim_eval.runner import run_suite
from omni_loop_sim_eval.store import RUN, OtherRun, Store
from omni_loop_sim_eval.versions import simulator

from .runs import write_run
from .toy import ToyEnv, ToyServer, toy_suite


class Versioned(ToyEnv):
    """``engine``: what is installed of it, by task."""

    engine: dict[str, str] = {"a": "1.0", "b": "2.0"}  # noqa: RUF012 - set anew by each test

    def __init__(self, max_steps: int = 60, task: str = "a") -> None:
        super().__init__(max_steps)
        self._task = task

    @property
    def versions(self) -> dict[str, str]:
        return {"python": "3.12.1", f"engine-{self._task}": self.engine[self._task]}


TASKS = [{"name": name, "env_options": {"task": name}} for name in "ab"]


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(Versioned, "engine", {"a": "1.0", "b": "2.0"})
    with registry.registered(registry.ENVS, "versioned", Versioned):
        yield


def run(folder: Path, episodes: int, **fields: Any) -> int:
    suite = toy_suite(env="versioned", tasks=TASKS, episodes=episodes, **fields)
    return run_suite(suite, ToyServer().connect, store=Store(folder)).resumed


@pytest.mark.parametrize("task", ["a", "b"])
def test_another_version_of_any_tasks_simulator_is_not_mixed_in(tmp_path: Path, task: str) -> None:
    run(tmp_path, 1)
    Versioned.engine[task] = "3.0"
    with pytest.raises(OtherRun, match=rf"differs: version.engine-{task} was '.\.0', is '3.0'"):
        run(tmp_path, 2)


def test_a_folder_that_does_not_say_the_simulators_is_gone_on_with(tmp_path: Path) -> None:
    """Those of older versions: nothing contradicts. It says them from then on."""
    run(tmp_path, 1)
    head = json.loads((tmp_path / RUN).read_text())
    head["fingerprint"] = {name: v for name, v in head["fingerprint"].items() if not name.startswith("version.")}
    (tmp_path / RUN).write_text(json.dumps(head))
    assert run(tmp_path, 2) == 2
    Versioned.engine["a"] = "3.0"
    with pytest.raises(OtherRun, match="engine-a"):
        run(tmp_path, 3)


def test_an_env_that_names_nothing_has_no_entries() -> None:
    assert simulator(Versioned()) == {"version.engine-a": "1.0"}, "an interpreter decides nothing"
    assert simulator(ToyEnv()) == {}


def test_runs_of_two_versions_are_no_pairs(tmp_path: Path) -> None:
    said = {"suite.env": "toy", "version.engine": "1.0"}
    runs = [
        stored.load(write_run(tmp_path / name, {"": [True, False]}, said=fingerprint))
        for name, fingerprint in (
            ("a", said),
            ("b", {**said, "version.engine": "2.0"}),
            ("old", {"suite.env": "toy"}),
        )
    ]
    with pytest.raises(ConfigError, match=r"cannot be paired: version of engine is '1.0' in .*a and '2.0' in .*b"):
        compare.compare(runs[0], runs[1])
    compare.compare(runs[0], runs[2])
    unpaired = {entry.run.folder.name: entry.unpaired for entry in leaderboard.boards(runs)[0].entries}
    assert {name: len(others) for name, others in unpaired.items()} == {"a": 1, "b": 1, "old": 0}
