from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from numpy.typing import NDArray

from omni_loop import registry
from omni_loop.env import EVALUATION_SEED, EnvStep
from omni_loop.errors import Exhausted, MissingExtra, UnknownName
from omni_loop_sim_eval.episodes import EpisodeResult, Outcome, run_episode
from omni_loop_sim_eval.replay import ReplayMismatch, replay
from omni_loop_sim_eval.runner import run_suite

from .toy import GOAL, ToyEnv, ToyServer, toy_suite

S = EVALUATION_SEED


def run_one(server: ToyServer, episode: int = 0, **fields: object) -> EpisodeResult:
    suite = toy_suite(**fields)
    return run_episode(server.connect(), suite.make_env(), suite, episode)


def test_success_executes_chunks_and_reports_what_was_executed() -> None:
    server = ToyServer()
    result = run_one(server)
    assert result.outcome == Outcome.SUCCESS
    assert result.steps == 7  # 150 px at 20 px a step to within 12 px
    assert [(step, None if e is None else len(e)) for _, step, e, _ in server.heard] == [(0, None), (4, 4)]
    assert server.heard[1][2] is not None
    assert server.heard[1][2].tolist() == [GOAL.tolist()] * 4
    assert server.heard[0][3] == ("image", "position"), "only the suite's keys are sent"
    assert result.actions.shape == (7, 2)
    assert result.policy_revision == "toy@1"
    assert (server.opened, server.closed) == ([S], 1)


def test_a_session_is_opened_with_the_suite_s_options() -> None:
    server = ToyServer()
    run_one(server)
    run_one(server, options={"samples": 4})
    assert server.options == [{}, {"samples": 4}]


def test_failure_runs_to_the_limit() -> None:
    result = run_one(ToyServer(lost=frozenset({S})), max_steps=10)
    assert (result.outcome, result.steps, result.reason) == (Outcome.FAILURE, 10, "")
    assert 0 < result.score < 1


def test_ticks_hold_the_breakdown() -> None:
    tick = run_one(ToyServer()).ticks[0]
    assert (tick.total_ms, tick.model_ms, tick.stages_ms) == (2.0, 1.5, {"context": 1.0, "act": 0.5})
    assert tick.overhead_ms == tick.round_trip_ms - 1.5
    assert tick.transport_ms == tick.round_trip_ms - 2.0


def test_actions_are_clipped_to_the_env_and_reported_as_executed() -> None:
    server = ToyServer(actions=lambda a: a + 1000)
    result = run_one(server, max_steps=8)
    assert result.outcome == Outcome.FAILURE
    assert (result.actions == 512).all()
    assert server.heard[1][2] is not None
    assert (server.heard[1][2] == 512).all()
    assert result.predictions == (), "what was predicted was not what was executed"


@pytest.mark.parametrize(
    ("actions", "says"),
    [
        (lambda a: np.full_like(a, np.nan), "not finite"),
        (lambda a: a[:2], "chunk of 2 actions"),
    ],
)
def test_bad_chunks_are_errors_with_a_reason(actions: object, says: str) -> None:
    result = run_one(ToyServer(actions=actions))  # type: ignore[arg-type]
    assert result.outcome == Outcome.ERROR
    assert result.reason.startswith("bad_output: ")
    assert says in result.reason


def test_an_error_keeps_what_came_before_and_closes_the_session() -> None:
    def broken(seed: int, tick: int) -> None:
        if tick == 1:
            raise Exhausted("no blocks left")

    server = ToyServer(broken=broken)
    result = run_one(server)
    assert (result.outcome, result.reason) == (Outcome.ERROR, "out_of_blocks: no blocks left")
    assert (result.steps, server.closed) == (4, 1)


def test_a_refused_close_is_said_and_does_not_change_the_outcome() -> None:
    result = run_one(ToyServer(refuse_close=True))
    assert result.outcome == Outcome.SUCCESS
    assert "closing the session" in result.reason


def test_an_episode_has_a_time_limit() -> None:
    result = run_one(ToyServer(broken=lambda seed, tick: time.sleep(0.05)), time_limit_s=0.01)
    assert result.outcome == Outcome.TIMEOUT
    assert result.reason == "more than 0.01 s"


