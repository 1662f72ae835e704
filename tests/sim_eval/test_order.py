"""A result depends on task, episode and seed alone: not on who ran what before it, nor on how many run."""

from __future__ import annotations

import random
from collections import deque
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_loop import registry
from omni_loop.env import EVALUATION_SEED
from omni_loop_sim_eval import runner
from omni_loop_sim_eval.jobs import Job, Jobs
from omni_loop_sim_eval.runner import run_suite

from .toy import ToyEnv, ToyServer, toy_suite

S = EVALUATION_SEED
SUITE = toy_suite(
    tasks=[{"name": "a"}, {"name": "b", "max_steps": 6}, {"name": "c", "max_steps": 9}],
    episodes=3, max_steps=15, frame_key=None, predictions={"episodes": 0},
)  # fmt: skip


class Shuffled(Jobs):
    """Gives episodes in an order of its own."""

    order = 0

    def take(self, task: str | None) -> Job | None:
        draw = random.Random(f"{self.order} {self.left} {self.waiting}")
        for jobs in self._waiting.values():
            mixed = list(jobs)
            draw.shuffle(mixed)
            jobs.clear()
            jobs.extend(mixed)
        waiting = [name for name, jobs in self._waiting.items() if jobs]
        return super().take(draw.choice(waiting)) if waiting else None


def run(workers: int) -> list[tuple[Any, ...]]:
    server = ToyServer(lost=frozenset({S + 1}))
    results = run_suite(SUITE.changed(workers=workers), server.connect).results
    return [(r.task, r.episode, r.seed, r.outcome, r.steps, r.score, r.actions.tobytes()) for r in results]


@cache
def alone() -> list[tuple[Any, ...]]:
    return run(1)


@settings(max_examples=15, deadline=None)
@given(workers=st.sampled_from([1, 2, 5]), order=st.integers(0, 1 << 30))
def test_results_are_the_same_in_any_order_on_any_number_of_workers(workers: int, order: int) -> None:
    with pytest.MonkeyPatch.context() as patch, registry.registered(registry.ENVS, "toy-order", ToyEnv):
        patch.setattr(runner, "Jobs", Shuffled)
        patch.setattr(Shuffled, "order", order)
        assert run(workers) == alone()


def test_an_env_is_kept_for_the_episodes_of_its_task(monkeypatch: pytest.MonkeyPatch) -> None:
    made: deque[int] = deque()

    class Counted(ToyEnv):
        def __init__(self, max_steps: int = 60) -> None:
            super().__init__(max_steps)
            made.append(max_steps)

    with registry.registered(registry.ENVS, "counted", Counted):
        run_suite(SUITE.changed(env="counted"), ToyServer().connect)
    assert sorted(made) == [6, 6, 9, 9, 15, 15], "for each task one to look at it first, and one for its episodes"


def test_episodes_of_one_task_come_together_and_the_fullest_task_first() -> None:
    jobs = Jobs(SUITE, done={("a", 0), ("a", 1), ("b", 1)})
    assert jobs.left == 6
    first = jobs.take(None)
    assert first == Job("c", 0)
    assert jobs.take("c") == Job("c", 1)
    assert jobs.take(None) == Job("b", 0), "nobody is at work on b"
    assert first is not None
    jobs.again(first, "it died")
    assert jobs.take("c") == Job("c", 0, ("it died",)), "what is run again comes first"
    assert jobs.take("b") == Job("b", 2)
    assert [jobs.take("b"), jobs.take("b"), jobs.take("b")] == [Job("a", 2), Job("c", 2), None]
