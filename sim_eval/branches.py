"""Where branches begin: points along recorded runs of an env's expert, from which policies act and worlds imagine."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from omni_loop import registry
from omni_loop.env import Env, Expert
from omni_loop.errors import ConfigError, InvalidInput, nearest
from omni_loop.types import Array

_DRAW = 4711  # with the seed: where a run's branches begin


@dataclass(frozen=True, slots=True)
class RealRun:
    """A run of ``n`` steps. ``arrays[key] [n + 1, ...]``: observations; ``actions float32[n, action_dim]``; ``scores
    float[n + 1]``, the first of which is the second, as an env says its score after a step."""

    seed: int
    arrays: Mapping[str, Array]
    actions: NDArray[np.float32]
    scores: NDArray[np.float64]
    success: bool

    def __len__(self) -> int:
        return len(self.actions)


@dataclass(frozen=True, slots=True)
class Branch:
    """Step ``step`` of ``run``; ``seen`` real steps up to there are what a world model is shown."""

    run: RealRun
    step: int
    seen: int

    @property
    def key(self) -> str:
        return f"{self.run.seed}/{self.step}"

    @property
    def lead(self) -> NDArray[np.float32]:
        """Actions from the run's first step to here."""
        return self.run.actions[: self.step]

    @property
    def score(self) -> float:
        return float(self.run.scores[self.step])

    @property
    def after(self) -> int:
        """Steps of the run from here on."""
        return len(self.run) - self.step

    def shown(self, keys: Collection[str]) -> tuple[dict[str, Array], NDArray[np.float32]]:
        """``[k, ...]`` of ``keys`` for the last ``k <= seen`` steps, and the ``k - 1`` actions between them."""
        first = max(0, self.step + 1 - self.seen)
        steps = {key: np.ascontiguousarray(self.run.arrays[key][first : self.step + 1]) for key in keys}
        return steps, self.run.actions[first : self.step]


def expert_of(env: Env) -> Expert:
    """Raises UnknownName when nobody registered an expert for this env."""
    made: Expert = registry.load(registry.EXPERTS, env.name)(env)
    return made


def record(env: Env, expert: Expert, seed: int, keys: Collection[str]) -> RealRun:
    """The expert's whole run of ``seed``.

    Raises:
        ConfigError: the env reports no score.
    """
    arrays = {key: [value] for key, value in env.reset(seed, keys).items()}
    expert.reset(seed)
    actions: list[NDArray[np.float32]] = []
    scores: list[float] = []
    while True:
        actions.append(np.asarray(expert.act(), np.float32))
        done = env.step(actions[-1], keys)
        scores.append(score_of(env, done.info))
        for key in keys:
            arrays[key].append(done.arrays[key])
        if done.success or done.done:
            break
    stacked = {key: np.stack(values) for key, values in arrays.items()}
    return RealRun(seed, stacked, np.array(actions), np.array([scores[0], *scores]), done.success)


def branches(run: RealRun, count: int, seen: int) -> list[Branch]:
    """``count`` points of ``run``, drawn by its seed alone: anywhere from where ``seen`` steps have been seen to the
    last step but one. Fewer, when the run is too short."""
    if count < 1 or seen < 1:
        raise InvalidInput(f"{count} branches after {seen} steps: wanted at least 1 of each")
    places = np.arange(seen - 1, len(run) - 1)
    rng = np.random.default_rng([run.seed, _DRAW])
    chosen = np.sort(rng.choice(places, min(count, len(places)), replace=False))
    return [Branch(run, int(step), seen) for step in chosen]


def recorded(env: Env, seeds: Collection[int], keys: Collection[str], count: int, seen: int) -> Iterator[Branch]:
    """Branches of the expert's runs of ``seeds``."""
    expert = expert_of(env)
    for seed in seeds:
        yield from branches(record(env, expert, seed, keys), count, seen)


def score_of(env: Env, info: Mapping[str, float]) -> float:
    """What the env calls its score."""
    key = env.score
    if key is None or key not in info:
        raise ConfigError(f"env {env.name!r} reports no score {key!r}.{nearest(str(key), info)}")
    return float(info[key])
