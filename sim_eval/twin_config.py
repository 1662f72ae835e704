"""What a twin experiment is made of (``configs/twin/*.yaml``): the policies, the env, and the world model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from omni_loop.config import Count, Deployment, Section, load, load_deployment, validate
from omni_loop.env import EVALUATION_SEED
from omni_loop.errors import UnknownName, nearest
from omni_loop.messages import Scalar

from .measures import Measure
from .serving import describe
from .store import fingerprint
from .suite import load_suite
from .versions import env_version, simulator


class TwinPolicy(Section):
    """A policy of some strength: a deployment, with options of its stages where they differ, or a bound without a
    model."""

    name: str = Field(min_length=1)
    deployment: str = ""
    stage_options: Mapping[str, Mapping[str, Scalar]] = Field(default_factory=dict)
    execution_horizon: Count | None = None
    bound: Literal["", "random", "hold"] = ""

    @model_validator(mode="after")
    def _one(self) -> TwinPolicy:
        if bool(self.deployment) == bool(self.bound):
            raise ValueError("a policy is a deployment or a bound")
        return self

    def served(self) -> Deployment:
        chosen = load_deployment(self.deployment)
        options = {k: dict(v) for k, v in chosen.stage_options.items()}
        for stage, mine in self.stage_options.items():
            options[stage] = {**options.get(stage, {}), **mine}
        return Deployment.model_validate({**chosen.model_dump(), "stage_options": options})


class TwinConfig(Section):
    """``configs/twin/*.yaml``. ``suite`` gives env, pipeline, observation keys and prompt; every seed is one from
    ``first_seed`` on. ``image`` and ``agent`` are the env's keys that the world model continues; ``success`` the score
    above which the env calls it one. Lengths in control steps."""

    name: str
    description: str = ""
    suite: str
    world: str  # pipeline that offers RECONDITION and PREDICT
    world_deployment: str
    image: str = "image"
    agent: str = "agent_pos"
    success: float
    first_seed: Annotated[int, Field(ge=EVALUATION_SEED)] = EVALUATION_SEED
    episodes: Count = 50  # whole ones in the simulator
    imagined_episodes: Annotated[int, Field(ge=0)] = 5
    imagined_steps: Count = 150
    runs: Count = 60  # of the expert
    per_run: Count = 2  # branches
    seen: Count = 8  # real steps the world model is shown
    steps: Count = 16  # from a branch on
    measure: Measure = Measure()
    policies: tuple[TwinPolicy, ...] = Field(min_length=2)

    @model_validator(mode="after")
    def _named(self) -> TwinConfig:
        if len({p.name for p in self.policies}) != len(self.policies):
            raise ValueError("policies: one name stands twice")
        if self.measure.steps > self.steps:
            raise ValueError(f"measure: {self.measure.steps} steps, of {self.steps} that are played")
        return self

    def fingerprint(self) -> dict[str, Any]:
        """What a play is a function of, besides its own name and seed, as this file has it."""
        free = {"name", "description", "first_seed", "episodes", "imagined_episodes", "runs", "measure", "policies"}
        said = self.model_dump(mode="json", exclude=free)
        return said | {f"policies.{p.name}": p.model_dump(mode="json") for p in self.policies}

    def named(self) -> dict[str, Any]:
        """The same of what this file names: the suite, the version of its env, and what is served. Weights are not
        read."""
        suite = load_suite(self.suite)
        env = suite.make_env()
        try:
            said = fingerprint(suite, env=env_version(env), **simulator(env))
        finally:
            env.close()
        served = {f"served.{p.name}": describe(p.served()) for p in self.policies if p.deployment}
        return said | {"served": describe(load_deployment(self.world_deployment))} | served

    def only(self, names: Sequence[str]) -> TwinConfig:
        known = [p.name for p in self.policies]
        for name in names:
            if name not in known:
                raise UnknownName(f"twin {self.name!r} has no policy {name!r}.{nearest(name, known)}")
        chosen = [p.model_dump(mode="json") for p in self.policies if p.name in names]
        return self.changed(policies=chosen) if names else self

    def changed(self, **fields: Any) -> TwinConfig:
        """A copy with other values, validated like a file."""
        return validate(TwinConfig, {**self.model_dump(mode="json"), **fields}, self.name)


def load_twin(path_or_name: str | Path) -> TwinConfig:
    """From a file, or a shipped one by name."""
    return load(TwinConfig, path_or_name, "twin")
