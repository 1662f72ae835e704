"""Random, hold and expert, run by the evaluator as a policy is."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from omni_loop.errors import StateError, UnknownName, Unsupported
from omni_loop_sim_eval import bounds
from omni_loop_sim_eval.api import attach
from omni_loop_sim_eval.episodes import run_episode
from omni_loop_sim_eval.results import EpisodeResult, Outcome
from omni_loop_sim_eval.suite import EvalSuite, load_suite

pytest.importorskip("gymnasium_robotics")


def fetch(kind: str, episodes: int = 4) -> EvalSuite:
    return bounds.bounded(load_suite("fetch-act").changed(episodes=episodes), kind)


def run(suite: EvalSuite, kind: str, order: list[int]) -> dict[int, EpisodeResult]:
    client, env = bounds.connect(kind, suite)(), suite.make_env()
    try:
        return {i: run_episode(client, env, suite, i) for i in order}
    finally:
        client.close()
        env.close()


def test_an_expert_succeeds_and_who_holds_still_does_not() -> None:
    expert, hold = (run(fetch(kind), kind, [0, 1, 2, 3]) for kind in ("expert", "hold"))
    assert [r.outcome for r in expert.values()] == [Outcome.SUCCESS] * 4, [r.reason for r in expert.values()]
    assert [r.outcome for r in hold.values()] == [Outcome.FAILURE] * 4, [r.reason for r in hold.values()]
    assert all((r.actions == 0).all() and r.steps == 50 for r in hold.values())
    assert {r.policy_revision for r in expert.values()} == {"expert"}


@pytest.mark.parametrize("kind", bounds.KINDS)
def test_a_result_is_a_pure_function_of_its_seed(kind: str) -> None:
    suite = fetch(kind)
    forth, back = run(suite, kind, [0, 1]), run(suite, kind, [1, 0])
    for i in (0, 1):
        assert forth[i].actions.tobytes() == back[i].actions.tobytes()
        assert forth[i].outcome == back[i].outcome
    if kind == "random":
        assert forth[0].actions.tobytes() != forth[1].actions.tobytes()
        spread = np.concatenate([r.actions for r in forth.values()])
        assert spread.min() < -0.9
        assert spread.max() > 0.9
        assert abs(spread.mean()) < 0.2


def test_no_image_is_rendered_for_who_does_not_look() -> None:
    suite = bounds.bounded(load_suite("pusht-image"), "random")
    assert (suite.name, suite.pipeline) == ("pusht-image-random", "random")
    assert suite.keys == ("block_pose",)
    assert suite.predictions.episodes == 0
    assert suite.execution_horizon == 1


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("random", "pusht-image with actions drawn at random: what a policy must beat"),
        ("hold", "pusht-image holding still: what a policy must beat"),
        ("expert", "pusht-image by an expert that reads the simulator's own state: what can be reached"),
    ],
)
def test_a_bound_does_not_say_what_the_policy_s_suite_says_of_itself(kind: str, says: str) -> None:
    suite = load_suite("pusht-image")
    assert "image and" in suite.description
    made = bounds.bounded(suite, kind)
    assert made.description == says
    assert (bounds.is_bound(made), bounds.is_bound(suite)) == (True, False)


def test_how_to_connect_can_be_sent_to_another_process() -> None:
    suite = fetch("hold")
    connect = pickle.loads(pickle.dumps(bounds.connect("hold", suite)))
    client, env = connect(), suite.make_env()
    attach(client, env)
    session = client.open(suite.pipeline, seed=3)
    env.reset(3, keys=())
    chunk = session.infer({}, step=0).chunk
    assert chunk is not None
    assert chunk.actions.tolist() == [[0, 0, 0, 0]]
    assert session.spec.control_hz == env.control_hz
    with pytest.raises(Unsupported, match="imagines nothing"):
        session.predict(steps=1)
    env.close()


def test_what_there_is_none_of_is_said() -> None:
    suite = load_suite("fetch-act")
    with pytest.raises(UnknownName, match=r"no bound is called 'expret'. Did you mean 'expert'"):
        bounds.connect("expret", suite)
    with pytest.raises(UnknownName, match="no bound is called"):
        bounds.bounded(suite, "x")
    with pytest.raises(UnknownName, match=r"no expert is called 'gymnasium'"):
        bounds.connect("expert", suite.changed(env="gymnasium"))
    with pytest.raises(StateError, match="attach one first"):
        bounds.connect("hold", suite)().open("hold")


def test_an_expert_of_another_env_is_refused() -> None:
    client, env = bounds.connect("expert", load_suite("pusht-image"))(), load_suite("fetch-act").make_env()
    with pytest.raises(Unsupported, match="the expert of 'pusht' reads the simulator"):
        attach(client, env)
    env.close()
