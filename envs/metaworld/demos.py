"""Demonstrations of Meta-World.

Kinds of episode:

``expert``
    the scripted policy's own actions;
``perturbed``
    its actions with noise on about half of those executed; ``label`` keeps what the expert wanted, so that a policy
    learns to recover (DART, arXiv 1703.09327).

An episode goes on until five of its steps have succeeded. The columns are those of
:class:`omni_loop.training.demos.Demos`, with ``state float32[n, 39]``, ``action`` and ``label float32[n, 4]``,
``points float32[n, 3, 2]`` (hand, first object and goal from above; 1 m is 2), ``coverage`` 1 where the task succeeds,
``frames uint8[n, 64, 64, 3]`` of all rows, or of none. Two things lie beside them: the column ``task int64[episodes]``,
an index into ``tasks.json``, a list of names. An episode of T actions has T + 1 rows; the last row's action repeats the
one before.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from omni_loop.errors import UnknownName, nearest
from omni_loop.training.demos import Demos, check_seeds, load_splits
from omni_loop.types import Array

from .env import GRIPPER, MetaWorld
from .expert import MetaWorldExpert
from .tasks import INSTRUCTIONS, SIX, THREE
from .view import IMAGE_SIZE

KINDS = ("expert", "perturbed")
_MAX_STEPS, _STAY = 150, 5  # steps of an episode; successful ones until it ends
_NOISE = (0.3, 0.6)  # standard deviation of what perturbs an action, one of them for a whole episode
_CENTRE = np.array([0.0, 0.7])  # m, of the table
_POINTS = np.array([[0, 1], [4, 5], [36, 37]])  # of the state: x and y of hand, first object and goal
_SEEDS = 10_000  # between those of a task and the next


@dataclass(frozen=True, slots=True)
class Job:
    task: str
    kind: str
    seed: int
    framed: bool


@dataclass(frozen=True, slots=True)
class Episode:
    """Rows of one episode; see the module's text for shapes."""

    job: Job
    success: bool
    state: NDArray[np.float32]
    action: NDArray[np.float32]
    label: NDArray[np.float32]
    coverage: NDArray[np.float32]
    frames: NDArray[np.uint8]


@functools.cache
def _env(task: str, framed: bool) -> MetaWorld:
    """One for all episodes of a process: making it, or its first frame, takes as long as several episodes."""
    return MetaWorld(_MAX_STEPS, task, images=framed)


def make_episode(job: Job) -> Episode:
    """A pure function of the job."""
    env, rng = _env(job.task, job.framed), np.random.default_rng([job.seed, 6])
    expert, keys = MetaWorldExpert(env), ("state", "image") if job.framed else ("state",)
    scale = float(rng.choice(_NOISE)) if job.kind == "perturbed" else 0.0
    seen, there = [env.reset(job.seed, keys)], [False]
    actions: list[NDArray[np.float32]] = []
    labels: list[NDArray[np.float32]] = []
    while len(actions) < _MAX_STEPS and sum(there) < _STAY:
        label = expert.act()
        noise = scale * rng.normal(size=4) * (rng.random() < 0.5) * [1, 1, 1, 0]
        action = np.clip(label + noise, -1, 1).astype(np.float32)
        step = env.step(action, keys)
        seen.append(dict(step.arrays))
        there.append(step.success)
        actions.append(action)
        labels.append(label)
    return Episode(
        job,
        any(there),
        state=np.array([arrays["state"] for arrays in seen], np.float32),
        action=np.array([*actions, actions[-1]], np.float32),
        label=np.array([*labels, labels[-1]], np.float32),
        coverage=np.array(there, np.float32),
        frames=np.array([arrays["image"] for arrays in seen], np.uint8) if job.framed else _no_frames(),
    )


