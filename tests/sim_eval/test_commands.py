from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from omni_loop.env import EVALUATION_SEED
from omni_loop.errors import ConfigError, InvalidInput, StageFailed, UnknownName
from omni_loop_sim_eval import commands, suite

from .toy import ToyServer, toy_suite

S = EVALUATION_SEED


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> ToyServer:
    """Commands meet the toy server instead of starting one, and the toy suite instead of a shipped one."""
    toy = ToyServer(lost=frozenset({S + 1}))

    @contextmanager
    def serve(
        chosen: suite.EvalSuite, address: str, console: Console, *served: object, **credentials: object
    ) -> Iterator[object]:
        toy.served += 1
        yield toy.connect

    monkeypatch.setattr(commands, "_server", serve)
    monkeypatch.setattr(commands, "load_suite", lambda name: toy_suite(max_steps=20))
    return toy


def app() -> typer.Typer:
    made = typer.Typer()
    made.command("eval")(commands.eval_command)
    made.command("demo")(commands.demo_command)
    return made


def call(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app(), list(arguments), catch_exceptions=False, env={"COLUMNS": "120"})
    return result.exit_code, result.output


def test_eval_writes_numbers_page_and_videos(server: ToyServer, tmp_path: Path) -> None:
    code, said = call("eval", "toy", "--episodes", "3", "--out", str(tmp_path))
    assert code == 0, said
    assert "2/3" in said
    s = json.loads((tmp_path / "summary.json").read_text())
    assert (s["episodes"], s["successes"]) == (3, 2)
    assert {"success_rate", "ci95", "tick_ms", "overhead_ms", "predictions"} <= s.keys()
    assert len(json.loads((tmp_path / "episodes.json").read_text())) == 3
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")
    assert {p.name for p in (tmp_path / "videos").iterdir()} == {
        f"success-seed-{S}.mp4", f"failure-seed-{S + 1}.mp4", "predicted-beside-real.mp4",
    }  # fmt: skip


def test_eval_options_reach_the_run(server: ToyServer, tmp_path: Path) -> None:
    code, said = call("eval", "--state", "--seed", "7", "--episodes", "1", "--videos", "none", "--out", str(tmp_path))
    assert code == 0
    assert "no measure of unseen episodes" in said
    assert {keys for _, _, _, keys in server.heard} == {("image", "position", "goal")}
    s = json.loads((tmp_path / "summary.json").read_text())
    assert (s["first_seed"], s["seeds_unseen"], s["state_given"]) == (7, False, True)
    call("eval", "--keys", "position", "--episodes", "1", "--fresh", "--out", str(tmp_path))
    assert server.heard[-1][3] == ("position",)
    with pytest.raises(UnknownName, match=r"'positon'. Did you mean 'position'"):
        call("eval", "--keys", "positon", "--out", str(tmp_path))
    with pytest.raises(ConfigError, match="interval"):
        call("eval", "--interval", "wald", "--out", str(tmp_path))


def test_eval_ends_with_one_when_episodes_broke_and_still_writes_everything(server: ToyServer, tmp_path: Path) -> None:
    def broken(seed: int, tick: int) -> None:
        raise StageFailed("out of luck")

    server.broken = broken
    code, said = call("eval", "--episodes", "2", "--out", str(tmp_path))
    assert code == 1
    assert "2 of 2 episodes broke" in said
    assert "stage_failed: out of luck" in said
    assert "out of luck" in (tmp_path / "report.html").read_text()


def test_eval_pairs_with_an_earlier_run(server: ToyServer, tmp_path: Path) -> None:
    call("eval", "--episodes", "3", "--out", str(tmp_path / "a"))
    server.lost = frozenset({S, S + 1})
    code, said = call("eval", "--episodes", "3", "--out", str(tmp_path / "b"), "--against", str(tmp_path / "a"))
    assert code == 0
    assert "0 only here, 1 only there" in said
    paired = json.loads((tmp_path / "b" / "summary.json").read_text())["paired"]
    assert (paired["only_this"], paired["only_other"], paired["p"]) == (0, 1, 1.0)


def test_a_pair_of_other_worlds_is_said(server: ToyServer, tmp_path: Path) -> None:
    call("eval", "--episodes", "1", "--out", str(tmp_path / "a"))
    head = tmp_path / "a" / "run.json"
    head.write_text(head.read_text().replace('"suite.env": "toy"', '"suite.env": "other"'))
    _, text = call("eval", "--episodes", "1", "--against", str(tmp_path / "a"), "--out", str(tmp_path / "b"))
    assert "--against: env is 'toy' in toy-suite and 'other' in" in text
    assert "paired with a: 0 only here, 0 only there" in text
    _, text = call("eval", "--episodes", "1", "--against", str(tmp_path / "b"), "--out", str(tmp_path / "c"))
    assert "--against:" not in text, "the same world"


@pytest.mark.parametrize("command", ["eval", "demo"])
@pytest.mark.parametrize("taken", ["out", "out/videos", "out/summary.json", "out/report.html"])
def test_a_bad_output_path_is_said_before_anything_runs(
    server: ToyServer, tmp_path: Path, command: str, taken: str
) -> None:
    path = tmp_path / taken
    path.parent.mkdir(exist_ok=True)
    path.write_text("x") if taken in ("out", "out/videos") else path.mkdir()
    with pytest.raises(ConfigError, match=f"^--out: .*{taken}"):
        call(command, "--episodes", "1", "--out", str(tmp_path / "out"))
    assert not server.served
    with pytest.raises(ConfigError, match="--out: cannot write into the folder /proc/nope"):
        call(command, "--episodes", "1", "--out", "/proc/nope")
    assert not server.served


def test_what_cannot_be_paired_or_observed_is_said_before_anything_runs(server: ToyServer, tmp_path: Path) -> None:
    out = ("--out", str(tmp_path / "out"))
    with pytest.raises(ConfigError, match=r"--against: .*nowhere holds no episodes.json"):
        call("eval", "--against", str(tmp_path / "nowhere"), *out)
    (tmp_path / "episodes.json").write_text('[{"seed": 3, "success": true}]')
    with pytest.raises(InvalidInput, match="no seed in common"):
        call("eval", "--against", str(tmp_path), *out)
    with pytest.raises(UnknownName, match=r"'imag'\. Did you mean 'image'"):
        call("eval", "--keys", "imag", *out)
    assert not server.served
    assert not (tmp_path / "out").exists()


def test_a_run_may_be_paired_with_the_one_it_replaces(server: ToyServer, tmp_path: Path) -> None:
    out = ("--out", str(tmp_path))
    call("eval", "--episodes", "3", *out)
    server.lost = frozenset({S, S + 1})
    code, said = call("eval", "--episodes", "3", "--against", str(tmp_path), "--fresh", *out)
    assert code == 0
    assert "0 only here, 1 only there" in said


def test_demo_also_imagines(server: ToyServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = commands.imagine
    monkeypatch.setattr(
        commands, "imagine", lambda c, e, **k: real(c, e, **(k | {"pipeline": "toy", "keys": ("position",)}))
    )
    code, said = call("demo", "--episodes", "2", "--steps", "10", "--out", str(tmp_path))
    assert code == 0, said
    assert "imagined 10 steps" in said
    s = json.loads((tmp_path / "summary.json").read_text())
    assert s["imagined"]["steps"] == 10
    assert (tmp_path / "videos" / "imagined.mp4").exists()
    assert "inside the world model" in (tmp_path / "report.html").read_text()
