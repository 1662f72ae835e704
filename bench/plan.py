"""``omni-loop bench plan``: what imagining many futures in one call saves, and what choosing among them is worth."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from statistics import mean, median
from typing import Any

import numpy as np
import torch

from omni_loop import registry
from omni_loop.client import connect
from omni_loop.config import Deployment, load_deployment
from omni_loop.loop.pipeline import load_pipeline
from omni_loop.messages import PayloadKind
from omni_loop.serve.background import BackgroundServer
from omni_loop.stage import Payload
from omni_loop.types import Op
from omni_loop_envs.pusht.simulator import PushTSimulator
from omni_loop_sim_eval.runner import Run, run_suite
from omni_loop_sim_eval.suite import load_suite
from omni_loop_worlds.stages.frames import FramesStage

from .rows import Bar, Bench, Measured, Settings
from .sessions import Sessions, one_thread

CANDIDATES, STEPS = 64, 8
_ONE_BY_ONE = 16  # rollouts that stand for as many as there are candidates: each takes as long
_ROUNDS, _EPISODES = 5, 40


class Rollouts:
    """Sessions that hold a full window of real frames; every call gives futures per CPU second."""

    def __init__(self, checkpoints: str, denoise_steps: int = 0) -> None:
        options: dict[str, Any] = {"checkpoints": checkpoints} if checkpoints else {}
        stage: FramesStage = registry.build(
            registry.STAGES, "frames", {**options, "denoise_steps": denoise_steps} if denoise_steps else options
        )
        self._rng, self._simulator = np.random.default_rng(0), PushTSimulator()
        self._sessions, self._tick = Sessions(stage, CANDIDATES), 1
        images = [self._frame(seed) for seed in range(stage.model.config.window)]
        seen = {"image": np.stack(images), "executed": self._actions(len(images) - 1)}
        first = {"observation": Payload(PayloadKind.OBSERVATION, seen)}
        self._sessions.tick(0, Op.RECONDITION, [first] * CANDIDATES, params={"first_step": 0})
        self._goal = self._frame(99)

    def planned(self) -> float:
        """One round of a search over all candidates, with goal and costs."""
        goal = {"goal": Payload(PayloadKind.GOAL, {"goal": self._goal})}
        params = {"horizon": STEPS, "candidates": CANDIDATES, "iterations": 1, "method": "cem"}
        return CANDIDATES / self._spent(lambda: self._run(Op.PLAN, [goal], [0], params))

    def one_by_one(self) -> float:
        """Sessions that predict, each when the one before is done."""

        def all_of_them() -> None:
            for session in range(_ONE_BY_ONE):
                self._run(Op.PREDICT, [self._ahead()], [session], {})

        return _ONE_BY_ONE / self._spent(all_of_them)

    def at_once(self) -> float:
        """The same rollouts asked for at the same time: they meet in the runner's batches."""
        asked, sessions = [self._ahead() for _ in range(CANDIDATES)], list(range(CANDIDATES))
        return CANDIDATES / self._spent(lambda: self._run(Op.PREDICT, asked, sessions, {}))

    def _run(self, op: Op, inputs: list[dict[str, Payload]], sessions: list[int], params: dict[str, Any]) -> None:
        self._sessions.tick(self._tick, op, inputs, sessions, params=params)
        self._tick += 1

    def _ahead(self) -> dict[str, Payload]:
        return {"actions": Payload(PayloadKind.ACTIONS, {"actions": self._actions(STEPS)})}

    def _actions(self, n: int) -> Any:
        return self._rng.uniform(0, 512, (n, 2)).astype(np.float32)

    def _frame(self, seed: int) -> Any:
        self._simulator.reset(seed)
        return self._simulator.frame()

    @staticmethod
    def _spent(work: Callable[[], None]) -> float:
        began = time.thread_time()
        work()
        return time.thread_time() - began


class Planned:
    """Figures that rows share are measured once."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    @cached_property
    def speed(self) -> dict[str, float]:
        """Medians of interleaved rounds, futures per CPU second."""
        rounds = 1 if self.settings.quick else _ROUNDS
        with one_thread(), torch.no_grad():
            shipped, equal = (Rollouts(self.settings.checkpoints, steps) for steps in (0, 1))
            ways = {
                "plan": shipped.planned,
                "shipped": shipped.one_by_one,
                "equal": equal.one_by_one,
                "batched": equal.at_once,
            }
            for way in ways.values():
                way()
            found: dict[str, list[float]] = {name: [] for name in ways}
            for _ in range(rounds):
                for name, way in ways.items():
                    found[name].append(way())
        return {name: median(values) for name, values in found.items()}

    @cached_property
    def planning(self) -> Run:
        return self._play("pusht-plan")

    @cached_property
    def plain(self) -> Run:
        return self._play("pusht-image")

    def _play(self, name: str) -> Run:
        s = self.settings
        suite = load_suite(name).changed(
            episodes=1 if s.quick else _EPISODES, videos="none", predictions={"episodes": 0}, time_limit_s=600
        )
        deployment = load_deployment(suite.deployment)
        options: dict[str, dict[str, Any]] = {k: dict(v) for k, v in deployment.stage_options.items()}
        if s.checkpoints:
            stages = {stage.name for p in deployment.pipelines for stage in load_pipeline(p).stages}
            for part in stages:
                options.setdefault(part, {})["checkpoints"] = s.checkpoints
        done: list[object] = []

        def on_result(result: object) -> None:
            done.append(result)
            s.say(f"{name} {len(done)}/{suite.episodes}")

        changed = Deployment.model_validate({**deployment.model_dump(), "stage_options": options})
        with BackgroundServer(changed) as server:
            return run_suite(suite, lambda: connect(server.address, timeout_s=suite.time_limit_s), on_result)


@contextmanager
def _subject(settings: Settings) -> Iterator[Planned]:
    yield Planned(settings)


BENCH: Bench[Planned] = Bench("plan", _subject)


@BENCH.row("futures/CPU s", Bar("ratio", ">=", 5), "speed")
def plan_speed(planned: Planned) -> Measured:
    """64 candidates of 8 steps in one plan (one denoise step, no clean pass at the end, with their costs), against
    as many rollouts by Predict as shipped, one after the other."""
    return Measured(planned.speed["plan"], planned.speed["shipped"])


@BENCH.row("futures/CPU s", group="speed")
def plan_speed_equal_steps(planned: Planned) -> Measured:
    """The same with one denoise step in Predict too."""
    return Measured(planned.speed["plan"], planned.speed["equal"])


@BENCH.row("futures/CPU s", group="speed")
def plan_speed_batched(planned: Planned) -> Measured:
    """The same with one denoise step, and all 64 asked to Predict at once by as many sessions."""
    return Measured(planned.speed["plan"], planned.speed["batched"])


@BENCH.row("success", group="choice")
def plan_success(planned: Planned) -> Measured:
    """Success rate of `pusht-plan` from the image, against `pusht` on the same 40 unseen seeds."""
    a, b = planned.planning, planned.plain
    return Measured(a.successes / len(a.results), b.successes / len(b.results))


@BENCH.row("coverage", group="choice")
def plan_coverage(planned: Planned) -> Measured:
    """Mean of the highest coverage of each of these episodes."""
    return Measured(*(mean(r.score for r in run.results) for run in (planned.planning, planned.plain)))


@BENCH.row("steps", group="choice")
def plan_steps(planned: Planned) -> Measured:
    """Mean length of these episodes: a success ends one."""
    return Measured(*(mean(r.steps for r in run.results) for run in (planned.planning, planned.plain)))
