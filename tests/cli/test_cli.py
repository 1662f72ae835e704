"""The command line from outside: exit codes, one red line, help."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from omni_loop import registry
from omni_loop.cli import main
from omni_loop.errors import ConfigError


class Ran:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> object:
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: str) -> Ran:
        monkeypatch.setattr(sys, "argv", ["omni-loop", *arguments])
        code: object = 0
        try:
            main()
        except SystemExit as e:
            code = e.code or 0
        assert isinstance(code, int)
        return Ran(code, *capsys.readouterr())

    return run


@pytest.fixture
def busy_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_help_names_every_command(run) -> None:
    ran = run("--help")
    assert ran.code == 0
    for command in ("serve", "demo", "eval", "train", "replay", "export", "view", "bench", "check"):
        assert f" {command} " in ran.out
    assert "Not available" not in ran.out


@pytest.mark.parametrize("command", ["serve", "demo", "eval", "train", "replay", "export", "view", "bench", "check"])
def test_every_command_has_help(run, command: str) -> None:
    ran = run(command, "--help")
    assert ran.code == 0
    assert f"omni-loop {command}" in ran.out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["serve", "psht"], "no shipped deployment is called 'psht'. Did you mean 'pusht'?"),
        (
            ["serve", "pusht", "--port", "70000"],
            "error: the command line: port: Input should be less than or equal to 65535",
        ),
        (["serve", "pusht", "--host", "0.0.0.0"], "without a token or TLS"),
        (["serve", "nowhere/x.yaml"], "cannot read nowhere/x.yaml"),
        (["train", "codek"], "no part is called 'codek'. Did you mean 'codec'?"),
        (["train", "codec", "--recipe", "nowhere/x.yaml"], "cannot read nowhere/x.yaml"),
    ],
)
def test_what_a_user_got_wrong_is_one_line(run, arguments: list[str], text: str) -> None:
    ran = run(*arguments)
    assert ran.code == 2
    assert ran.err.startswith("error: ")
    assert ran.err.count("\n") == 1
    assert text in ran.err


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (["eval", "--out", "{file}"], "--out"),
        (["eval", "--out", "/proc/nope"], "--out"),
        (["demo", "--out", "{file}/x"], "--out"),
        (["bench", "tick", "--json", "{file}/x.json"], "--json"),
        (["bench", "world", "--picture", "{file}/x.png"], "--picture"),
        (["train", "codec", "--out", "{file}"], "--out"),
        (["train", "all", "--data", "{file}"], "--data"),
        (["train", "all", "--data", "{file}/x/y"], "--data"),
        (["train", "all", "--data", "/proc/nope"], "--data"),
    ],
)
def test_a_bad_path_is_one_line_that_names_the_option(
    run, arguments: list[str], option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "file"
    file.write_text("x")
    ran = run(*(a.replace("{file}", str(file)) for a in arguments))
    assert ran.code == 2
    assert ran.err.startswith(f"error: {option}: ")
    assert ran.err.count("\n") == 1
    assert not (tmp_path / "data").exists()
    assert file.read_text() == "x"


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (OSError(28, "No space left on device", "/x/y"), "error: No space left on device: /x/y\n"),
        (OSError("short write"), "error: short write\n"),
        (TimeoutError(), "error: TimeoutError\n"),
    ],
)
def test_what_the_system_refuses_meanwhile_is_one_line(
    run, error: OSError, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(name: str) -> None:
        raise error

    monkeypatch.setattr("omni_loop.config.load_deployment", refuse)
    ran = run("serve", "pusht")
    assert (ran.code, ran.err) == (2, line)


def test_a_wrong_key_in_a_recipe_is_named(run, tmp_path: Path) -> None:
    recipe = tmp_path / "x.yaml"
    recipe.write_text("stepps: 3\nbatch: 2\nlr: 0.1\ndemos: pusht\n")
    ran = run("train", "codec", "--recipe", str(recipe))
    assert ran.code == 2
    assert "unknown key 'stepps'. Did you mean 'steps'?" in ran.err


def test_unknown_commands_are_answered_with_the_nearest(run) -> None:
    ran = run("serv")
    assert ran.code == 2
    assert "Did you mean 'serve'?" in ran.err


def test_a_busy_port_is_said_before_anything_is_loaded(run, busy_port: int) -> None:
    ran = run("serve", "pusht", "--port", str(busy_port))
    assert ran.code == 2
    assert f"port {busy_port} on 127.0.0.1 is busy" in ran.err
    assert "serving" not in ran.out


def test_a_missing_extra_is_named(run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "typer", None)
    monkeypatch.delitem(sys.modules, "omni_loop.cli.app", raising=False)
    ran = run("--help")
    assert ran.code == 2
    how = "install omni-loop[serve], or in a clone: uv sync --inexact --extra serve"
    assert ran.err == f"error: needs the package typer, which is not installed: {how}\n"


def test_a_command_that_cannot_be_loaded_does_not_hide_the_others(run) -> None:
    def load(group: str, name: str) -> object:
        raise ConfigError("bench is broken")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "load", load)
        ran = run("--help")
        assert ran.code == 0
        assert " serve " in ran.out
        assert run("bench").err == "error: bench is broken\n"


def test_version(run) -> None:
    assert run("--version").out.startswith("omni-loop 0.")


def test_check_board_runs_what_is_asked_for_and_fails_with_it(run, monkeypatch, tmp_path: Path) -> None:
    from omni_loop.testing import board

    def lines(names, seed, scale):
        yield board.Line("F7", seed, scale, "c0ffee", 1.0, "faults", seed != 2)
        yield board.Line("L3", seed, scale, "c0ffee", None, "MB", None)

    monkeypatch.setattr(board, "run", lines)
    path = tmp_path / "board.jsonl"
    good = run("check", "board", "--rows", "F7", "--seed", "1", "--scale", "full", "--json", str(path))
    assert (good.code, good.err) == (0, "")
    assert good.out.splitlines() == path.read_text().splitlines()
    first, second = (json.loads(line) for line in good.out.splitlines())
    assert (first["row"], first["seed"], first["number"], first["pass"], first["scale"]) == ("F7", 1, 1.0, True, "full")
    assert (second["number"], second["pass"]) == (None, None)
    assert run("check", "board", "--seed", "2").code == 1
    unknown = run("check", "board", "--rows", "F99")
    assert unknown.code == 2
    assert "the board has no row 'F99'" in unknown.err
    nowhere = run("check", "board", "--json", "/proc/nowhere/x")
    assert nowhere.code == 2
    assert "--json" in nowhere.err


def test_check_board_makes_a_table_of_lines(run, tmp_path: Path) -> None:
    from omni_loop.testing import board

    path, out = tmp_path / "board.jsonl", tmp_path / "new" / "board.md"
    path.write_text(board.Line("F7", 1, "full", "c0ffee", 1.0, "faults", True).json() + "\n")
    assert run("check", "board", "--table", str(path)).out.startswith("# The reliability board")
    assert run("check", "board", "--table", str(path), "--out", str(out)).code == 0
    assert "| F7 |" in out.read_text()
    bad = run("check", "board", "--table", str(tmp_path / "none"))
    assert bad.code == 2
    assert "--table: cannot read" in bad.err


def test_a_deployment_is_no_board(run) -> None:
    ran = run("check", "boart")
    assert ran.code == 2
    assert "no shipped deployment is called 'boart'" in ran.out


def test_check_without_arguments_is_of_everything_shipped(run: object, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[list[str]] = []
    for what in ("check.check_all", "check_config.check_config"):
        monkeypatch.setattr(f"omni_loop.cli.{what}", lambda names, console: checked.append(list(names)) or True)
    for own in ((), ("config",)):
        assert run("check", *own).code == 0  # type: ignore[operator]
        assert run("check", *own, "demo", "pusht").code == 0  # type: ignore[operator]
    assert checked == [[], ["demo", "pusht"]] * 2


def test_a_board_row_that_is_asked_for_and_not_built_is_no_pass(run: object, monkeypatch: pytest.MonkeyPatch) -> None:
    from omni_loop.testing import board

    monkeypatch.setattr(board, "ROWS", (board.Row("F1", "not built"),))
    ran = run("check", "board", "--rows", "F1")  # type: ignore[operator]
    assert ran.code == 1
    assert '"pass": null' in ran.out
