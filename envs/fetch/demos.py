"""Demonstrations of Fetch pick-and-place.

Kinds of episode:

``expert``
    the controller's own actions;
``perturbed``
    its actions with noise on about half of those executed; ``label`` keeps what the expert wanted, so that a policy
    learns to recover (DART, arXiv 1703.09327).

An episode goes on for a few steps after its first success, so that a policy learns to stay there. The columns are those
of :class:`omni_loop.training.demos.Demos`, with ``state float32[n, 28]``, ``action`` and ``label float32[n, 4]``,
``points float32[n, 3, 2]`` (gripper, cube and goal from above; 1 m of the table is 2), ``coverage`` 1 where the cube is
at the goal, and no ``frames``. An episode of T actions has T + 1 rows; the last row's action repeats the one before.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from omni_loop.errors import UnknownName, nearest
from omni_loop.training.demos import Demos, check_seeds, load_splits
from omni_loop.types import Array

from .env import ENVIRONMENT, GOAL, GRIPPER, OBJECT, FetchPickPlace
from .expert import FetchExpert
from .view import IMAGE_SIZE

KINDS = ("expert", "perturbed")
_MAX_STEPS, _STAY = 50, 6  # steps of an episode; steps after success
_NOISE = (0.2, 0.4)  # standard deviation of what perturbs an action, one of them for a whole episode
_CENTRE = np.array([1.34, 0.75])  # m, of the table


@dataclass(frozen=True, slots=True)
class Episode:
    """Rows of one episode; see the module's text for shapes."""

    kind: str
    seed: int
    success: bool
    state: NDArray[np.float32]
    action: NDArray[np.float32]
    label: NDArray[np.float32]
    coverage: NDArray[np.float32]


@functools.cache
def _env() -> FetchPickPlace:
    """One for all episodes of a process: making it takes as long as ten."""
    return FetchPickPlace(_MAX_STEPS, images=False)


def make_episode(job: tuple[str, int]) -> Episode:
    """The episode of a kind and a seed; a pure function of them."""
    kind, seed = job
    env, expert, rng = _env(), FetchExpert(), np.random.default_rng([seed, 5])
    env.reset(seed, keys=())
    scale = float(rng.choice(_NOISE)) if kind == "perturbed" else 0.0
    states, there = [env.state], [False]
    actions: list[NDArray[np.float32]] = []
    labels: list[NDArray[np.float32]] = []
    while len(actions) < _MAX_STEPS and not all(there[-_STAY - 1 :]):
        label = expert.act(env.state)
        noise = scale * rng.normal(size=4) * (rng.random() < 0.5) * [1, 1, 1, 0]
        action = np.clip(label + noise, -1, 1).astype(np.float32)
        there.append(env.step(action, keys=()).success)
        states.append(env.state)
        actions.append(action)
        labels.append(label)
    columns = (states, [*actions, actions[-1]], [*labels, labels[-1]], there)
    return Episode(kind, seed, there[-1], *(np.array(column, np.float32) for column in columns))


@dataclass(frozen=True)
class FetchDemos:
    """The set as :class:`omni_loop.training.demos.DemoSet`. ``splits``: for each, how many episodes of each kind, and
    where their seeds begin; a kind's seeds begin 100,000 behind those of the kind before."""

    name: str
    splits: Mapping[str, tuple[Mapping[str, int], int]]
    kinds: tuple[str, ...] = KINDS
    env: str = FetchPickPlace.name
    prompt: str = "pick up the cube and carry it to the goal"

    def __post_init__(self) -> None:
        for split in self.splits:
            for kind, _ in self.jobs(split):
                if kind not in self.kinds:
                    raise UnknownName(f"demonstrations {self.name!r} have no kind {kind!r}.{nearest(kind, self.kinds)}")
        check_seeds(self.name, {split: [seed for _, seed in self.jobs(split)] for split in self.splits})

    def jobs(self, split: str) -> list[tuple[str, int]]:
        """Kind and seed of every episode."""
        if split not in self.splits:
            raise UnknownName(f"demonstrations {self.name!r} have no split {split!r}.{nearest(split, self.splits)}")
        counts, first = self.splits[split]
        return [(kind, first + 100_000 * k + i) for k, (kind, n) in enumerate(counts.items()) for i in range(n)]

    def generate(
        self, folder: Path, workers: int = 2, progress: Callable[[str, int, int], None] | None = None
    ) -> dict[str, Path]:
        """Write every split to ``folder/<split>``; ``progress(split, made, total)``."""
        made = {}
        with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
            for split in self.splits:
                jobs, episodes = self.jobs(split), []
                for episode in pool.map(make_episode, jobs, chunksize=8):
                    episodes.append(episode)
                    if progress:
                        progress(split, len(episodes), len(jobs))
                made[split] = _write(folder / split, episodes)
                counts, first = self.splits[split]
                (folder / split / "recipe.json").write_text(
                    json.dumps({"counts": dict(counts), "first_seed": first}, indent=1)
                )
        return made

    def load(self, folder: Path) -> dict[str, Demos]:
        """The splits that :meth:`generate` wrote to ``folder``, after checking their seeds."""
        return load_splits(folder, self.splits, self.kinds)

    def observations(self, demos: Demos, rows: NDArray[np.int64]) -> dict[str, Array]:
        """What the env gave at ``rows``, by observation key."""
        state = demos.state[rows]
        return {"state": state, "environment_state": state[:, ENVIRONMENT]}


def _write(folder: Path, episodes: list[Episode]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    state = np.concatenate([e.state for e in episodes])
    above = np.stack([state[:, part][:, :2] for part in (GRIPPER, OBJECT, GOAL)], axis=1)
    columns = {
        "frames": np.zeros((0, IMAGE_SIZE, IMAGE_SIZE, 3), np.uint8),
        "state": state,
        "points": ((above - _CENTRE) * 2).astype(np.float32),
        "action": np.concatenate([e.action for e in episodes]),
        "label": np.concatenate([e.label for e in episodes]),
        "coverage": np.concatenate([e.coverage for e in episodes]),
        "length": np.array([len(e.state) for e in episodes]),
        "kind": np.array([KINDS.index(e.kind) for e in episodes]),
        "success": np.array([e.success for e in episodes]),
        "seed": np.array([e.seed for e in episodes]),
    }
    for name, column in columns.items():
        np.save(folder / f"{name}.npy", column)
    return folder


FETCH_DEMOS = FetchDemos(
    "fetch-pick-place",
    {
        "train": ({"expert": 170, "perturbed": 330}, 1_000_000),
        "test": ({"expert": 10, "perturbed": 20}, 1_500_000),
    },
)
