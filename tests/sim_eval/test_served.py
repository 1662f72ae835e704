from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from omni_loop.config import PipelineConfig, load_deployment
from omni_loop.errors import ConfigError
from omni_loop.record import outcomes
from omni_loop.types import ArraySpec, SessionSpec
from omni_loop_sim_eval.episodes import EpisodeResult, Outcome
from omni_loop_sim_eval.runner import Run
from omni_loop_sim_eval.served import deployment_of, note_outcomes
from omni_loop_sim_eval.suite import load_suite

from .test_commands import call, server  # noqa: F401  (a fixture)
from .toy import ToyServer, toy_suite


def test_another_checkpoint_is_served_and_all_else_stays() -> None:
    suite = load_suite("fetch-act")
    shipped, mine = deployment_of(suite), deployment_of(suite, checkpoint="out/mine")
    (before,), (after,) = shipped.pipelines, mine.pipelines
    assert isinstance(before, PipelineConfig)
    assert isinstance(after, PipelineConfig)
    assert before.options["checkpoint"] == "fetch-act"
    assert after.options == {**before.options, "checkpoint": "out/mine"}
    assert mine.model_copy(update={"pipelines": shipped.pipelines}) == shipped


def test_sessions_share_no_batch_unless_the_suite_says_so() -> None:
    """Neighbours in a batch change the last bits, and a result is a function of suite and seed alone."""
    suite = load_suite("pusht-image")
    assert {r.max_batch for r in load_deployment(suite.deployment).runners} != {1}
    assert {r.max_batch for r in deployment_of(suite).runners} == {1}
    assert {r.max_batch for r in deployment_of(suite.changed(batch=8)).runners} == {8}
    usual = {r.max_batch for r in load_deployment(suite.deployment).runners}
    assert {r.max_batch for r in deployment_of(suite.changed(batch=1024)).runners} == usual, "never more"


def test_a_pipeline_that_no_template_made_has_no_other_checkpoint() -> None:
    with pytest.raises(ConfigError, match="'pusht' of the deployment 'pusht' is not made by a template"):
        deployment_of(load_suite("pusht-image"), checkpoint="out/mine")


def test_a_recording_goes_where_it_was_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert deployment_of(load_suite("fetch-act"), record=Path("here")).record.folder == str(tmp_path / "here")
    assert deployment_of(load_suite("fetch-act")).record.folder is None


def test_how_episodes_ended_is_said_by_session(tmp_path: Path) -> None:
    nothing = np.zeros((0, 2), np.float32)
    results = [
        EpisodeResult(0, 7, Outcome.SUCCESS, 3, 0.5, nothing, session="a"),
        EpisodeResult(1, 8, Outcome.ERROR, 0, 0.0, nothing, session="b"),
        EpisodeResult(2, 9, Outcome.ERROR, 0, 0.0, nothing),  # no session was opened
    ]
    action = ArraySpec("action", "float32", (2,))
    run = Run(toy_suite(), results, SessionSpec("toy", (), action, 1, 1, 10, ()))
    note_outcomes(tmp_path, run)
    said = json.loads((tmp_path / outcomes.FILE).read_text())
    assert said == {
        "a": {"success": True, "outcome": "success", "seed": 7, "score": 0.5},
        "b": {"success": False, "outcome": "error", "seed": 8, "score": 0.0},
    }


def test_a_recorded_evaluation_observes_every_step(server: ToyServer, tmp_path: Path) -> None:  # noqa: F811
    code, said = call(
        "eval", "toy", "--episodes", "1", "--videos", "none", "--record", str(tmp_path / "r"), "--out", str(tmp_path)
    )
    assert code == 0, said
    steps = [step for _, step, _, _ in server.heard]
    assert steps == list(range(len(steps)))
    assert len(steps) > 5
    assert (tmp_path / "r" / outcomes.FILE).exists()
    assert "every step observed: 1 action of a chunk executed, not the suite's 4" in said
    assert "1 of 8 actions of a chunk is executed" in (tmp_path / "report.html").read_text()
    assert {"transport", "server"} <= {line.split()[0] for line in said.replace("│", " ").splitlines() if line.split()}
    _, other = call("eval", "toy", "--episodes", "1", "--videos", "none", "--out", str(tmp_path / "other"))
    assert "every step observed" not in other


def test_a_server_that_runs_already_is_what_it_is(server: ToyServer, tmp_path: Path) -> None:  # noqa: F811
    for option in ("--record", "--checkpoint"):
        code, said = call("eval", "toy", option, str(tmp_path), "--address", "127.0.0.1:1", "--out", str(tmp_path))
        assert code == 2
        assert "not of --address" in said
