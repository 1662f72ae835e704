"""Suites: which task is evaluated, how often, from which observation (``configs/eval/*.yaml``)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue, field_validator, model_validator

from omni_loop import registry
from omni_loop.config import Count, Seconds, Section, load, validate
from omni_loop.env import EVALUATION_SEED, Env
from omni_loop.errors import ConfigError, UnknownName, nearest
from omni_loop.messages import Scalar

from .stats import Method

Millis = Annotated[float, Field(ge=0, le=60_000, allow_inf_nan=False)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Chunks = Literal["joined", "aligned", "naive", "waiting"]
Seed = Annotated[int, Field(ge=0, le=1 << 62)]  # the first of many, all within 64 bits
CHUNKS: tuple[Chunks, ...] = ("joined", "aligned", "naive", "waiting")


def _names_a_file(name: str) -> bool:
    return "/" not in name and name not in ("", ".", "..")


class Predictions(Section):
    """Frames the world model predicts besides the chunk, kept to be shown beside the real ones.

    Asked for in the first ``episodes`` episodes, at every ``every``-th tick; the ``keep`` predictions in which
    most moved are shown.
    """

    episodes: Annotated[int, Field(ge=0)] = 3
    every: Count = 3
    frames: Count = 8
    keep: Count = 4


class SuiteTask(Section):
    """One of several tasks of a suite. ``env_options`` are merged over the suite's; an empty ``prompt`` and no
    ``max_steps`` are the suite's."""

    name: str = Field(min_length=1)
    env_options: Mapping[str, JsonValue] = Field(default_factory=dict)
    prompt: str = ""
    max_steps: Count | None = None

    @field_validator("name")
    @classmethod
    def _names_a_film(cls, name: str) -> str:
        if not _names_a_file(name):
            raise ValueError(f"{name!r} is no name of a file, and a task's videos are called by it")
        return name


class Live(Section):
    """A simulated clock that goes on while the policy thinks (``mode: live``).

    An answer is there ``latency_ms`` after its observation, rounded up to control periods, and drawn from a normal
    distribution of deviation ``jitter_ms`` where that is given, by (task, seed, tick). ``measured`` adds the time that
    the answer really took: then a result is no function of its seed any more.

    ``chunks``, how the chunk that arrives takes over from the one being played:

    * ``joined``: real-time chunking; the server repeats the rows executed meanwhile and lets the others join them.
    * ``aligned``: with its row for the present step. Rows of steps that are over are dropped.
    * ``naive``: with its row 0, however old its observation is by then.
    * ``waiting``: the robot holds still until the answer is there, and asks when it has played the chunk.
    """

    latency_ms: Millis = 0.0
    jitter_ms: Millis = 0.0
    measured: bool = False
    chunks: Chunks = "joined"

    @property
    def join(self) -> bool:
        return self.chunks == "joined"


