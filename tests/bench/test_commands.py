"""``omni-loop bench`` from outside."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from omni_loop.cli import main
from omni_loop_bench import rows
from omni_loop_bench.rows import Bar, Bench, Measured, Settings

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["omni-loop", "bench", *arguments])
        code: object = 0
        try:
            main()
        except SystemExit as e:
            code = e.code or 0
        assert isinstance(code, int)
        return code, *capsys.readouterr()

    return run


@contextmanager
def _subject(settings: Settings) -> Iterator[Settings]:
    yield settings


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Bench[Settings]:
    """A bench beside the shipped ones, with a row below its bar."""
    bench: Bench[Settings] = Bench("tick", _subject)

    @bench.row("s", Bar("ours", ">=", 3))
    def low(settings: Settings) -> Measured:
        """Too low."""
        return Measured(2)

    @bench.row("s", Bar("ours", ">=", 1))
    def high(settings: Settings) -> Measured:
        """High enough."""
        return Measured(2)

    monkeypatch.setattr(rows, "find", lambda name: bench)
    return bench


def test_without_a_name_it_lists_every_row(run: Run) -> None:
    code, out, _ = run()
    assert code == 0
    for text in ("world", "shuffled_action", "ratio >= 4", "idle_cpu", "ours < 0.5", "kv_blocks", "done_f1"):
        assert text in out


def test_wrong_names_are_named(run: Run) -> None:
    assert run("serv") == (2, "", "error: no bench is called 'serv'. Did you mean 'serve'?\n")
    code, _, err = run("world", "--rows", "qualty")
    assert (code, err) == (2, "error: bench 'world' has no row 'qualty'. Did you mean 'quality'?\n")


def test_only_what_can_be_seen_makes_a_picture(run: Run, tmp_path: Path) -> None:
    code, _, err = run("tick", "--picture", str(tmp_path / "a.png"))
    assert (code, err) == (2, "error: bench 'tick' makes no picture; 'state' and 'world' do\n")


def test_a_missing_checkpoint_is_one_line(run: Run, tmp_path: Path) -> None:
    code, _, err = run("world", "--rows", "kv", "--checkpoints", str(tmp_path))
    assert code == 2
    assert err.startswith("error: no checkpoint at 'world'")


@pytest.mark.parametrize(
    ("name", "arguments", "text"),
    [
        ("context", ("--checkpoints", "{tmp}/nothere"), "--checkpoints: no folder at {tmp}/nothere"),
        ("context", ("--checkpoints", "{tmp}"), "no checkpoint at 'codec': config.json is missing"),
        ("world", ("--picture", "{tmp}/a.gif"), "--picture: {tmp}/a.gif does not end in .png"),
        ("world", ("--json", "{tmp}"), "--json: {tmp} is a folder, wanted the name of a file"),
    ],
)
def test_paths_are_judged_before_anything_is_made(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, arguments: tuple[str, ...], text: str
) -> None:
    monkeypatch.chdir(tmp_path)  # without demonstrations
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    code, _, err = run(name, *(a.format(tmp=tmp_path) for a in arguments))
    assert (code, err) == (2, f"error: {text.format(tmp=tmp_path)}\n")
    assert not (tmp_path / "cache").exists()


def test_figures_are_seen_also_when_their_file_cannot_be_written(
    run: Run, toy: Bench[Settings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, results: object) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(rows, "write", full)
    code, out, err = run("tick", "--json", str(tmp_path / "a.json"))
    assert (code, err) == (2, f"error: No space left on device: {tmp_path / 'a.json'}\n")
    assert "high" in out


def test_a_row_below_its_bar_fails_the_run(run: Run, toy: Bench[Settings], tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    code, out, _ = run("tick", "--json", str(file))
    assert code == 1
    assert "fail" in out
    assert "pass" in out
    assert [row["pass"] for row in json.loads(file.read_text())] == [False, True]
    assert run("tick", "--no-fail")[0] == 0
    assert run("tick", "--rows", "high")[0] == 0
    assert run("tick", "--quick")[0] == 0
