"""``omni-loop bench policy``: success rates of the shipped PushT policy, through gRPC, on unseen seeds.

A row's figure is the share of successful episodes; episodes are paired by seed across rows. The ablations say
what the context's cache, the agent's motion and the sampling temperature are worth.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from omni_loop.client import connect
from omni_loop.config import Deployment, load_deployment
from omni_loop.serve.background import BackgroundServer
from omni_loop_sim_eval.runner import run_suite
from omni_loop_sim_eval.stats import interval
from omni_loop_sim_eval.suite import load_suite

from .rows import Bar, Bench, Measured, Settings

_EPISODES = 100
_PARTS = ("context", "act", "frames", "decode")


class Closed:
    """Runs the suites, each against a server of its own."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def rate(self, suite_name: str, **act_options: float) -> Measured:
        """Success rate of ``suite_name`` with options of the act stage."""
        s = self._settings
        suite = load_suite(suite_name).changed(episodes=1 if s.quick else _EPISODES, videos="none")
        deployment = load_deployment(suite.deployment)
        options: dict[str, dict[str, Any]] = {part: dict(deployment.stage_options.get(part, {})) for part in _PARTS}
        for part in options.values():
            part.update({"checkpoints": s.checkpoints} if s.checkpoints else {})
        options["act"].update(act_options)
        done = 0

        def on_result(result: object) -> None:
            nonlocal done
            done += 1
            s.say(f"{suite_name} {act_options or ''} {done}/{suite.episodes}")

        changed = Deployment.model_validate({**deployment.model_dump(), "stage_options": options})
        with BackgroundServer(changed) as server:
            run = run_suite(suite, lambda: connect(server.address, timeout_s=suite.time_limit_s), on_result)
        s.say(f"{suite_name} {act_options or ''}: {run.successes}/{suite.episodes} {interval(run.successes, done)}")
        return Measured(run.successes / suite.episodes)


@contextmanager
def _subject(settings: Settings) -> Iterator[Closed]:
    yield Closed(settings)


BENCH: Bench[Closed] = Bench("policy", _subject)


@BENCH.row("success", Bar("ours", ">=", 0.85))
def image(closed: Closed) -> Measured:
    """From a 96 x 96 image and the agent's position, 100 unseen seeds."""
    return closed.rate("pusht-image")


@BENCH.row("success", Bar("ours", ">=", 0.86))
def state(closed: Closed) -> Measured:
    """With the T's pose given, the same seeds."""
    return closed.rate("pusht-state")


@BENCH.row("success", group="ablations")
def image_without_context(closed: Closed) -> Measured:
    """From the image, the act head blind to the context model's cache."""
    return closed.rate("pusht-image", use_context=False)


@BENCH.row("success", group="ablations")
def image_without_history(closed: Closed) -> Measured:
    """From the image, the agent's position before unknown."""
    return closed.rate("pusht-image", use_history=False)


@BENCH.row("success", group="ablations")
def image_at_temperature_1(closed: Closed) -> Measured:
    """From the image, chunks sampled from unscaled noise."""
    return closed.rate("pusht-image", temperature=1.0)
