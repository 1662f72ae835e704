"""The examples of docs/guide.md run as they are written, but for the port."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from rich.console import Console

from omni_loop.cli.check_config import check_config

from .blocks import ADDRESS, BLOCKS, FOLDER, GUIDE, lines, module


def said(block: str, address: str, capsys: pytest.CaptureFixture[str]) -> str:
    module("my_world.py")  # so that the folder is on the path
    exec(compile(BLOCKS[block].replace(ADDRESS, address), block, "exec"), {"__name__": "example"})
    return capsys.readouterr().out


def test_a_policy_and_a_world_take_less_than_60_lines_each() -> None:
    assert lines("my_policy.py", "policy.yaml", "use_policy.py") < 60
    assert lines("steady.py") < 60
    assert lines("my_world.py", "world.yaml", "use_world.py") < 60


def test_the_contracts_run_by_the_command_that_is_written(tmp_path: Path) -> None:
    (command,) = re.findall(r"`PYTHONPATH=\. uv run (pytest test_mine\.py)`", GUIDE.read_text())
    for name in ("my_policy.py", "my_world.py", "steady.py", "test_mine.py"):
        (tmp_path / name).write_text(BLOCKS[name])
    # As in a folder below this project, whose settings pytest then takes.
    settings = ("-c", str(GUIDE.parents[1] / "pyproject.toml"), "--rootdir", str(tmp_path), "-p", "no:cacheprovider")
    argv = [sys.executable, "-m", *command.split(), *settings]
    environment = {**os.environ, "PYTHONPATH": ".", "PYTHONSAFEPATH": "1"}  # as the script pytest, without the folder
    done = subprocess.run(argv, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


def test_the_policy_is_served(
    served: Callable[[str], AbstractContextManager[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    with served("policy.yaml") as address:
        assert said("use_policy.py", address, capsys) == "(16, 2) reach-1\n"


def test_the_world_is_served_and_its_dreams_are_an_environment(
    world_address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said("use_world.py", world_address, capsys) == "(8, 32, 32, 3)\n"
    assert said("imagine.py", world_address, capsys) == "(4, 32, 32, 3) True\n"


def test_a_notebook_registers_and_serves_in_one_process(capsys: pytest.CaptureFixture[str]) -> None:
    assert said("notebook.py", "", capsys) == "['reach']\n"


@pytest.mark.parametrize("deployment", ["policy.yaml", "world.yaml"])
def test_check_config_knows_modules_that_nobody_packaged(deployment: str) -> None:
    module("my_world.py")
    out = io.StringIO()
    assert check_config([str(FOLDER / deployment)], Console(file=out, width=200)), out.getvalue()
    text = (FOLDER / deployment).read_text().replace("speed", "sped").replace("my_world:", "my_word:")
    (FOLDER / f"wrong-{deployment}").write_text(text)
    out = io.StringIO()
    assert not check_config([str(FOLDER / f"wrong-{deployment}")], Console(file=out, width=200))
    assert ("Did you mean 'speed'?" in out.getvalue()) == (deployment == "policy.yaml")
    assert ("is its folder on the PYTHONPATH?" in out.getvalue()) == (deployment == "world.yaml")
