"""Live mode: what is played in which control period, and what the server is told of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from omni_loop import registry
from omni_loop.env import EVALUATION_SEED, BaseEnv, EnvStep
from omni_loop.errors import ConfigError
from omni_loop.types import ActionChunk, Array, ArraySpec, Op, SessionSpec, TickResult, Timings
from omni_loop_sim_eval.episodes import EpisodeResult, run_episode
from omni_loop_sim_eval.live import Latency
from omni_loop_sim_eval.results import Outcome
from omni_loop_sim_eval.runner import run_suite
from omni_loop_sim_eval.suite import CHUNKS, EvalSuite, Live

from .toy import ToyServer, toy_suite

S = EVALUATION_SEED
HORIZON, EVERY = 8, 4
ACTION = ArraySpec("action", "float32", (2,), low=0, high=1000)
STEP = ArraySpec("step", "float32", (1,))


class Clockwork(BaseEnv):
    """Counts its steps; nothing succeeds."""

    name = "clockwork"
    control_hz = 10.0
    action = ACTION
    observations = (STEP,)

    def _reset(self, seed: int) -> None:
        return None

    def _step(self, action: NDArray[np.float32]) -> EnvStep:
        return EnvStep({}, 0.0, False, False, False)

    def _array(self, key: str) -> Array:
        return np.float32([self._steps])

    def _render(self) -> NDArray[np.uint8]:
        return np.zeros((8, 8, 3), np.uint8)


@dataclass
class Rows:
    """A server whose row i of chunk n (from 1) is ``[n, i]``; keeps what it was told."""

    asked: list[dict[str, Any]] = field(default_factory=list)

    def open(self, *args: Any, **kwargs: Any) -> Rows:
        return self

    id = "rows"
    spec = SessionSpec("rows", (STEP,), ACTION, HORIZON, EVERY, 10, (Op.INFER,))

    def infer(self, arrays: Mapping[str, Array], *, step: int, **more: Any) -> TickResult:
        self.asked.append({"seen": int(arrays["step"][0]), "step": step, **more})
        n = len(self.asked)
        chunk = np.float32([[n, i] for i in range(HORIZON)])
        return TickResult(n, 1, ActionChunk(n, step, chunk, 1, "rows@1"), timings=Timings(1.0, 1.0, 0.0, {}))

    def predict(self, *args: Any, **kwargs: Any) -> TickResult:
        raise NotImplementedError

    def close(self) -> None:
        return None


def suite(**fields: Any) -> EvalSuite:
    live = {name: fields.pop(name) for name in ("latency_ms", "jitter_ms", "measured", "chunks") if name in fields}
    base = {
        "env": "clockwork", "pipeline": "rows", "keys": ["step"], "state_keys": [], "frame_key": None,
        "mode": "live", "live": live, "max_steps": 15, "predictions": {"episodes": 0},
    }  # fmt: skip
    return toy_suite(**(base | fields))


def play(**fields: Any) -> tuple[list[tuple[int, int]], Rows, EpisodeResult]:
    """Chunk and row of every period."""
    server, chosen = Rows(), suite(**fields)
    with registry.registered(registry.ENVS, "clockwork", Clockwork):
        result = run_episode(server, chosen.make_env(), chosen, 0)
    assert (result.outcome, result.reason) == (Outcome.FAILURE, "")
    return [(int(n), int(i)) for n, i in result.actions], server, result


def asked(server: Rows, name: str) -> list[Any]:
    return [a.get(name) for a in server.asked]


def test_aligned_chunks_take_over_with_the_row_of_the_present_step() -> None:
    played, server, result = play(latency_ms=300, chunks="aligned")
    # Asked at step 1, so that it is there when 4 rows have been played: with its row 3, for step 4. And so on.
    assert played[:10] == [*[(1, i) for i in range(4)], *[(2, i) for i in (3, 4, 5)], *[(3, i) for i in (3, 4, 5)]]
    assert asked(server, "step")[:4] == [0, 1, 4, 7]
    assert result.deadline_misses == 0


def test_naive_chunks_take_over_with_their_first_row() -> None:
    played, server, _ = play(latency_ms=300, chunks="naive")
    assert played[:9] == [(1, 0), (1, 1), (1, 2), (1, 3), (2, 0), (2, 1), (2, 2), (2, 3), (3, 0)]
    assert asked(server, "step")[:4] == [0, 1, 5, 9]


def test_waiting_robots_hold_still_until_the_answer_is_there() -> None:
    played, server, result = play(latency_ms=300, chunks="waiting")
    assert played == [*[(1, i) for i in range(4)], *[(1, 3)] * 3, *[(2, i) for i in range(4)], *[(2, 3)] * 3, (3, 0)]
    assert asked(server, "step")[:3] == [0, 4, 8]
    assert asked(server, "seen")[:3] == [0, 4, 11], "the clock went on, the steps did not"
    assert result.deadline_misses == 6
    assert [len(e) for e in asked(server, "executed")[1:]] == [4, 4], "what held still was no action of a chunk"


def test_joined_chunks_say_what_will_have_been_executed() -> None:
    _, server, _ = play(latency_ms=300, chunks="joined")
    assert asked(server, "executed_through")[0] is None, "there is nothing to join"
    assert [a["executed_through"] - a["step"] for a in server.asked[1:]] == [2] * (len(server.asked) - 1)
    _, server, _ = play(latency_ms=300, chunks="aligned")
    assert asked(server, "executed_through") == [None] * len(server.asked)


def test_what_was_executed_is_told_to_the_row() -> None:
    for chunks in CHUNKS:
        played, server, result = play(latency_ms=200, chunks=chunks, max_steps=40)
        rows = [row for i, row in enumerate(played) if not i or played[i - 1] != row]  # without periods held
        told = [tuple(map(int, row)) for e in asked(server, "executed")[1:] for row in e]
        assert told == rows[: len(told)], chunks
        assert asked(server, "executed")[0] is None
        assert [t.step for t in result.ticks] == asked(server, "step")


@pytest.mark.parametrize("chunks", CHUNKS)
def test_only_who_joins_asks_again_when_an_answer_is_late(chunks: str) -> None:
    """As a robot does: a second observation leaves, no third, and answers come in the order of asking."""
    chosen = suite(latency_ms=300, jitter_ms=300, chunks=chunks, max_steps=60)
    _, server, _ = play(latency_ms=300, jitter_ms=300, chunks=chunks, max_steps=60)
    latency, left, there = Latency(chosen.live, 10.0, "", S), asked(server, "seen"), [0]
    for tick, period in enumerate(left[1:], 1):
        there.append(max(there[-1], period + latency.periods(tick, 0.0)))
    under_way = [sum(due > period for due in there[:tick]) for tick, period in enumerate(left)]
    assert max(under_way) == (1 if chunks == "joined" else 0)


def test_a_latency_longer_than_a_chunk_runs_it_dry() -> None:
    played, _, result = play(latency_ms=1000, chunks="aligned", max_steps=20)
    assert played == [*[(1, i) for i in range(8)], *[(1, 7)] * 3, *[(2, i) for i in range(7, 8)], *[(2, 7)] * 8]
    assert result.deadline_misses == 11
    held, _, _ = play(latency_ms=1000, chunks="aligned", max_steps=10, hold=[9, 9])
    assert held[8:] == [(9, 9), (9, 9)]


@pytest.mark.parametrize("chunks", ["aligned", "naive", "waiting"])
def test_without_latency_it_is_what_mode_sync_is(chunks: str) -> None:
    def run(**fields: Any) -> list[EpisodeResult]:
        server = ToyServer(lost=frozenset({S + 1}))
        return run_suite(toy_suite(max_steps=20, predictions={"episodes": 0}, **fields), server.connect).results

    live = run(mode="live", live={"chunks": chunks})
    for a, b in zip(run(), live, strict=True):
        assert (a.outcome, a.score, a.actions.tobytes()) == (b.outcome, b.score, b.actions.tobytes())
        assert b.deadline_misses == 0


@settings(max_examples=60, deadline=None)
@given(
    latency=st.integers(0, 1500),
    jitter=st.sampled_from([0, 50, 400]),
    chunks=st.sampled_from(CHUNKS),
    horizon=st.integers(1, HORIZON),
)
def test_any_latency_plays_every_period_and_the_same_again(
    latency: int, jitter: int, chunks: str, horizon: int
) -> None:
    fields = {"latency_ms": latency, "jitter_ms": jitter, "chunks": chunks, "execution_horizon": horizon}
    played, server, result = play(max_steps=60, **fields)
    again, other, _ = play(max_steps=60, **fields)
    assert played == again
    assert asked(server, "step") == asked(other, "step")
    assert len(played) == 60
    steps = asked(server, "step")
    assert steps == sorted(steps)
    executed = sum(len(e) for e in asked(server, "executed")[1:])
    assert executed == steps[-1]
    assert result.deadline_misses <= 60 - executed


def test_latency_is_rounded_up_and_drawn_by_task_seed_and_tick() -> None:
    def periods(live: Live, task: str = "", seed: int = 1, measured: float = 0.0) -> list[int]:
        return [Latency(live, 10.0, task, seed).periods(tick, measured) for tick in range(50)]

    for ms, wanted in ((0, 0), (1, 1), (100, 1), (101, 2), (300, 3), (700, 7)):
        assert periods(Live(latency_ms=ms)) == [wanted] * 50
    drawn = periods(Live(latency_ms=300, jitter_ms=100))
    assert len(set(drawn)) > 2
    assert min(periods(Live(jitter_ms=500))) == 0
    assert drawn == periods(Live(latency_ms=300, jitter_ms=100))
    assert drawn != periods(Live(latency_ms=300, jitter_ms=100), seed=2)
    assert drawn != periods(Live(latency_ms=300, jitter_ms=100), task="other")
    assert periods(Live(latency_ms=100), measured=250.0) == [1] * 50
    assert periods(Live(latency_ms=100, measured=True), measured=250.0) == [4] * 50


def test_live_mode_delays_by_latency_alone() -> None:
    with pytest.raises(ConfigError, match="of mode sync"):
        toy_suite().changed(mode="live", delay_steps=2)


class TestSync:
    """Delayed observations and repeated actions, with the simulator standing still."""

    def test_delayed_observations_are_those_of_so_many_steps_ago(self) -> None:
        played, server, _ = play(mode="sync", delay_steps=3, max_steps=16)
        assert asked(server, "seen") == [0, 1, 5, 9]
        assert asked(server, "step") == [0, 4, 8, 12]
        assert played[:5] == [(1, 0), (1, 1), (1, 2), (1, 3), (2, 0)]
        _, server, _ = play(mode="sync", delay_steps=6, max_steps=16)
        assert asked(server, "seen") == [0, 0, 2, 6], "never before the first"

    @pytest.mark.parametrize("late", [{"delay_steps": 2}, {"action_repeat": 2}])
    def test_no_frames_are_asked_for_that_show_other_steps_than_the_real_ones(self, late: dict[str, int]) -> None:
        for more, asked_for in (({}, True), (late, False)):
            chosen = toy_suite(predictions={"episodes": 1, "every": 1, "frames": 4}, max_steps=20, **more)
            result = run_episode(ToyServer().connect(), chosen.make_env(), chosen, 0)
            assert {tick.frames for tick in result.ticks} == {asked_for}
            assert bool(result.predictions) == asked_for

    def test_repeated_actions_are_steps_of_the_env_not_of_the_policy(self) -> None:
        played, server, result = play(mode="sync", action_repeat=3, max_steps=20)
        assert played[:7] == [(1, 0)] * 3 + [(1, 1)] * 3 + [(1, 2)]
        assert (asked(server, "step"), asked(server, "seen")) == ([0, 4], [0, 12])
        assert [len(e) for e in asked(server, "executed")[1:]] == [4]
        assert result.steps == 20

    def test_a_policy_must_act_so_much_more_slowly(self) -> None:
        with (
            registry.registered(registry.ENVS, "clockwork", Clockwork),
            pytest.raises(ConfigError, match="acts at 10 Hz, env 'clockwork' runs at 10 Hz, 2 steps an action"),
        ):
            run_suite(suite(mode="sync", action_repeat=2), Rows)  # type: ignore[arg-type]
