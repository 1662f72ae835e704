"""What ``omni-loop eval`` is told on the command line, and what it says while it runs."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console
from typer.testing import CliRunner

from omni_loop.env import EVALUATION_SEED
from omni_loop.errors import ConfigError, StageFailed, UnknownName
from omni_loop_sim_eval import commands, live_sweep
from omni_loop_sim_eval.app import eval_app
from omni_loop_sim_eval.console import progress
from omni_loop_sim_eval.store import OtherRun, read_journal

from .test_commands import call, server  # noqa: F401  (a fixture)
from .test_episodes import run_one
from .toy import ToyServer, toy_suite

S = EVALUATION_SEED
FEW = ("--episodes", "2", "--videos", "none")


def test_the_same_command_goes_on_and_fresh_begins_anew(server: ToyServer, tmp_path: Path) -> None:  # noqa: F811
    out = ("--videos", "none", "--out", str(tmp_path))
    call("eval", "--episodes", "2", *out)
    server.opened.clear()
    code, said = call("eval", "--episodes", "3", *out)
    assert (code, server.opened) == (0, [S, S + 2]), "the first asks for the policy's revision"
    assert "2 episodes are there already" in said
    assert "2/3" in said
    with pytest.raises(OtherRun, match=r"suite\.keys was"):
        call("eval", "--keys", "position", *FEW, "--out", str(tmp_path))
    server.opened.clear()
    call("eval", "--episodes", "2", "--fresh", *out)
    assert server.opened == [S, S, S + 1], "preflight and both"
    assert len(read_journal(tmp_path)) == 2


def test_a_suite_has_a_folder_of_its_own(
    server: ToyServer,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    call("eval", *FEW)
    assert (tmp_path / "runs" / "toy-suite" / "episodes.jsonl").exists()


def test_one_task_of_a_suite(server: ToyServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    tasks = [{"name": "near"}, {"name": "far", "max_steps": 5}]
    monkeypatch.setattr(commands, "load_suite", lambda name: toy_suite(tasks=tasks))
    call("eval", "--task", "far", *FEW, "--out", str(tmp_path))
    assert [(r.task, r.steps) for r in read_journal(tmp_path)] == [("far", 5), ("far", 5)]
    code, said = call("eval", *FEW, "--out", str(tmp_path))
    assert code == 0
    assert "2 episodes are there already" in said
    assert {row["task"] for row in json.loads((tmp_path / "episodes.json").read_text())} == {"near", "far"}
    with pytest.raises(UnknownName, match=r"no task 'fa'. Did you mean 'far'"):
        call("eval", "--task", "fa", "--out", str(tmp_path))
    with pytest.raises(UnknownName, match="has no task ''"):
        call("eval", "--task", "", "--out", str(tmp_path))


def test_a_bound_acts_without_a_server(server: ToyServer, tmp_path: Path) -> None:  # noqa: F811
    code, _ = call("eval", "--policy", "random", *FEW, "--out", str(tmp_path))
    assert (code, server.served) == (0, 0)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["pipeline"], summary["episodes"]) == ("random", 2)
    with pytest.raises(UnknownName, match="no bound is called 'randm'"):
        call("eval", "--policy", "randm", "--out", str(tmp_path))
    code, said = call("eval", "--policy", "hold", "--address", "127.0.0.1:1", "--out", str(tmp_path))
    assert (code, "acts without a server" in said) == (2, True)


def test_a_sweep_over_latencies_leaves_a_folder_per_point_and_a_page(server: ToyServer, tmp_path: Path) -> None:  # noqa: F811
    code, said = call("eval", "--live", "--latency-ms", "0,200", *FEW, "--out", str(tmp_path))
    assert code == 0, said
    assert server.served == 1, "one server for all points"
    found = json.loads((tmp_path / "latency.json").read_text())
    assert found["reproducible"] is True
    points = [(p["chunks"], p["latency_ms"]) for p in found["points"]]
    assert points == [("joined", 0), ("joined", 200), ("aligned", 0), ("aligned", 200), ("naive", 200)]
    for p in found["points"]:
        run = json.loads((tmp_path / p["folder"] / "run.json").read_text())
        assert run["suite"]["live"] == {"latency_ms": p["latency_ms"], "jitter_ms": 0, "measured": False} | {
            "chunks": p["chunks"]
        }
        assert p["successes"] == json.loads((tmp_path / p["folder"] / "summary.json").read_text())["successes"]
    assert found["points"][0]["against_aligned"] == [0, 0, 1.0]
    page = (tmp_path / "latency.html").read_text()
    assert page.count("<polyline") == 3
    assert 'href="naive-200ms/report.html"' in page
    picture = ElementTree.parse(tmp_path / "latency.svg").getroot()
    assert picture.tag.endswith("}svg")
    assert {"joined", "aligned", "naive"} <= {e.text for e in picture.iter() if e.tag.endswith("}text")}
    before = server.served, len(server.opened)
    code, said = call("eval", "--live", "--latency-ms", "0,200", *FEW, "--out", str(tmp_path))
    assert (code, said.count("2 episodes are there already")) == (0, 5)
    assert len(server.opened) - before[1] == 5


def test_a_point_of_a_sweep_says_what_broke_and_has_its_own_reports_interval(
    server: ToyServer,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tasks = [{"name": "near"}, {"name": "far", "max_steps": 5}]
    monkeypatch.setattr(commands, "load_suite", lambda name: toy_suite(tasks=tasks))

    def broken(seed: int, tick: int) -> None:
        if seed == S + 1:
            raise StageFailed("no")

    server.broken = broken
    code, said = call("eval", "--live", "--latency-ms", "0,100", "--chunks", "naive", *FEW, "--out", str(tmp_path))
    assert code == 1
    assert "broke" in said
    for point in json.loads((tmp_path / "latency.json").read_text())["points"]:
        summary = json.loads((tmp_path / point["folder"] / "summary.json").read_text())
        assert point["broken"] == summary["errors"] == 2
        assert point["ci95"] == summary["ci95"]
        assert len(summary["tasks"]) == 2
    assert "2 of 4 episodes broke" in (tmp_path / "latency.html").read_text()


def test_latencies_that_are_nearly_equal_have_folders_of_their_own(server: ToyServer, tmp_path: Path) -> None:  # noqa: F811
    code, _ = call("eval", "--live", "--latency-ms", "100,100.00001", "--chunks", "naive", *FEW, "--out", str(tmp_path))
    assert code == 0
    found = json.loads((tmp_path / "latency.json").read_text())["points"]
    assert [p["folder"] for p in found] == ["naive-100ms", "naive-100.00001ms"]


def test_one_latency_is_one_run(server: ToyServer, tmp_path: Path) -> None:  # noqa: F811
    code, said = call(
        *("eval", "--live", "--latency-ms", "150", "--no-join", "--jitter-ms", "20", "--measured", *FEW),
        *("--out", str(tmp_path)),
    )
    assert code == 0
    live = json.loads((tmp_path / "run.json").read_text())["suite"]["live"]
    assert live == {"latency_ms": 150.0, "jitter_ms": 20.0, "measured": True, "chunks": "aligned"}
    assert "not reproducible" in said


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--latency-ms", "100"), "--latency-ms goes with --live"),
        (("--join",), "--join goes with --live"),
        (("--live", "--latency-ms", "1;2"), "is no list of numbers"),
        (("--live", "--join", "--chunks", "naive"), "give one of them"),
    ],
)
def test_live_options_that_do_not_fit(server: ToyServer, tmp_path: Path, options: tuple[str, ...], says: str) -> None:  # noqa: F811
    code, said = call("eval", *options, "--out", str(tmp_path))
    assert code == 2
    assert says in " ".join(said.replace("│", " ").split())
    with pytest.raises(UnknownName, match=r"called 'joint'. Did you mean 'joined'"):
        call("eval", "--live", "--chunks", "joint", "--out", str(tmp_path))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--latency-ms", "-5"), "latency_ms: Input should be greater than or equal to 0"),
        (("--latency-ms", "0,nan"), "latency_ms: Input should be a finite number"),
        (("--latency-ms", "1e9"), "latency_ms: Input should be less than or equal to 60000"),
        (("--jitter-ms", "1e9"), "jitter_ms: Input should be less than or equal to 60000"),
    ],
)
def test_live_numbers_out_of_range(server: ToyServer, tmp_path: Path, options: tuple[str, ...], says: str) -> None:  # noqa: F811
    with pytest.raises(ConfigError, match=f"--live: {says}"):
        call("eval", "--live", *options, "--out", str(tmp_path))


def test_a_suite_may_say_that_latency_is_measured() -> None:
    suite = toy_suite(mode="live", live={"measured": True, "latency_ms": 100})
    (same,) = live_sweep.points(suite, False, None, None, False, None, None)
    assert same.live == suite.live


def test_a_suite_needs_no_word_before_it_and_commands_keep_their_names() -> None:
    runner = CliRunner()
    assert "Measure a success rate" in runner.invoke(eval_app, ["--help"]).output
    assert "Compare two runs" in runner.invoke(eval_app, ["compare", "--help"]).output
    assert "How many episodes" in runner.invoke(eval_app, ["--plan", "--help"]).output
    with pytest.raises(UnknownName, match="no shipped suite is called 'nothing'"):
        runner.invoke(eval_app, ["nothing"], catch_exceptions=False)


def test_progress_says_rate_and_interval_of_every_task_and_of_all() -> None:
    suite = toy_suite(tasks=[{"name": "near"}, {"name": "far"}], episodes=2)
    result = run_one(ToyServer())
    said = io.StringIO()
    with progress(Console(width=140, file=said), suite) as bar:
        bar.resumed([replace(result, task="near")])
        bar.heard(replace(result, task="far"))
    there, near, far, every = (line.strip() for line in said.getvalue().strip().splitlines())
    assert there == "1 episodes are there already"
    for line, name, bars, rate in (
        (near, "near", "1/2", "100 % 1/1 [21–100 %]"),
        (far, "far", "1/2", "100 % 1/1"),
        (every, "toy-suite", "2/4", "100 % 2/2"),
    ):
        assert line.startswith(name)
        assert bars in line
        assert rate in line
