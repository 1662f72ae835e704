from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from omni_loop.errors import ConfigError, InvalidInput
from omni_loop_sim_eval.app import eval_app

from .pages import read
from .runs import write_run


def call(*arguments: object) -> str:
    result = CliRunner().invoke(eval_app, [str(a) for a in arguments], catch_exceptions=False, env={"COLUMNS": "160"})
    assert result.exit_code == 0, result.output
    return result.output


def test_compare_prints_and_writes(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", {"": [True] * 4 + [False] * 16}, suite="small")
    b = write_run(tmp_path / "b", {"": [True] * 18 + [False] * 2}, suite="large")
    said = call("compare", a, b, "--out", tmp_path / "out")
    for text in ("small and large: 20 pairs", "4/20 [8–42 %]", "18/20 [70–97 %]", "-70.0", "large succeeds more often"):
        assert text in said, text
    data = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert data["pooled"]["pairs"] == {"both": 4, "only_a": 0, "only_b": 14, "neither": 2}
    assert "large succeeds more often" in read((tmp_path / "out" / "index.html").read_text()).said()


def test_compare_says_which_folder_is_none(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", {"": [True]})
    with pytest.raises(ConfigError, match=r"^B: .*nowhere holds no episodes.json"):
        call("compare", a, tmp_path / "nowhere", "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_leaderboard_writes_a_page_with_links(tmp_path: Path) -> None:
    for name, k in (("one", 18), ("two", 9)):
        folder = write_run(tmp_path / "runs" / name, {"": [True] * k + [False] * (20 - k)}, suite=name)
        (folder / "report.html").write_text("x")
    said = call("leaderboard", tmp_path / "runs", "--out", tmp_path / "board.html", "--title", "Ours & theirs")
    assert re.search(r"1 +one +18/20 +90", said), said
    page = read((tmp_path / "board.html").read_text())
    assert [a["href"] for tag, a in page.tags if tag == "a"] == ["runs/one/report.html", "runs/two/report.html"]
    assert "Ours & theirs" in page.said()
    (board,) = json.loads((tmp_path / "board.json").read_text())
    assert [(e["name"], e["rank"]) for e in board["entries"]] == [("one", 1), ("two", 2)]


def test_a_leaderboards_page_is_not_its_json(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"--out: .*board\.json is the name of the JSON beside the page"):
        call("leaderboard", tmp_path, "--out", tmp_path / "board.json")


def test_plan_is_an_option_and_a_command(tmp_path: Path) -> None:
    given = ("--from", "0.4", "--to", "0.91", "--paired", "--correlation", "0", "--json", tmp_path / "plan.json")
    said = call("--plan", *given)
    assert "0.4 against 0.91" in said
    assert said == call("plan", *given)
    fixed, sequential = json.loads((tmp_path / "plan.json").read_text())["designs"]
    assert (fixed["episodes"], sequential["episodes"]) == (17, 22)
    assert fixed["power"]["50"] > 0.99 < sequential["power"]["50"]
    assert 14 < sequential["mean"] < 16


def test_plan_shows_independent_runs_too(tmp_path: Path) -> None:
    call("--plan", "--from", "0.4", "--to", "0.8", "--json", tmp_path / "plan.json")
    designs = json.loads((tmp_path / "plan.json").read_text())["designs"]
    assert (designs[0]["seeds"], designs[0]["test"]) == ("other", "Fisher exact")
    assert 20 < designs[0]["episodes"] < 35
    assert len(designs) == 5, "and pairs at two correlations these rates allow, fixed and sequential"


def test_plan_refuses_what_is_no_probability() -> None:
    with pytest.raises(InvalidInput, match="--power: 80 is no probability"):
        call("--plan", "--power", "80")
    with pytest.raises(InvalidInput, match="--alpha: 1e-17 is no probability"):
        call("--plan", "--alpha", "1e-17")
    with pytest.raises(InvalidInput, match="--from and --to are both 0: there is no difference"):
        call("--plan", "--from", "0", "--to", "1e-300")
