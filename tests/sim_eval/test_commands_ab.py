from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from omni_loop.env import EVALUATION_SEED
from omni_loop.errors import ConfigError
from omni_loop_sim_eval import commands_ab, commands_collection, serving
from omni_loop_sim_eval.app import eval_app
from omni_loop_sim_eval.suite import EvalSuite

from .pages import read
from .toy import ToyServer, toy_suite

S = EVALUATION_SEED


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Suites of the toy's, "weak" or not, meet a toy server of their own; what would have been started."""
    started: list[tuple[str, str]] = []

    @contextmanager
    def server(
        suite: EvalSuite, address: str, console: Console, checkpoint: str = "", **more: object
    ) -> Iterator[object]:
        started.append((suite.deployment, checkpoint))
        weak = "weak" in (suite.name, checkpoint)
        yield ToyServer(lost=frozenset(range(S, S + 100)) if weak else frozenset({S + 2})).connect

    def load(name: str) -> EvalSuite:
        return toy_suite(name=name, max_steps=20, episodes=3, deployment=name, first_seed=S + (name == "shifted"))

    monkeypatch.setattr(serving, "server", server)
    monkeypatch.setattr(commands_ab, "load_suite", load)
    return started


def call(*arguments: object) -> tuple[int, str]:
    given = [str(a) for a in arguments]
    result = CliRunner().invoke(eval_app, given, catch_exceptions=False, env={"COLUMNS": "160"})
    return result.exit_code, result.output


def test_ab_stops_when_it_is_decided_and_writes_both_runs(served: list[tuple[str, str]], tmp_path: Path) -> None:
    code, said = call("ab", "weak", "strong", "--max", 60, "--videos", "none", "--out", tmp_path)
    assert code == 0, said
    wanted = "Decided after 8 pairs, 52 fewer than the 60 it was allowed: strong is better than weak."
    assert wanted in said
    assert served == [("weak", ""), ("strong", "")]
    data = json.loads((tmp_path / "comparison.json").read_text())
    sequential = data["sequential"]
    assert (sequential["verdict"], sequential["pairs"], sequential["only_b"], sequential["max"]) == ("b", 8, 7, 60)
    assert sequential["p"] < 0.05
    assert sequential["confidence"][1] < 0
    page = read((tmp_path / "index.html").read_text())
    assert wanted in page.said()
    assert "Pair by pair" in page.said()
    links = [a["href"] for tag, a in page.tags if tag == "a"]
    assert links == ["a/report.html", "b/report.html"]
    assert all((tmp_path / link).exists() for link in links)


def test_ab_of_two_checkpoints_and_of_one_server(served: list[tuple[str, str]], tmp_path: Path) -> None:
    call("ab", "toy", "toy", "--checkpoint-a", "weak", "--max", 60, "--videos", "none", "--out", tmp_path / "two")
    assert served == [("toy", "weak"), ("toy", "")]
    assert json.loads((tmp_path / "two" / "comparison.json").read_text())["sequential"]["verdict"] == "b"
    served.clear()
    code, said = call("ab", "toy", "toy", "--max", 9, "--videos", "none", "--out", tmp_path / "one")
    assert served == [("toy", "")], "served by the same deployment: one server is enough"
    assert code == 0
    assert "Not decided after 9 pairs." in said


def test_ab_refuses_what_cannot_be_paired_before_anything_runs(served: list[tuple[str, str]], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"cannot be paired: first_seed is {S} in toy and {S + 1} in shifted"):
        call("ab", "toy", "shifted", "--out", tmp_path / "out")
    assert not served
    assert not (tmp_path / "out").exists()


def test_a_collection_is_run_by_its_name_and_goes_on(
    served: list[tuple[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.yaml").write_text("name: mine\nsuites: [strong, weak]\n")
    monkeypatch.setattr(commands_collection.collection_, "load_suite", commands_ab.load_suite)
    given = (tmp_path / "mine.yaml", "--videos", "none", "--out", tmp_path / "out")
    code, said = call(*given, "--only", "weak")
    assert code == 0, said
    assert served == [("weak", "")]
    code, said = call("--videos", "none", *given)
    assert code == 0, said
    assert [name for name, _ in served] == ["weak", "strong", "weak"]
    assert "strong" in read((tmp_path / "out" / "index.html").read_text()).said()
    assert json.loads((tmp_path / "out" / "weak" / "summary.json").read_text())["successes"] == 0
    with pytest.raises(ConfigError, match="--only: the collection has no suite 'strung'"):
        call(*given, "--only", "strung")
