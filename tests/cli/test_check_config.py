"""``omni-loop check config`` builds nothing, and ``check`` without arguments forgives what a machine lacks."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from omni_loop import registry
from omni_loop.cli import check, check_config
from omni_loop.config import shipped
from omni_loop.errors import CheckpointError, MissingExtra

from .test_check import TOY, Act, act, toy  # noqa: F401  (a fixture)

Check = Callable[[list[str], Console], bool]


def ran(check: Check, names: list[str]) -> tuple[bool, str]:
    out = io.StringIO()
    return check(names, Console(file=out, width=400)), out.getvalue()


def never(steps: int, checkpoint: str = "", device: str = "cpu") -> Act:
    pytest.fail("a stage was built")


def template(name: str, size: int = 4, state: str = "here") -> object:
    if state == "lost":
        raise CheckpointError("no checkpoint at 'models/x'")
    if state == "no extra":
        raise MissingExtra("'made' needs the package lerobot")
    return TOY


@pytest.fixture(autouse=True)
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with registry.registered(registry.TEMPLATES, "made", template):
        yield


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], str]:
    def file(text: str) -> str:
        path = tmp_path / "mine.yaml"
        path.write_text(text)
        return str(path)

    return file


def test_everything_shipped_is_well_formed() -> None:
    good, out = ran(check_config.check_config, [])
    assert good, out
    assert "bad" not in out
    assert all(name in out for name in shipped("serve"))
    assert "ok   options of pusht/context" in out
    assert "ok   placement on main" in out


def test_nothing_is_built(write: Callable[[str], str]) -> None:
    with registry.registered(registry.STAGES, "never", never):
        path = write("pipelines: [toy]\nstage_options: {toy-act: {checkpoint: lost}}")
        good, out = ran(check_config.check_config, [path])
        assert good, out


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("pipelines: [toi]", "pipeline toi: no pipeline is called 'toi'. Did you mean 'toy'?"),
        ("pipelines: [toy]\nrunner: []", "configuration: "),
        (
            "pipelines: [{name: toy, template: maid}]",
            "pipeline toy: no template is called 'maid'. Did you mean 'made'?",
        ),
        (
            "pipelines: [{name: toy, template: made, options: {sise: 3}}]",
            "pipeline toy: 'made' takes no option 'sise'. Did you mean 'size'?",
        ),
        ("pipelines: [{name: other, template: made}]", "pipeline other: "),
        (
            "pipelines: [toy]\nstage_options: {toy-act: {step: 3}}",
            "options of toy/act: 'toy-act' takes no option 'step'",
        ),
        (
            "pipelines: [toy]\nstage_options: {toy-act: {steps: x}}",
            "options of toy/act: option 'steps' of 'toy-act' is",
        ),
        ("pipelines: [toy]\nstage_options: {toy-akt: {}}", "stage options: stage_options: no stage here"),
        ("pipelines: [toy]\nrunners: [{name: a, stages: [toy/akt]}]", "placement: runner 'a': no stage is called"),
        ("pipelines: [toy]\nrunners: [{name: a}, {name: b, stages: []}]", "placement: runner 'b' has no stage left"),
        ("pipelines: [toy]\nedges: {toy/client.observation>act.x: shm}", "connectors: edges: no edge is called"),
        (
            "pipelines: [{name: toy, template: made, options: {state: no extra}}]",
            "pipeline toy: 'made' needs the package",
        ),
    ],
)
def test_what_is_wrong_is_found(write: Callable[[str], str], text: str, line: str) -> None:
    good, out = ran(check_config.check_config, [write(text)])
    assert not good
    assert f"bad  {line}" in out


def test_weights_that_are_not_here_are_said_and_the_rest_is_checked(write: Callable[[str], str]) -> None:
    lost = "pipelines: [{name: far, template: made, options: {state: lost}}, toy]\n"
    good, out = ran(check_config.check_config, [write(lost)])
    assert good
    assert "weights not here: pipeline far: no checkpoint at 'models/x'" in out
    assert "ok   options of toy/act" in out
    good, out = ran(check_config.check_config, [write(f"{lost}stage_options: {{toy-act: {{step: 3}}}}")])
    assert not good
    assert "takes no option 'step'" in out


def test_an_extra_that_a_stage_needs_is_said_without_building_it(
    monkeypatch: pytest.MonkeyPatch, write: Callable[[str], str]
) -> None:
    path = write("pipelines: [toy]")
    monkeypatch.setattr(act, "needs", ("lerobot", "json"), raising=False)
    monkeypatch.setattr(check_config, "find_spec", lambda module: None if module == "lerobot" else "found")
    good, out = ran(check_config.check_config, [path])
    assert good, out
    assert "extra not here: packages of toy/act: lerobot (uv sync --inexact --extra lerobot)" in out
    monkeypatch.setattr(check_config, "find_spec", lambda module: "found")
    good, out = ran(check_config.check_config, [path])
    assert good
    assert "not here" not in out
    assert "ok   packages of toy/act" in out


@pytest.mark.parametrize(
    ("state", "says"), [("lost", "weights not here: pipeline toy"), ("no extra", "not here: pipeline toy")]
)
def test_check_of_everything_forgives_what_this_machine_lacks(
    monkeypatch: pytest.MonkeyPatch, write: Callable[[str], str], state: str, says: str
) -> None:
    path = write(f"pipelines: [{{name: toy, template: made, options: {{state: {state}}}}}]\nlisten: {{port: 0}}")
    started: list[Any] = []
    monkeypatch.setattr(check, "_start", lambda deployment: started.append(deployment))
    monkeypatch.setattr(check, "shipped", lambda folder: [path])
    good, out = ran(check.check_all, [])
    assert good, out
    assert says in out
    assert "bad" not in out
    good, out = ran(check.check_all, [path])
    assert not good
    assert "bad  pipeline toy" in out
    assert not started


def test_a_corrupt_checkpoint_of_ours_is_never_forgiven(
    monkeypatch: pytest.MonkeyPatch, write: Callable[[str], str]
) -> None:
    path = write("pipelines: [toy]\nlisten: {port: 0}\nstage_options: {toy-act: {checkpoint: lost}}")
    monkeypatch.setattr(check, "shipped", lambda folder: [path])
    good, out = ran(check.check_all, [])
    assert not good
    assert "bad  stage toy/act: no checkpoint at 'lost'" in out
