"""What is evaluated need not be PushT: four actions, a state alone, no score, and perhaps no way to draw it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

pytest.importorskip("gymnasium_robotics")

from omni_loop.errors import MissingExtra
from omni_loop.types import ActionChunk, Array, ArraySpec, Op, SessionSpec, TickResult
from omni_loop_envs import headless
from omni_loop_envs.fetch.env import FetchPickPlace
from omni_loop_envs.fetch.expert import FetchExpert
from omni_loop_sim_eval import media, report, summary
from omni_loop_sim_eval.console import table
from omni_loop_sim_eval.runner import Run, run_suite
from omni_loop_sim_eval.suite import load_suite

SPEC = SessionSpec(
    pipeline="lerobot-act",
    observations=tuple(spec for spec in FetchPickPlace.observations if spec.name != "image"),
    action=ArraySpec("action", "float32", (4,)),
    horizon=1,
    execution_horizon=1,
    control_hz=25,
    ops=(Op.INFER,),
)


class ExpertSession:
    """The expert behind the client's protocol."""

    id = "an-expert"
    spec = SPEC

    def __init__(self) -> None:
        self._expert = FetchExpert()

    def infer(self, arrays: Mapping[str, Array], *, step: int, executed: Any = None, frames: int = 0) -> TickResult:
        assert set(arrays) == {"state", "environment_state"}
        action = self._expert.act(arrays["state"])[None]
        return TickResult(step + 1, 1, ActionChunk(step + 1, step, action, 1))

    def close(self) -> None: ...


class ExpertClient:
    def open(self, pipeline: str, **options: Any) -> ExpertSession:
        return ExpertSession()

    def close(self) -> None: ...


@pytest.fixture(scope="module")
def run() -> Run:
    return run_suite(load_suite("fetch-act").changed(episodes=2), ExpertClient)  # type: ignore[arg-type]


def test_the_suite_runs_and_the_report_comes_out(run: Run, tmp_path: Path) -> None:
    assert [str(r.outcome) for r in run.results] == ["success", "success"], [r.reason for r in run.results]
    assert [r.actions.shape for r in run.results] == [(r.steps, 4) for r in run.results]
    numbers = summary.summarise(run)
    numbers["predictions"] = {"n": 0, "psnr_by_horizon": []}
    try:
        headless.backend()
    except MissingExtra:
        pytest.skip("neither OSMesa nor EGL on this machine")
    seen = media.collect(run, tmp_path / "videos")
    assert [v.path.name for v in seen.videos] == ["success-seed-2000000.mp4"]
    page = report.render(run, numbers, seen)
    assert "2/2" in page
    assert "No videos" not in page


def test_without_opengl_the_numbers_stand_and_the_page_says_why_there_are_no_videos(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(headless, "find_library", lambda name: None)
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    numbers = summary.summarise(run)
    seen = media.collect(run, tmp_path / "videos")
    assert seen.videos == []
    assert "apt-get install libosmesa6" in seen.missing[0]
    numbers["predictions"] = {"n": seen.compared, "psnr_by_horizon": seen.horizon}
    page = report.render(run, numbers, seen)
    assert "No videos: images of MuJoCo scenes need OSMesa or EGL" in page
    summary.write(tmp_path, numbers, run.results)
    assert json.loads((tmp_path / "summary.json").read_text())["successes"] == 2
    console = Console(record=True, width=120)
    console.print(table(numbers))
    assert "2/2" in console.export_text()


def test_the_suite_by_a_gymnasium_id_is_the_same_task() -> None:
    """Its keys, bounds, rate and every step, so that its outcomes are those of fetch-act."""
    ours, named = load_suite("fetch-act"), load_suite("fetch-act-gymnasium")
    assert (ours.keys, ours.max_steps, ours.pipeline) == (named.keys, named.max_steps, named.pipeline)
    a, b, expert = ours.make_env(), named.make_env(), FetchExpert()
    assert (a.control_hz, a.action.low, a.action.high) == (b.control_hz, b.action.low, b.action.high)
    for seed in (ours.first_seed, ours.first_seed + 1):
        seen, same = a.reset(seed, ours.keys), b.reset(seed, named.keys)
        expert.reset()
        while True:
            assert all(seen[key].tobytes() == same[key].tobytes() for key in ours.keys)
            action = expert.act(seen["state"])
            mine, its = a.step(action, ours.keys), b.step(action, named.keys)
            assert (mine.reward, mine.success, mine.done) == (its.reward, its.success, its.done)
            seen, same = dict(mine.arrays), dict(its.arrays)
            if mine.done:
                break
    a.close()
    b.close()
