"""Beside ``lerobot-eval``: the same policy, env and seeds, each command in a process of its own, in turns.

Both run FetchPickAndPlace with LeRobot's ACT (the suite ``fetch-act``; LeRobot finds the env by :mod:`.lerobot_fetch`),
on two cores with one thread to a process. Ours goes through gRPC, with three processes of envs. Theirs runs as it is
shipped, which on two cores is one env at a time, and with ten envs at a time: the better of the two counts. Start-up is
left out: *the loop* of ours is from the first episode's begin until its report is written, theirs as it says itself.
Each makes the films that it makes by default: theirs of the first ten episodes, ours one of each outcome.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from statistics import median

from omni_loop.config import PipelineConfig, load_deployment
from omni_loop.errors import EnvFailed, MissingExtra
from omni_loop_policies.lerobot.checkpoint import verify_here
from omni_loop_sim_eval.stats import paired
from omni_loop_sim_eval.suite import load_suite

from .eval_runs import Ran, Runs, runs, spend
from .rows import Bar, Bench, Measured, Settings

SUITE = "fetch-act"
_EPISODES, _ROUNDS = 200, 3
_WORKERS = "3"  # while one waits for the server, two have a core each
_MAIN = "import omni_loop_bench.lerobot_fetch; from lerobot.scripts.lerobot_eval import main; main()"
_BATCHES = (0, 10)  # envs at a time; 0: as LeRobot chooses, by the number of cores


@dataclass(frozen=True, slots=True)
class Theirs:
    """What ``lerobot-eval`` found, episode by episode from the first seed on."""

    successes: tuple[bool, ...]
    loop_s: float
    command_s: float


def lerobot_eval(folder: Path, checkpoint: Path, episodes: int, batch: int) -> Theirs:
    """``lerobot-eval`` on the suite's env and seeds.

    Raises:
        EnvFailed: it did not finish; the text ends with what it said.
    """
    suite = load_suite(SUITE)
    options: dict[str, object] = {"env.type": "omni_loop_fetch"}
    options |= {
        "policy.path": checkpoint, "policy.device": "cpu", "env.episode_length": suite.max_steps,
        "seed": suite.first_seed, "eval.n_episodes": episodes, "eval.batch_size": batch,
        "eval.use_async_envs": "false", "output_dir": folder,
    }  # fmt: skip
    command = [sys.executable, "-c", _MAIN, *(f"--{name}={value}" for name, value in options.items())]
    spent = spend(command, HF_HUB_OFFLINE="1")
    file = folder / "eval_info.json"
    if spent.code or not file.exists():
        raise EnvFailed(f"lerobot-eval ended with {spent.code}:\n{spent.said}")
    info = json.loads(file.read_text())
    (task,) = info["per_task"]
    successes = tuple(bool(s) for s in task["metrics"]["successes"])[:episodes]
    return Theirs(successes, float(info["overall"]["eval_s"]), spent.wall_s)


class Beside:
    """All rounds, run when the first row asks for them."""

    def __init__(self, runs_: Runs) -> None:
        self._runs, self._quick = runs_, runs_.settings.quick

    @cached_property
    def rounds(self) -> list[tuple[Ran, list[Theirs]]]:
        checkpoint, episodes = _checkpoint(), 1 if self._quick else _EPISODES
        batches = _BATCHES[:1] if self._quick else _BATCHES
        found = []
        for n in range(1 if self._quick else _ROUNDS):
            ours = self._runs.run(SUITE, _EPISODES, "--workers", _WORKERS, "--videos", "outcome")
            theirs = []
            for batch in batches:
                self._runs.settings.say(f"round {n + 1}: lerobot-eval, batch {batch or 'as it chooses'}")
                theirs.append(lerobot_eval(self._runs.folder(), checkpoint, episodes, batch))
            found.append((ours, theirs))
        return found

    def per_minute(self, whole: bool) -> Measured:
        """Episodes a minute, medians; theirs in the batches in which it is faster. ``whole``: of the whole command."""

        def rate(seconds: list[float], episodes: int) -> float:
            return 60 * episodes / median(seconds)

        n = len(self.rounds[0][0].results)
        ours = rate([o.command_s if whole else o.done_s for o, _ in self.rounds], n)
        by_batch = zip(*(theirs for _, theirs in self.rounds), strict=True)
        theirs = [rate([t.command_s if whole else t.loop_s for t in same], n) for same in by_batch]
        return Measured(ours, max(theirs))

    def outcomes(self) -> tuple[dict[int, bool], dict[int, bool]]:
        """Success by seed: ours, and theirs as it is shipped."""
        ours, theirs = self.rounds[0]
        first = load_suite(SUITE).first_seed
        return {r.seed: r.success for r in ours.results}, {first + i: s for i, s in enumerate(theirs[0].successes)}


def _checkpoint() -> Path:
    """The folder of what the suite's deployment serves."""
    suite = load_suite(SUITE)
    for pipeline in load_deployment(suite.deployment).pipelines:
        if isinstance(pipeline, PipelineConfig) and pipeline.name == suite.pipeline:
            folder = verify_here(str(pipeline.options["checkpoint"]))
            if folder is not None:
                return folder
    raise EnvFailed(f"the deployment {suite.deployment!r} serves no checkpoint on this machine")


@contextmanager
def _subject(settings: Settings) -> Iterator[Beside]:
    if find_spec("lerobot") is None:
        raise MissingExtra("LeRobot is not installed; install the extra 'lerobot'")
    with runs(settings) as made:
        yield Beside(made)


BENCH: Bench[Beside] = Bench("lerobot", _subject)


@BENCH.row("episodes/min", Bar("ratio", ">=", 1.5))
def lerobot_rate(beside: Beside) -> Measured:
    """Episodes a minute of FetchPickAndPlace through gRPC, against lerobot-eval on the same policy, env and seeds."""
    return beside.per_minute(whole=False)


@BENCH.row("episodes/min")
def lerobot_command_rate(beside: Beside) -> Measured:
    """The same of the whole commands, which both spend a good part of importing LeRobot."""
    return beside.per_minute(whole=True)


@BENCH.row("success")
def lerobot_success(beside: Beside) -> Measured:
    """Success rate on the same 200 seeds, against lerobot-eval's."""
    ours, theirs = beside.outcomes()
    return Measured(sum(ours.values()) / len(ours), sum(theirs.values()) / len(theirs))


@BENCH.row("p", Bar("ours", ">=", 0.05))
def lerobot_same(beside: Beside) -> Measured:
    """How likely such a difference is between two that succeed alike: exact McNemar on the paired seeds."""
    return Measured(paired(*beside.outcomes()).p)
