"""Suites: which task is evaluated, how often, from which observation (``configs/eval/*.yaml``)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from omni_loop import registry
from omni_loop.config import Count, Seconds, Section, load, validate
from omni_loop.env import EVALUATION_SEED, Env
from omni_loop.errors import ConfigError, UnknownName, nearest
from omni_loop.messages import Scalar
from omni_loop.types import SessionSpec

from .stats import Method


class Predictions(Section):
    """Frames the world model predicts besides the chunk, kept to be shown beside the real ones.

    Asked for in the first ``episodes`` episodes, at every ``every``-th tick; the ``keep`` predictions in which
    most moved are shown.
    """

    episodes: Annotated[int, Field(ge=0)] = 3
    every: Count = 3
    frames: Count = 8
    keep: Count = 4


class EvalSuite(Section):
    """One evaluation. Episode i has seed ``first_seed + i``; its result is a pure function of suite and seed."""

    name: str
    description: str = ""
    env: str
    env_options: Mapping[str, Scalar] = Field(default_factory=dict)
    pipeline: str
    deployment: str  # what is served when no running server is named
    keys: tuple[str, ...] = Field(min_length=1)  # observation keys that are sent
    state_keys: tuple[str, ...] = ()  # keys that give away the true state; `--state` adds, `--image` drops them
    prompt: str = ""
    first_seed: int = EVALUATION_SEED
    episodes: Count = 100
    max_steps: Count
    options: Mapping[str, Scalar] = Field(default_factory=dict)  # of the pipeline, chosen when a session is opened
    execution_horizon: Count | None = None  # None: the pipeline's own
    frame_key: str | None = None  # observation that predicted frames show
    predictions: Predictions = Predictions()
    videos: Literal["none", "outcome", "all"] = "outcome"
    time_limit_s: Seconds = 120.0  # of one episode
    workers: Count = 1
    interval: Method = "wilson"

    @model_validator(mode="after")
    def _consistent(self) -> EvalSuite:
        if len(set(self.keys)) != len(self.keys):
            raise ValueError(f"keys: one stands twice in {list(self.keys)}")
        if "max_steps" in self.env_options:
            raise ValueError("env_options: max_steps has a key of its own in the suite")
        return self

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

    def make_env(self) -> Env:
        """A fresh env, after checking that it has the suite's keys."""
        env: Env = registry.load(registry.ENVS, self.env)(max_steps=self.max_steps, **self.env_options)
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


def check_match(suite: EvalSuite, env: Env, spec: SessionSpec) -> None:
    """Refuse a pipeline that cannot act in this env, before the first step."""
    if spec.action.shape != env.action.shape:
        raise ConfigError(
            f"pipeline {spec.pipeline!r} gives actions {list(spec.action.shape)}, "
            f"env {env.name!r} takes {list(env.action.shape)}"
        )
    if spec.control_hz != env.control_hz:
        raise ConfigError(
            f"pipeline {spec.pipeline!r} acts at {spec.control_hz:g} Hz, env {env.name!r} runs at {env.control_hz:g} Hz"
        )
    horizon = suite.execution_horizon or spec.execution_horizon
    if not 1 <= horizon <= spec.horizon:
        raise ConfigError(f"execution_horizon {horizon} is not within the chunk of {spec.horizon} steps")
    given = {s.name: s for s in env.observations}
    for wanted in spec.observations:
        have = given[wanted.name] if wanted.name in suite.keys else None
        if have and (have.dtype != wanted.dtype or have.shape != wanted.shape):
            raise ConfigError(
                f"env {env.name!r} gives {wanted.name} as {have.dtype}{list(have.shape)}, "
                f"pipeline {spec.pipeline!r} takes {wanted.dtype}{list(wanted.shape)}"
            )