def test_results_are_a_pure_function_of_suite_and_seed() -> None:
    """The same whatever ran before, in whatever order, on however many workers."""
    lost = frozenset({S + 1, S + 4})
    alone = {i: run_one(ToyServer(lost=lost), i, episodes=6, max_steps=20) for i in range(6)}
    for workers in (1, 3):
        run = run_suite(toy_suite(episodes=6, max_steps=20, workers=workers), ToyServer(lost=lost).connect)
        assert [r.episode for r in run.results] == list(range(6))
        for r in run.results:
            assert (r.outcome, r.score) == (alone[r.episode].outcome, alone[r.episode].score)
            assert r.actions.tobytes() == alone[r.episode].actions.tobytes()
        assert run.successes == 4


def test_one_bad_episode_does_not_touch_the_others() -> None:
    def broken(seed: int, tick: int) -> None:
        if seed == S + 1:
            raise ZeroDivisionError("in the middle of things")

    server = ToyServer(broken=broken)
    heard: list[EpisodeResult] = []
    run = run_suite(toy_suite(), server.connect, heard.append)
    assert [r.outcome for r in run.results] == ["success", "error", "success", "success"]
    assert run.results[1].reason == "ZeroDivisionError: in the middle of things"
    assert len(heard) == 4
    assert server.clients == 0, "every connection is closed"


def test_an_env_that_breaks_is_made_anew_and_its_episode_run_again() -> None:
    made: list[ToyEnv] = []

    class Frail(ToyEnv):
        def __init__(self, max_steps: int = 60) -> None:
            super().__init__(max_steps)
            made.append(self)

        def _step(self, action: NDArray[np.float32]) -> EnvStep:
            if self is made[1] and self._steps == 2:
                raise RuntimeError("the physics exploded")
            return super()._step(action)

    server = ToyServer()
    with registry.registered(registry.ENVS, "frail", Frail):
        run = run_suite(toy_suite(env="frail"), server.connect)
        assert len(made) == 3, "for the preflight, the one that broke, and the one after it"
        assert [r.outcome for r in run.results] == ["success"] * 4
        assert run.results[0].reason == "run again, because the env broke: RuntimeError: the physics exploded"
        assert [r.reason for r in run.results[1:]] == [""] * 3
        assert server.closed == len(server.opened)
        made.clear()
        run = run_suite(toy_suite(env="frail", retries=0), server.connect)
    assert [r.outcome for r in run.results] == ["error", "success", "success", "success"]
    assert (run.results[0].steps, run.results[0].env_died) == (2, True), "what came before is kept"


def test_what_an_env_refuses_is_an_error_and_no_reason_to_try_again() -> None:
    class Refusing(ToyEnv):
        def _step(self, action: NDArray[np.float32]) -> EnvStep:
            raise MissingExtra("needs the package x")

    server = ToyServer()
    with registry.registered(registry.ENVS, "refusing", Refusing):
        run = run_suite(toy_suite(env="refusing", episodes=1), server.connect)
    assert run.results[0].reason == "missing_extra: needs the package x"
    assert len(server.opened) == 2, "preflight and one try"


def test_a_hanging_call_is_given_up_and_the_run_goes_on() -> None:
    release = threading.Event()

    def broken(seed: int, tick: int) -> None:
        if seed == S + 1 and tick == 1:
            release.wait(30)

    server = ToyServer(broken=broken)
    run = run_suite(toy_suite(time_limit_s=0.2), server.connect, grace_s=0.1)
    release.set()
    assert [r.outcome for r in run.results] == ["success", "timeout", "success", "success"]
    assert "given up" in run.results[1].reason


def test_what_is_wrong_with_all_episodes_is_said_once_at_the_start() -> None:
    server = ToyServer()
    with pytest.raises(UnknownName, match="no pipeline is called 'toi'"):
        run_suite(toy_suite(pipeline="toi"), server.connect)
    assert (server.heard, server.clients) == ([], 0)


def test_replay_gives_the_frames_and_notices_another_course() -> None:
    result = run_one(ToyServer())
    shown = replay(ToyEnv(), result, "image")
    assert len(shown.views) == len(shown.scores) == result.steps + 1
    assert shown.seen is not None
    assert shown.seen.shape == (8, 32, 32, 3)
    assert shown.views.shape == (8, 64, 64, 3)
    assert max(shown.scores) == result.score
    other = run_one(ToyServer(), 1)
    with pytest.raises(ReplayMismatch, match=f"seed {other.seed}"):
        replay(ToyEnv(), EpisodeResult(1, other.seed, Outcome.FAILURE, result.steps, result.score, result.actions))
