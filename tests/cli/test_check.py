from __future__ import annotations

import io
import re
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from rich.console import Console

from omni_loop import registry
from omni_loop.cli.check import check_all, check_port
from omni_loop.config import Listen
from omni_loop.errors import CheckpointError, Reason, ServerUnavailable
from omni_loop.loop.pipeline import CLIENT, Edge, Pipeline, Plan, StageDef
from omni_loop.messages import PayloadKind
from omni_loop.stage import Outputs, StageItem, StateSpec, TensorSpec
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


class Act:
    """Has a state of 4 kB per session, and may fail when it first runs."""

    kind, revision = StageKind.ACT, "toy"

    def __init__(self, fails: str) -> None:
        self.fails = fails

    def state_specs(self) -> Mapping[str, StateSpec]:
        return {"memory": TensorSpec((1024,))}

    def warm_up(self) -> None:
        if self.fails == "at start":
            raise ZeroDivisionError("nothing to divide by")

    def run(self, items: Sequence[StageItem]) -> Sequence[Outputs | Exception]:
        raise NotImplementedError


def act(steps: int, checkpoint: str = "good", fails: str = "", device: str = "cpu") -> object:
    if checkpoint != "good":
        raise CheckpointError(f"no checkpoint at {checkpoint!r}")
    if fails == "to load":
        raise TypeError("unsupported operand")
    torch.empty(0, device=device)
    return Act(fails)


def check(tmp_path: Path, *texts: str) -> tuple[bool, str]:
    paths = [tmp_path / f"{number}.yaml" for number in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text)
    console = Console(file=io.StringIO(), width=400)
    good = check_all([str(path) for path in paths], console)
    assert isinstance(console.file, io.StringIO)
    return good, console.file.getvalue()


def test_a_good_deployment(tmp_path: Path) -> None:
    good, out = check(tmp_path, "pipelines: [toy]\nlisten: {port: 0}\n")
    assert good, out
    assert "bad" not in out
    assert "ok   start of toy/act" in out


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("runners: [{name: a, device: nowhere}]", ".*nowhere"),
        ("pools: {budget_bytes: 1000}", ".*budget"),
        ("runners: [{name: a}, {name: b, stages: []}]", "runner 'b' has no stage left to run"),
        ("stage_options: {toy-act: {fails: at start}}", ".*ZeroDivisionError"),
    ],
)
def test_what_would_not_start_is_not_ok(tmp_path: Path, text: str, error: str) -> None:
    good, out = check(tmp_path, f"pipelines: [toy]\nlisten: {{port: 0}}\n{text}")
    assert not good
    assert re.search(f"bad  start: {error}", out), out


def test_what_nobody_expected_is_a_failure_of_that_deployment_alone(tmp_path: Path) -> None:
    broken = "pipelines: [toy]\nlisten: {port: 0}\nstage_options: {toy-act: {fails: to load}}"
    good, out = check(tmp_path, broken, "pipelines: [toy]\nlisten: {port: 0}")
    assert not good
    assert "bad  stage toy/act: TypeError: unsupported operand" in out
    assert "ok   port" in out
    second = out[out.index("1.yaml") :]
    assert "ok   start of toy/act" in second
    assert "bad" not in second


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