class EvalSuite(Section):
    """One evaluation. Episode i of every task has seed ``first_seed + i``; its result is a pure function of suite, task
    and seed, the same on any number of ``workers`` and in any order.

    Without ``tasks`` there is one, of the suite itself, called "". ``episodes`` are those of each task.
    """

    name: str
    description: str = ""
    env: str
    env_options: Mapping[str, JsonValue] = Field(default_factory=dict)
    tasks: tuple[SuiteTask, ...] = ()
    pipeline: str
    deployment: str  # what is served when no running server is named
    keys: tuple[str, ...] = Field(min_length=1)  # observation keys that are sent
    state_keys: tuple[str, ...] = ()  # keys that give away the true state; `--state` adds, `--image` drops them
    prompt: str = ""
    first_seed: Seed = EVALUATION_SEED
    episodes: Annotated[int, Field(ge=1, le=1_000_000)] = 100
    max_steps: Count
    options: Mapping[str, Scalar] = Field(default_factory=dict)  # of the pipeline, chosen when a session is opened
    execution_horizon: Count | None = None  # None: the pipeline's own
    mode: Literal["sync", "live"] = "sync"  # sync: the simulator stands still while the policy thinks
    live: Live = Live()
    hold: tuple[Finite, ...] | None = None  # live: the action when none is there; None: the last one again
    action_repeat: Count = 1  # control steps that each action of a chunk is executed for
    delay_steps: Annotated[int, Field(ge=0)] = 0  # sync: the policy sees what was so many control steps ago
    frame_key: str | None = None  # observation that predicted frames show
    predictions: Predictions = Predictions()
    videos: Literal["none", "outcome", "all"] = "outcome"
    time_limit_s: Seconds = 120.0  # of one episode
    workers: Annotated[int, Field(ge=1, le=256)] = 1  # processes, each with an env and a connection of its own
    # Sessions in one forward pass of a server that is started. Above 1 it is faster, and the last bits of an action
    # depend on who asks at the same time: outcomes then may differ from run to run.
    batch: Annotated[int, Field(ge=1, le=1024)] = 1
    retries: Annotated[int, Field(ge=0, le=10)] = 2  # of an episode whose process or env died
    interval: Method = "wilson"

    @model_validator(mode="after")
    def _consistent(self) -> EvalSuite:
        if not _names_a_file(self.name):
            raise ValueError(f"name: {self.name!r} is no name of a folder, and a run lies in one of that name")
        if len(set(self.keys)) != len(self.keys):
            raise ValueError(f"keys: one stands twice in {list(self.keys)}")
        for given in (self.env_options, *(task.env_options for task in self.tasks)):
            if "max_steps" in given:
                raise ValueError("env_options: max_steps has a key of its own in the suite")
        names = [task.name for task in self.tasks]
        if len(set(names)) != len(names):
            raise ValueError(f"tasks: a name stands twice in {names}")
        if self.mode == "live" and (self.action_repeat > 1 or self.delay_steps):
            raise ValueError("action_repeat and delay_steps are of mode sync; in mode live the latency delays")
        return self

    @property
    def task_names(self) -> tuple[str, ...]:
        """In the suite's order; ``("",)`` without tasks."""
        return tuple(task.name for task in self.tasks) or ("",)

    def task(self, name: str = "") -> SuiteTask:
        """The task of that name with everything filled in that it takes from the suite; "" is the first.

        Raises:
            UnknownName: the suite has no such task.
        """
        own = self.tasks[0] if self.tasks and not name else next((t for t in self.tasks if t.name == name), None)
        if own is None and name:
            known = nearest(name, self.task_names) if self.tasks else " It has none by name."
            raise UnknownName(f"suite {self.name!r} has no task {name!r}.{known}")
        return SuiteTask.model_construct(
            name=own.name if own else "",
            env_options={**self.env_options, **(own.env_options if own else {})},
            prompt=(own.prompt if own else "") or self.prompt,
            max_steps=(own.max_steps if own else None) or self.max_steps,
        )

    def only(self, *names: str) -> EvalSuite:
        """The same suite with these tasks alone, in its own order.

        Raises:
            UnknownName: the suite has no such task. "" is one only of a suite without tasks.
        """
        if self.tasks and "" in names:
            raise UnknownName(f"suite {self.name!r} has no task ''.{nearest('', self.task_names)}")
        chosen = {self.task(name).name for name in names}
        return self.model_copy(update={"tasks": tuple(t for t in self.tasks if t.name in chosen)}) if names else self

    @property
    def unseen(self) -> bool:
        """Whether no demonstration can have these seeds."""
        return self.first_seed >= EVALUATION_SEED

    @property
    def gives_state(self) -> bool:
        return bool(set(self.keys) & set(self.state_keys))

    def with_state(self, given: bool) -> EvalSuite:
        """The same suite with the true state given, or withheld."""
        if not self.state_keys:
            raise ConfigError(f"suite {self.name!r} names no state_keys: it cannot give or withhold the state")
        rest = [key for key in self.keys if key not in self.state_keys]
        return self.changed(keys=[*rest, *self.state_keys] if given else rest)

    def changed(self, **fields: Any) -> EvalSuite:
        """A copy with other values, validated like a file."""
        data = self.model_dump(mode="json") | {name: value for name, value in fields.items() if value is not None}
        return validate(EvalSuite, data, self.name)

    def make_env(self, task: str = "") -> Env:
        """A fresh env of ``task`` ("": the first), after checking that it has the suite's keys."""
        chosen = self.task(task)
        options = {**chosen.env_options, "max_steps": chosen.max_steps}
        env: Env = registry.build(registry.ENVS, self.env, options)
        known = [spec.name for spec in env.observations]
        for key in (*self.keys, *([self.frame_key] if self.frame_key else [])):
            if key not in known:
                env.close()
                raise UnknownName(
                    f"suite {self.name!r}: env {self.env!r} has no observation {key!r}.{nearest(key, known)}"
                )
        return env


def load_suite(path_or_name: str | Path) -> EvalSuite:
    """A suite from a file or a shipped one by name. Files must keep to seeds no demonstration has."""
    suite = load(EvalSuite, path_or_name, "eval")
    if not suite.unseen:
        raise ConfigError(
            f"{suite.name}: first_seed {suite.first_seed} may be a demonstration's; begin at {EVALUATION_SEED}"
        )
    return suite
