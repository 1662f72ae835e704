from __future__ import annotations

import io
import socket
from pathlib import Path

import pytest
from rich.console import Console

from omni_loop import registry
from omni_loop.cli.check import check_all, check_port
from omni_loop.config import Listen
from omni_loop.errors import CheckpointError, Reason, ServerUnavailable
from omni_loop.loop.pipeline import CLIENT, Edge, Pipeline, Plan, StageDef
from omni_loop.messages import PayloadKind
from omni_loop.types import ArraySpec, Op, SessionSpec, StageKind

SPEC = SessionSpec(
    pipeline="toy",
    observations=(ArraySpec("x", "float32", (2,)),),
    action=ArraySpec("action", "float32", (2,)),
    horizon=4,
    execution_horizon=2,
    control_hz=10,
    ops=(Op.INFER,),
)
TOY = Pipeline(
    name="toy",
    spec=lambda: SPEC,
    stages=(StageDef("act", StageKind.ACT, "toy-act", {"steps": 2}),),
    edges=(Edge(CLIENT, "observation", "act", "observation", PayloadKind.OBSERVATION),),
    plans={Op.INFER: Plan(answer=("act",), chunk="act.chunk")},
)


@pytest.fixture(autouse=True)
def toy():
    with registry.registered(registry.PIPELINES, "toy", TOY), registry.registered(registry.STAGES, "toy-act", act):
        yield


def act(steps: int, checkpoint: str = "good") -> object:
    if checkpoint != "good":
        raise CheckpointError(f"no checkpoint at {checkpoint!r}")
    return object()


def check(tmp_path: Path, text: str) -> tuple[bool, str]:
    path = tmp_path / "d.yaml"
    path.write_text(text)
    console = Console(file=io.StringIO(), width=200)
    good = check_all([str(path)], console)
    assert isinstance(console.file, io.StringIO)
    return good, console.file.getvalue()


def test_a_good_deployment(tmp_path: Path) -> None:
    good, out = check(tmp_path, "pipelines: [toy]\nlisten: {port: 0}\n")
    assert good, out
    assert "bad" not in out
    assert "ok   stage toy/act" in out


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("pipelines: [toi]", "pipeline toi: no pipeline is called 'toi'. Did you mean 'toy'?"),
        ("pipelines: [toy]\nrunner: []", "configuration: "),
        (
            "pipelines: [toy]\nrunners: [{name: a, stages: [toy/akt]}]",
            "placement: runner 'a': no stage is called 'toy/akt'. Did you mean 'toy/act'?",
        ),
        (
            "pipelines: [toy]\nstage_options: {toy-akt: {}}",
            "stage options: stage_options: no stage here is made by 'toy-akt'. Did you mean 'toy-act'?",
        ),
        (
            "pipelines: [toy]\nstage_options: {toy-act: {step: 3}}",
            "stage toy/act: 'toy-act' takes no option 'step'. Did you mean 'steps'?",
        ),
        ("pipelines: [toy]\nstage_options: {toy-act: {checkpoint: lost}}", "stage toy/act: no checkpoint at 'lost'"),
    ],
)
def test_what_is_wrong_is_found_and_the_rest_still_checked(tmp_path: Path, text: str, line: str) -> None:
    good, out = check(tmp_path, text)
    assert not good
    assert f"bad  {line}" in out


def test_a_busy_port_is_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        with pytest.raises(ServerUnavailable, match="is taken by another program") as caught:
            check_port(Listen(port=server.getsockname()[1]))
        assert caught.value.reason == Reason.PORT_BUSY
    assert check_port(Listen(port=0)) == "any port"