@dataclass(frozen=True)
class MetaWorldDemos:
    """The set as :class:`omni_loop.training.demos.DemoSet`. ``splits``: for each, how many episodes of each kind a task
    has, and where the seeds of the first task begin; those of the next begin 10,000 later."""

    name: str
    tasks: tuple[str, ...]
    splits: Mapping[str, tuple[Mapping[str, int], int]]
    framed: bool = False
    kinds: tuple[str, ...] = KINDS
    env: str = MetaWorld.name

    def __post_init__(self) -> None:
        for task in self.tasks:
            if task not in INSTRUCTIONS:
                raise UnknownName(f"demonstrations {self.name!r} know no task {task!r}.{nearest(task, INSTRUCTIONS)}")
        for split in self.splits:
            for job in self.jobs(split):
                if job.kind not in self.kinds:
                    raise UnknownName(
                        f"demonstrations {self.name!r} have no kind {job.kind!r}.{nearest(job.kind, self.kinds)}"
                    )
        check_seeds(self.name, {split: [job.seed for job in self.jobs(split)] for split in self.splits})

    @property
    def prompts(self) -> dict[str, str]:
        """What a policy is told, by task."""
        return {task: INSTRUCTIONS[task] for task in self.tasks}

    def jobs(self, split: str) -> list[Job]:
        """Every episode of a split."""
        if split not in self.splits:
            raise UnknownName(f"demonstrations {self.name!r} have no split {split!r}.{nearest(split, self.splits)}")
        counts, first = self.splits[split]
        kinds = [kind for kind, n in counts.items() for _ in range(n)]
        return [
            Job(task, kind, first + _SEEDS * t + i, self.framed)
            for t, task in enumerate(self.tasks)
            for i, kind in enumerate(kinds)
        ]

    def generate(
        self, folder: Path, workers: int = 2, progress: Callable[[str, int, int], None] | None = None
    ) -> dict[str, Path]:
        """Write every split to ``folder/<split>``; ``progress(split, made, total)``."""
        made = {}
        with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
            for split, (counts, first) in self.splits.items():
                jobs = self.jobs(split)

                def report(n: int, split: str = split, total: int = len(jobs)) -> None:
                    if progress:
                        progress(split, n, total)

                made[split] = _write(folder / split, pool.map(make_episode, jobs, chunksize=4), report)
                recipe = {"tasks": self.prompts, "counts": dict(counts), "first_seed": first}
                (folder / split / "tasks.json").write_text(json.dumps(self.tasks))
                (folder / split / "recipe.json").write_text(json.dumps(recipe, indent=1))
                np.save(folder / split / "task.npy", np.array([self.tasks.index(job.task) for job in jobs]))
        return made

    def load(self, folder: Path) -> dict[str, Demos]:
        """The splits that :meth:`generate` wrote to ``folder``, after checking their seeds."""
        return load_splits(folder, self.splits, self.kinds)

    def gave(self, demos: Demos, rows: NDArray[np.int64]) -> dict[str, Array]:
        """What the env gave at ``rows``, by observation key."""
        state = demos.state[rows]
        given: dict[str, Array] = {"state": state, "gripper": state[:, GRIPPER]}
        return given | {"image": demos.frames[rows]} if self.framed else given


def _no_frames() -> NDArray[np.uint8]:
    return np.zeros((0, IMAGE_SIZE, IMAGE_SIZE, 3), np.uint8)


def _frames_header(out: BinaryIO, rows: int) -> None:
    """The header of a ``.npy`` file; of the same length for any number of rows (numpy leaves it room to grow)."""
    header = {"descr": "|u1", "fortran_order": False, "shape": (rows, IMAGE_SIZE, IMAGE_SIZE, 3)}
    np.lib.format.write_array_header_1_0(out, header)  # type: ignore[no-untyped-call]


def _write(folder: Path, episodes: Iterable[Episode], report: Callable[[int], None]) -> Path:
    """Frames go to disk as they come, since hundreds of MB are no matter for memory; the rest when all are there."""
    folder.mkdir(parents=True, exist_ok=True)
    kept: list[Episode] = []
    rows = 0
    with (folder / "frames.npy").open("wb") as out:
        _frames_header(out, 0)
        for episode in episodes:
            out.write(episode.frames.tobytes())
            rows += len(episode.frames)
            kept.append(replace(episode, frames=_no_frames()))
            report(len(kept))
        out.seek(0)
        _frames_header(out, rows)
    state = np.concatenate([e.state for e in kept])
    columns = {
        "state": state,
        "points": ((state[:, _POINTS] - _CENTRE) * 2).astype(np.float32),
        "action": np.concatenate([e.action for e in kept]),
        "label": np.concatenate([e.label for e in kept]),
        "coverage": np.concatenate([e.coverage for e in kept]),
        "length": np.array([len(e.state) for e in kept]),
        "kind": np.array([KINDS.index(e.job.kind) for e in kept]),
        "success": np.array([e.success for e in kept]),
        "seed": np.array([e.job.seed for e in kept]),
    }
    for name, column in columns.items():
        np.save(folder / f"{name}.npy", column)
    return folder


METAWORLD_DEMOS = MetaWorldDemos(
    "metaworld",
    SIX,
    {"train": ({"expert": 27, "perturbed": 53}, 300_000), "test": ({"expert": 3, "perturbed": 5}, 900_000)},
)
METAWORLD_PIXELS_DEMOS = MetaWorldDemos(
    "metaworld-pixels",
    THREE,
    {"train": ({"expert": 45, "perturbed": 90}, 500_000), "test": ({"expert": 2, "perturbed": 4}, 950_000)},
    framed=True,
)
