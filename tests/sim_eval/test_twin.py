"""Twin experiments end to end, on a toy whose world model is perfect, or is not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import typer
from pydantic import ValidationError
from typer.testing import CliRunner

from omni_loop import registry
from omni_loop.errors import ConfigError, InvalidInput, UnknownName
from omni_loop_sim_eval import commands_twin, horizon, twin, twin_page
from omni_loop_sim_eval.branches import branches, expert_of, record
from omni_loop_sim_eval.play import InSimulator, InWorld, play
from omni_loop_sim_eval.plays import Plays
from omni_loop_sim_eval.store import OtherRun
from omni_loop_sim_eval.suite import EvalSuite
from omni_loop_sim_eval.twin_config import TwinConfig, load_twin

from .walk import SUCCESS, PolicySession, S, WalkEnv, Walkers, WalkExpert, _Policy, closeness, config

KEYS = ("image", "agent_pos")
SUITE = EvalSuite(
    name="walk", env="walk", pipeline="walk", deployment="walk", keys=KEYS, max_steps=60, prompt="go to the middle"
)


@pytest.fixture(autouse=True)
def walk(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(twin, "load_suite", lambda name: SUITE)
    with (
        registry.registered(registry.ENVS, "walk", WalkEnv),
        registry.registered(registry.EXPERTS, "walk", WalkExpert),
        registry.registered(registry.SCENE_SCORES, "walk", closeness),
    ):
        yield


def run(folder: Path, walkers: Walkers, **fields: object) -> twin_page.Findings:
    chosen = config(**fields)
    plays = Plays(folder, chosen.fingerprint())
    made = twin.Twin(chosen, plays, walkers, lambda text: None)
    steps = made.run()
    made.close()
    return twin_page.findings(chosen, plays, steps, "not measured: a test")


def test_a_branch_begins_where_its_run_stood() -> None:
    env = WalkEnv()
    run_ = record(env, expert_of(env), S, KEYS)
    assert run_.success
    assert len(run_) == 18  # 150 px, at 8 px a step, to nearer than 8 px
    assert run_.arrays["image"].shape == (19, 16, 16, 3)
    assert run_.scores[0] == run_.scores[1] < run_.scores[2]
    several = branches(run_, 3, seen=4)
    assert several == branches(run_, 3, seen=4), "drawn by the seed"
    for branch in several:
        assert 3 <= branch.step <= 16
        here = InSimulator(env, KEYS, S, branch)
        assert (here.observe()["image"] == run_.arrays["image"][branch.step]).all()
        assert here.scores == [run_.scores[branch.step]]
        shown, executed = branch.shown(["image"])
        assert len(shown["image"]) == 4
        assert len(executed) == 3
        assert (shown["image"][-1] == run_.arrays["image"][branch.step]).all()
    assert len(branches(run_, 99, seen=4)) == 14, "no more than there are"


def test_a_play_is_scored_from_the_start_and_looks_at_its_end() -> None:
    env = WalkEnv()
    made = play(PolicySession(_Policy(Walkers(), 1.0)), InSimulator(env, KEYS, S), 60, bounds=(0, 512))
    assert made.success
    assert len(made.scores) == 1 + 18
    assert [s.step for s in made.said] == [0, 4, 8, 12, 16, 18]
    assert made.said[-1].score == made.scores[-1] > SUCCESS
    assert made.said[-1].done == 0.9
    short = play(PolicySession(_Policy(Walkers(), 1.0)), InSimulator(env, KEYS, S), 6, bounds=(0, 512))
    assert (len(short.scores), short.success) == (7, False)


@pytest.mark.parametrize("speed", [1.0, 0.3, -0.5])
def test_a_perfect_world_gives_what_the_simulator_gives(speed: float) -> None:
    env, walkers = WalkEnv(), Walkers()
    branch = branches(record(env, expert_of(env), S, KEYS), 1, seen=3)[0]
    real = play(PolicySession(_Policy(walkers, speed)), InSimulator(env, KEYS, S, branch), 12, bounds=(0, 512))
    world = InWorld(walkers.open("w"), branch, KEYS, closeness, "image", "agent_pos", (0, 512), SUCCESS)
    imagined = play(PolicySession(_Policy(walkers, speed)), world, 12, bounds=(0, 512))
    np.testing.assert_allclose(imagined.scores, real.scores, atol=1e-6)
    assert imagined.success == real.success


def test_what_a_world_does_not_imagine_is_refused() -> None:
    env = WalkEnv()
    branch = branches(record(env, expert_of(env), S, KEYS), 1, seen=3)[0]
    with pytest.raises(ConfigError, match="imagines no 'block_pose'"):
        InWorld(Walkers().open("w"), branch, ("block_pose",), closeness, "image", "agent_pos", (0, 512))


def test_policies_keep_their_order_in_a_perfect_world(tmp_path: Path) -> None:
    walkers = Walkers()
    found = run(tmp_path, walkers)
    assert walkers.open_sessions == 0
    same = found.agreements["branches"]
    assert (same.n, same.mmrv) == (5, 0)
    assert same.r == pytest.approx(1, abs=1e-4)
    by_name = {s.name: s for s in found.strengths}
    assert all(by_name["runs"].whole)
    assert not any(by_name["flees"].whole)
    assert set(by_name["hold"].imagined) == {0.0}
    assert len(by_name["walks"].real) == 6
    assert all(by_name["runs"].imagined_whole)
    assert found.calibration is not None
    done, progress = found.calibration
    assert done.f1 == 1
    assert progress.mae < 0.02
    assert found.horizon[0].n >= 2
    assert [s.ahead for s in found.horizon] == [1, 2, 3, 4, 5, 6]
    assert max(s.agent for s in found.horizon) < 1e-3
    assert max(s.psnr for s in found.horizon) == 120
    last = found.horizon[-1]
    assert last.agent_still == pytest.approx(48, abs=1e-3), "six strides of 8 px"


def test_a_world_that_drifts_is_found_out(tmp_path: Path) -> None:
    found = run(tmp_path, Walkers(drift=3.0), imagined_episodes=0)
    errors = [s.agent for s in found.horizon]
    np.testing.assert_allclose(errors[0], 3 * np.sqrt(2), rtol=1e-3)
    assert errors == sorted(errors)
    assert found.horizon[-1].psnr < 40


def test_the_same_command_goes_on_where_it_ended(tmp_path: Path) -> None:
    walkers = Walkers()
    first = run(tmp_path, walkers).numbers()
    lines = (tmp_path / "plays.jsonl").read_text().splitlines(keepends=True)
    assert len(lines) == 1 + 5 * (3 + 6 + 6 + 2)
    (tmp_path / "plays.jsonl").write_text("".join(lines[:40]) + lines[40][:25])  # killed while writing
    again = Walkers()
    assert run(tmp_path, again).numbers() == first
    assert 0 < again.infers < walkers.infers
    assert "runs" not in again.served, "all of it was kept"
    assert len((tmp_path / "plays.jsonl").read_text().splitlines()) == len(lines)
    with pytest.raises(OtherRun, match="what differs: steps"):
        run(tmp_path, again, steps=7)
    (tmp_path / "plays.jsonl").write_text("".join(lines[:3]) + "{}\n")
    with pytest.raises(ConfigError, match="line 4: no play"):
        run(tmp_path, again)


def test_more_policies_and_seeds_may_join_a_folder(tmp_path: Path) -> None:
    walkers = Walkers()
    run(tmp_path, walkers, runs=2, episodes=2)
    assert len(run(tmp_path, walkers).strengths[0].real) == 6
    assert len(run(tmp_path, walkers, runs=2, episodes=2).strengths[0].whole) == 2, "what else is kept does not count"


def app(walkers: Walkers, monkeypatch: pytest.MonkeyPatch) -> typer.Typer:
    monkeypatch.setattr(commands_twin, "load_twin", lambda name: config(description="<b>walks</b>"))
    monkeypatch.setattr(commands_twin, "serving", lambda chosen, policy: walkers(policy))
    monkeypatch.setattr(TwinConfig, "named", lambda self: {})  # no file of that suite, nor of what is served
    made = typer.Typer()
    made.command("twin")(commands_twin.twin_command)
    return made


def test_the_command_writes_page_and_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["--out", str(tmp_path), "--policies", "runs,creeps,flees,hold", "--episodes", "2"]
    said = CliRunner().invoke(app(Walkers(), monkeypatch), options, catch_exceptions=False, env={"COLUMNS": "140"})
    assert said.exit_code == 0, said.output
    assert "r = " in said.output
    assert "2/2" in said.output
    numbers = json.loads((tmp_path / "twin.json").read_text())
    assert [p["policy"] for p in numbers["policies"]] == ["runs", "creeps", "flees", "hold"]
    assert numbers["agreement"]["branches"]["r"] == pytest.approx(1, abs=1e-3)
    assert len(numbers["horizon"]) == 6
    page = (tmp_path / "twin.html").read_text()
    assert page.startswith("<!doctype html>")
    assert page.count("<svg") == 8
    assert "&lt;b&gt;walks" in page
    assert "NaN" not in (tmp_path / "twin.json").read_text()


def test_what_does_not_fit_is_refused_before_anything_is_played(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for options, says in ((["--seed", "5"], "first_seed"), (["--policies", "runs"], "policies")):
        with pytest.raises(ConfigError, match=says):
            CliRunner().invoke(app(Walkers(), monkeypatch), ["--out", str(tmp_path), *options], catch_exceptions=False)
    assert not (tmp_path / "plays.jsonl").exists()


def test_plays_are_of_one_suite_simulator_and_deployment(tmp_path: Path) -> None:
    shipped = load_twin("pusht")
    said = shipped.named()
    Plays(tmp_path, said)
    assert {"suite.max_steps", "env", "served", "served.shipped", "served.small"} <= said.keys()
    assert "version.gym-pusht" in said
    assert "served.hold" not in said
    small = [
        p.model_dump(mode="json") | ({"deployment": "pusht"} if p.name == "small" else {}) for p in shipped.policies
    ]
    for other in (shipped.changed(suite="pusht-state"), shipped.changed(policies=small)):
        with pytest.raises(OtherRun, match="what differs"):
            Plays(tmp_path, other.named())


def test_an_unknown_policy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnknownName, match="Did you mean 'creeps'"):
        CliRunner().invoke(
            app(Walkers(), monkeypatch), ["--out", str(tmp_path), "--policies", "creep"], catch_exceptions=False
        )


def test_the_shipped_experiment_has_policies_enough() -> None:
    shipped = load_twin("pusht")
    assert len(shipped.policies) >= 6
    for policy in shipped.policies:
        if not policy.bound:
            options = policy.served().stage_options
            assert all(options[stage][k] == v for stage, mine in policy.stage_options.items() for k, v in mine.items())


def test_a_config_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValidationError, match="a deployment or a bound"):
        config(policies=[{"name": "a"}, {"name": "b", "bound": "hold"}])
    with pytest.raises(ValidationError, match="stands twice"):
        config(policies=[{"name": "a", "bound": "random"}, {"name": "a", "bound": "hold"}])
    with pytest.raises(ValidationError, match="7 steps, of 6"):
        config(measure={"steps": 7})


def test_too_few_runs_that_go_on_are_said() -> None:
    env = WalkEnv()
    few = branches(record(env, expert_of(env), S, KEYS), 1, seen=3)
    with pytest.raises(InvalidInput, match="wanted at least 2"):
        horizon.imagine_runs(lambda seed: Walkers().open("w"), few, 2, "image", "agent_pos")
