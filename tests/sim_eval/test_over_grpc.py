"""The evaluator against a real server process; only what stands behind the server is a toy."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from omni_loop import registry
from omni_loop.client import connect
from omni_loop.config import Deployment
from omni_loop.env import EVALUATION_SEED
from omni_loop.errors import UnknownName
from omni_loop.serve.background import BackgroundServer
from omni_loop.types import Array, ArraySpec
from omni_loop_sim_eval.commands import eval_command
from omni_loop_sim_eval.episodes import EpisodeResult
from omni_loop_sim_eval.runner import run_suite
from omni_loop_sim_eval.suite import EvalSuite

from .toy import ToyEnv, draw, toy_suite

IMAGE = ArraySpec("image", "uint8", (8, 8, 3), low=0, high=255)
AGENT = ArraySpec("agent_pos", "float32", (2, 2), unit="px")


class SmallEnv(ToyEnv):
    """The toy env with the observations the toy server takes."""

    name = "small"
    observations = (IMAGE, AGENT)

    def _array(self, key: str) -> Array:
        if key == "image":
            return draw(self.position, 8)
        return np.clip(np.stack([self.position, self.position]), 0, 512).astype(np.float32)


class SmallServer(BackgroundServer):
    module = "omni_loop.testing.toy_server"


@pytest.fixture(autouse=True)
def small_env() -> Iterator[None]:
    with registry.registered(registry.ENVS, "small", SmallEnv):
        yield


def suite(**fields: object) -> EvalSuite:
    base = {"env": "small", "keys": ["image", "agent_pos"], "max_steps": 10, "state_keys": [], "first_seed": 10}
    return toy_suite(**(base | fields))


def test_what_the_server_answers_is_executed_and_timed() -> None:
    with SmallServer(Deployment(pipelines=("toy",))) as server:
        run = run_suite(suite(workers=2), lambda: connect(server.address))
    assert [(r.outcome, r.steps, r.reason) for r in run.results] == [("failure", 10, "")] * 4
    for r in run.results:
        # Row i of the server's chunk of seq n is [seed + n, 100 n + i]; two rows of each are executed.
        want = [[r.seed + n, 100 * n + i] for n in range(1, 6) for i in range(2)]
        np.testing.assert_array_equal(r.actions, np.minimum(want, 512))
        assert len(r.ticks) == 5
        for tick in r.ticks:
            stages = {"act": 1.5} | ({"frames": 1.5} if tick.frames else {})
            assert (tick.total_ms, tick.model_ms, tick.stages_ms) == (2.0 * len(stages), 1.5 * len(stages), stages)
    frames = [(r.episode, p.step, len(p.frames)) for r in run.results for p in r.predictions]
    assert frames == [(0, 2, 2), (0, 6, 2), (1, 2, 2), (1, 6, 2)], "4 asked for, 2 executed"


def test_a_server_that_dies_ends_episodes_not_the_run() -> None:
    with SmallServer(Deployment(pipelines=("toy",))) as server:

        def on_result(result: EpisodeResult) -> None:
            server.stop()

        run = run_suite(suite(episodes=20), lambda: connect(server.address, timeout_s=5), on_result)
    assert len(run.results) == 20
    assert run.results[0].outcome == "failure"
    assert run.results[-1].outcome == "error"
    assert server.address in run.results[-1].reason


def test_mistakes_are_said_by_the_server_before_the_first_step() -> None:
    with (
        SmallServer(Deployment(pipelines=("toy",))) as server,
        pytest.raises(UnknownName, match=r"'toyy'.*'toy'"),
    ):
        run_suite(suite(pipeline="toyy"), lambda: connect(server.address))


def test_eval_starts_and_stops_its_own_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BackgroundServer, "module", SmallServer.module)
    path = tmp_path / "small.yaml"
    path.write_text(
        "name: small\nenv: small\npipeline: toy\ndeployment: pusht\nkeys: [image, agent_pos]\n"
        f"first_seed: {EVALUATION_SEED}\nepisodes: 2\nmax_steps: 6\nvideos: none\n"
    )
    app = typer.Typer()
    app.command()(eval_command)
    result = CliRunner().invoke(app, [str(path), "--out", str(tmp_path / "out")], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert (summary["episodes"], summary["successes"], summary["errors"]) == (2, 0, 0)
    assert summary["tick_ms"]["p50"] > 0
