"""Environments of their own: where they are, when they count as there, how they are made."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from omni_loop import registry
from omni_loop.cli import main
from omni_loop.errors import ConfigError, MissingExtra, UnknownName
from omni_loop_envs.worker import environments
from omni_loop_envs.worker.environments import ENVIRONMENTS, Environment, State

TINY = Environment("tiny", "nothing at all", "json", python=((3, 10), (3, 99)))


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OMNI_LOOP_ENVS", str(tmp_path / "envs"))
    return tmp_path / "envs"


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Environment:
    """One more environment, which needs no package: made without a network."""
    (tmp_path / "requirements").mkdir()
    (tmp_path / "requirements" / "tiny.txt").write_text("# nothing\n", encoding="utf-8")
    monkeypatch.setattr(environments, "_REQUIREMENTS", tmp_path / "requirements")
    monkeypatch.setattr(environments, "ENVIRONMENTS", {"tiny": TINY})
    return TINY


def is_now(environment: Environment, state: State) -> bool:
    return environment.state is state


def test_they_lie_where_the_user_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert environments.cache() == tmp_path / "envs"
    monkeypatch.delenv("OMNI_LOOP_ENVS")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert environments.cache() == tmp_path / "cache" / "omni-loop" / "envs"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # to be ignored, says the XDG specification
    assert environments.cache() == Path.home() / ".cache" / "omni-loop" / "envs"


@pytest.mark.parametrize("name", sorted(ENVIRONMENTS))
def test_an_env_without_its_environment_says_how_to_get_it(name: str) -> None:
    with pytest.raises(MissingExtra, match=f"omni-loop envs install {name}$"):
        registry.build(registry.ENVS, name, {})


@pytest.mark.parametrize("name", sorted(ENVIRONMENTS))
def test_requirements_are_pinned_and_name_no_host(name: str) -> None:
    lines = ENVIRONMENTS[name].requirements.read_text(encoding="utf-8").splitlines()
    pinned = [line for line in lines if not line.startswith("#")]
    assert len(pinned) > 10
    assert all(re.fullmatch(r"[a-z0-9-]+==[0-9.a-z]+", line) for line in pinned)
    assert not re.search(r"https?:|--", "\n".join(lines))


def test_it_is_made_once_and_anew_when_its_requirements_change(tiny: Environment, tmp_path: Path) -> None:
    said: list[str] = []
    assert is_now(tiny, State.MISSING)
    assert environments.install("tiny", say=said.append)
    assert is_now(tiny, State.INSTALLED)
    program, *arguments = environments.command("tiny")
    assert Path(program) == tiny.interpreter
    assert arguments == ["-I", str(environments.SIDE)]
    done = subprocess.run(
        [program, "-I", "-c", "import sys; print(sys.prefix)"], capture_output=True, text=True, check=True
    )
    assert Path(done.stdout.strip()) == tiny.folder
    assert not environments.install("tiny", say=said.append)

    tiny.requirements.write_text("# nothing else\n", encoding="utf-8")
    assert is_now(tiny, State.OUTDATED)
    with pytest.raises(MissingExtra, match="made for other requirements: omni-loop envs install tiny"):
        environments.command("tiny")
    assert environments.install("tiny", say=said.append)
    assert is_now(tiny, State.INSTALLED)
    assert any(line.startswith("removing") for line in said)


def test_one_that_was_not_finished_does_not_count(tiny: Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.requirements.write_text("a-package-that-is-nowhere==0\n", encoding="utf-8")
    monkeypatch.setenv("UV_OFFLINE", "1")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ConfigError, match="pip install failed with exit code"):
        environments.install("tiny", say=lambda text: None)
    assert is_now(tiny, State.UNFINISHED)
    with pytest.raises(MissingExtra, match="which was not finished: omni-loop envs install tiny"):
        environments.command("tiny")


def test_without_uv_it_is_venv_and_pip(tiny: Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[str, ...]] = []

    def run(arguments: tuple[str, ...], what: str) -> None:
        ran.append(arguments)
        if what == "venv":
            subprocess.run([*arguments, "--without-pip"], check=True)

    monkeypatch.setattr(environments, "_uv", lambda: None)
    monkeypatch.setattr(environments, "_run", run)
    assert environments.install("tiny", say=lambda text: None)
    own, folder = str(tiny.interpreter), str(tiny.folder)
    assert ran[:2] == [
        (sys.executable, "-m", "venv", folder),
        (own, "-m", "pip", "install", "--no-deps", "-r", str(tiny.requirements)),
    ]
    assert is_now(tiny, State.INSTALLED)


def test_a_python_without_wheels_is_refused(tiny: Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    old = Environment("tiny", "", "json", python=((2, 7), (3, 5)))
    monkeypatch.setattr(environments, "ENVIRONMENTS", {"tiny": old})
    with pytest.raises(ConfigError, match=r"needs Python 2.7 to 3.5, and this is 3\.\d+: name another by --python"):
        environments.install("tiny", say=lambda text: None)
    assert is_now(tiny, State.MISSING)


def test_a_mark_that_is_none_does_not_count(tiny: Environment) -> None:
    tiny.folder.mkdir(parents=True)
    for text, state in (("", State.UNFINISHED), ("[]", State.OUTDATED), ("{}", State.OUTDATED)):
        (tiny.folder / "omni-loop.json").write_text(text, encoding="utf-8")
        assert is_now(tiny, state)


def test_one_whose_interpreter_is_gone_says_so(tiny: Environment) -> None:
    tiny.folder.mkdir(parents=True)
    mark = json.dumps({"requirements": tiny.digest})
    (tiny.folder / "omni-loop.json").write_text(mark, encoding="utf-8")
    assert is_now(tiny, State.BROKEN)
    with pytest.raises(MissingExtra, match="which has lost its interpreter: omni-loop envs install tiny"):
        environments.command("tiny")


def test_an_unknown_one_is_named() -> None:
    with pytest.raises(UnknownName, match=r"robosuit.*Did you mean 'robosuite'"):
        environments.install("robosuit")


def test_the_command_lists_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], home: Path
) -> None:
    monkeypatch.setattr(sys, "argv", ["omni-loop", "envs", "list"])
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as ended:
        main()
    out = capsys.readouterr().out
    assert not ended.value.code
    assert str(home) in out
    for name in ENVIRONMENTS:
        assert re.search(rf"{name} +not installed", out)
