"""Demonstrations of PushT: who acts, how episodes are made, how they lie on disk.

Kinds of episode:

``expert``
    the planner's own actions;
``perturbed``
    the planner's actions with bursts of noise on what is executed; ``label`` keeps what the expert
    wanted, so a policy learns to recover (DART, arXiv 1703.09327);
``random``
    pushes through and around the T that no expert would make: contacts of every sort for a world model;
``poses``
    single drawn scenes at random states, a third of them close to the goal, for the readout.

A dataset is a folder of ``.npy`` files that can be memory-mapped: ``frames uint8[n, 96, 96, 3]``,
``state float32[n, 5]``, ``action float32[n, 2]`` (executed at row i, leads to row i + 1),
``label float32[n, 2]``, ``points float32[n, 9, 2]``, ``coverage float32[n]``, and per episode ``length``,
``kind``, ``success``, ``seed``. An episode of T actions has T + 1 rows; the last row's action repeats the one before.
``frames`` covers the first ``framed`` rows only: the rest is state alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from omni_loop.errors import UnknownName, nearest
from omni_loop.training.demos import Demos, check_seeds, load_splits

from .expert import PushTExpert
from .geometry import keypoints
from .simulator import FRAME_SIZE, PushTSimulator

KINDS = ("expert", "perturbed", "random", "poses")
_POSES_PER_EPISODE = 100


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
    frames: NDArray[np.uint8] | None


@dataclass(frozen=True, slots=True)
class Job:
    kind: str
    seed: int
    framed: bool
    max_steps: int = 300


def scene_points(state: NDArray[np.float32]) -> NDArray[np.float32]:
    """States ``[n, 5]`` to the scene's points ``float32[n, 9, 2]`` in -1..1: the agent, then keypoints."""
    points = np.concatenate([state[:, None, :2], keypoints(state[:, 2:])], axis=1)
    return (points / 256 - 1).astype(np.float32)


def _expert_actions(
    sim: PushTSimulator, rng: np.random.Generator, perturb: bool, seed: int
) -> Iterator[tuple[NDArray[np.float32], NDArray[np.float32]]]:
    """Yield ``(label, executed)`` for ever."""
    expert = PushTExpert()
    expert.reset(seed)
    burst = 0
    offset: NDArray[np.float64] = np.zeros(2)
    while True:
        label = expert.act(sim.state)
        if perturb and burst == 0 and rng.random() < 0.08:
            burst, offset = int(rng.integers(2, 7)), rng.normal(0, 22, 2)
        executed = label
        if burst:
            burst -= 1
            noisy = label + offset + rng.normal(0, 5, 2)
            executed = np.clip(noisy, 0, 512).astype(np.float32)
            if burst == 0:
                expert.forget()
        yield label, executed


def _random_actions(
    sim: PushTSimulator, rng: np.random.Generator
) -> Iterator[tuple[NDArray[np.float32], NDArray[np.float32]]]:
    left = 0
    target: NDArray[np.float64] = np.zeros(2)
    while True:
        agent, block = sim.state[:2].astype(np.float64), sim.state[2:4].astype(np.float64)
        if left == 0:
            left = int(rng.integers(3, 9))
            if rng.random() < 0.6:  # through the T
                target = agent + (block + rng.normal(0, 40, 2) - agent) * rng.uniform(1.0, 1.8)
            else:
                target = rng.uniform(40, 472, 2)
        left -= 1
        step = target - agent
        reach = rng.uniform(30, 110)
        action = agent + step * min(1.0, reach / max(float(np.linalg.norm(step)), 1e-6))
        noisy = np.clip(action + rng.normal(0, 4, 2), 12, 500).astype(np.float32)
        yield noisy, noisy


def _poses(job: Job) -> Episode:
    sim, rng = PushTSimulator(), np.random.default_rng([job.seed, 77])
    sim.reset(job.seed)
    n = _POSES_PER_EPISODE
    state = np.zeros((n, 5), np.float32)
    frames, coverage = np.zeros((n, FRAME_SIZE, FRAME_SIZE, 3), np.uint8), np.zeros(n, np.float32)
    for i in range(n):
        if i % 3 == 0:  # near the goal, where a pixel decides
            spread = rng.choice([3.0, 10.0, 30.0])
            pose = np.array([256, 256, np.pi / 4]) + rng.normal(0, 1, 3) * [spread, spread, spread / 60]
            pose[2] += 2 * np.pi * rng.integers(-1, 2)
        else:
            pose = np.array([*rng.uniform(70, 442, 2), rng.uniform(-np.pi, np.pi)])
        agent = rng.uniform(15, 497, 2)
        if rng.random() < 0.5:  # often near the T, half hiding it
            agent = np.clip(pose[:2] + rng.normal(0, 70, 2), 15, 497)
        sim.place(np.array([*agent, *pose]))
        state[i], frames[i], coverage[i] = sim.state, sim.frame(), sim.coverage
    action = state[:, :2].copy()
    return Episode("poses", job.seed, False, state, action, action, coverage, frames)


def make_episode(job: Job) -> Episode:
    """Run one job; a pure function of it."""
    if job.kind == "poses":
        return _poses(job)
    sim, rng = PushTSimulator(), np.random.default_rng([job.seed, KINDS.index(job.kind)])
    sim.reset(job.seed)
    actions = (
        _random_actions(sim, rng)
        if job.kind == "random"
        else _expert_actions(sim, rng, job.kind == "perturbed", job.seed)
    )
    states, executed, labels, coverage, frames, success = [sim.state], [], [], [sim.coverage], [], False
    if job.framed:
        frames.append(sim.frame())
    for _ in range(job.max_steps):
        label, action = next(actions)
        info = sim.step(action)
        states.append(sim.state)
        executed.append(action)
        labels.append(label)
        coverage.append(info["coverage"])
        if job.framed:
            frames.append(sim.frame())
        if info["is_success"]:
            success = True
            break
    executed.append(executed[-1])
    labels.append(labels[-1])
    return Episode(
        job.kind,
        job.seed,
        success,
        np.array(states, np.float32),
        np.array(executed, np.float32),
        np.array(labels, np.float32),
        np.array(coverage, np.float32),
        np.array(frames, np.uint8) if job.framed else None,
    )


def jobs(counts: dict[str, int], framed: dict[str, int], first_seed: int) -> list[Job]:
    """Framed episodes first, so that ``frames`` is a prefix of the rows."""
    made = [
        Job(
            kind,
            first_seed + 100_000 * KINDS.index(kind) + i,
            i < framed.get(kind, 0),
            120 if kind == "random" else 300,
        )
        for kind in KINDS
        for i in range(counts.get(kind, 0))
    ]
    return sorted(made, key=lambda job: not job.framed)


def generate(
    folder: Path,
    counts: dict[str, int],
    framed: dict[str, int],
    first_seed: int,
    workers: int = 2,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Make the episodes on ``workers`` processes and write the dataset to ``folder``."""
    todo = jobs(counts, framed, first_seed)
    folder.mkdir(parents=True, exist_ok=True)
    raw = folder / "frames.raw"
    episodes: list[Episode] = []
    rows = 0
    with raw.open("wb") as out, ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for i, episode in enumerate(pool.map(make_episode, todo, chunksize=4)):
            if episode.frames is not None:
                out.write(episode.frames.tobytes())
                rows += len(episode.frames)
            episodes.append(Episode(**{f: getattr(episode, f) for f in _ROWS}, frames=None))
            if progress:
                progress(i + 1, len(todo))
    _write(folder, raw, rows, episodes)
    (folder / "recipe.json").write_text(
        json.dumps({"counts": counts, "framed": framed, "first_seed": first_seed}, indent=1)
    )
    return folder


_ROWS = ("kind", "seed", "success", "state", "action", "label", "coverage")


def _write(folder: Path, raw: Path, rows: int, episodes: list[Episode]) -> None:
    for name in ("state", "action", "label", "coverage"):
        np.save(folder / f"{name}.npy", np.concatenate([getattr(e, name) for e in episodes]))
    np.save(folder / "points.npy", scene_points(np.concatenate([e.state for e in episodes])))
    np.save(folder / "length.npy", np.array([len(e.state) for e in episodes]))
    np.save(folder / "kind.npy", np.array([KINDS.index(e.kind) for e in episodes]))
    np.save(folder / "success.npy", np.array([e.success for e in episodes]))
    np.save(folder / "seed.npy", np.array([e.seed for e in episodes]))
    shape = (rows, FRAME_SIZE, FRAME_SIZE, 3)
    # A .npy header in front of the raw rows, so that the file can be memory-mapped by name and shape.
    header = {"descr": "|u1", "fortran_order": False, "shape": shape}
    with (folder / "frames.npy").open("wb") as out:
        np.lib.format.write_array_header_1_0(out, header)  # type: ignore[no-untyped-call]
        with raw.open("rb") as source:
            while block := source.read(1 << 24):
                out.write(block)
    raw.unlink()


@dataclass(frozen=True, slots=True)
class Split:
    """How many episodes of each kind, of how many the frames are kept, and where their seeds begin."""

    counts: Mapping[str, int]
    framed: Mapping[str, int]
    first_seed: int

    def seeds(self) -> set[int]:
        """Every seed an episode of this split is made from."""
        return {job.seed for job in jobs(dict(self.counts), dict(self.framed), self.first_seed)}


@dataclass(frozen=True)
class PushTDemos:
    """The set the train command uses (a :class:`omni_loop.training.demos.DemoSet`): splits of other seeds.

    A set whose splits share seeds with each other or with evaluation (:data:`EVALUATION_SEED` and up) cannot
    be made; nor can folders on disk that share seeds be loaded as one.
    """

    name: str
    kinds: tuple[str, ...]
    splits: Mapping[str, Split]

    def __post_init__(self) -> None:
        for split in self.splits.values():
            for kind in (*split.counts, *split.framed):
                if kind not in self.kinds:
                    raise UnknownName(f"demonstrations {self.name!r} have no kind {kind!r}.{nearest(kind, self.kinds)}")
        check_seeds(self.name, {name: split.seeds() for name, split in self.splits.items()})

    def split(self, name: str) -> Split:
        if name not in self.splits:
            raise UnknownName(f"demonstrations {self.name!r} have no split {name!r}.{nearest(name, self.splits)}")
        return self.splits[name]

    def scaled(self, factor: float) -> PushTDemos:
        """The same set with ``factor`` times the episodes of every kind (at least one of each)."""

        def times(counts: Mapping[str, int]) -> dict[str, int]:
            return {kind: max(1, round(n * factor)) for kind, n in counts.items() if n}

        made = {n: replace(s, counts=times(s.counts), framed=times(s.framed)) for n, s in self.splits.items()}
        return replace(self, splits=made)

    def generate(
        self, folder: Path, workers: int = 2, progress: Callable[[str, int, int], None] | None = None
    ) -> dict[str, Path]:
        """Write every split to ``folder/<split>``; ``progress(split, made, total)``."""

        def report(name: str) -> Callable[[int, int], None] | None:
            return None if progress is None else lambda made, total: progress(name, made, total)

        return {
            name: generate(folder / name, dict(s.counts), dict(s.framed), s.first_seed, workers, report(name))
            for name, s in self.splits.items()
        }

    def load(self, folder: Path) -> dict[str, Demos]:
        """The splits that :meth:`generate` wrote to ``folder``, after checking their seeds."""
        return load_splits(folder, self.splits, self.kinds)


PUSHT_DEMOS = PushTDemos(
    "pusht",
    KINDS,
    {
        "train": Split(
            {"expert": 1600, "perturbed": 600, "random": 140, "poses": 160},
            {"expert": 450, "perturbed": 240, "random": 140, "poses": 160},
            first_seed=10_000,
        ),
        "test": Split(
            {"expert": 40, "perturbed": 20, "random": 20, "poses": 12},
            {"expert": 40, "perturbed": 20, "random": 20, "poses": 12},
            first_seed=900_000,
        ),
    },
)

#: The first of the expert's and the perturbed episodes of :data:`PUSHT_DEMOS`: a policy is worth what it has seen.
PUSHT_SMALL_DEMOS = PushTDemos(
    "pusht-small",
    KINDS,
    {
        "train": Split({"expert": 200, "perturbed": 60}, {"expert": 60, "perturbed": 30}, first_seed=10_000),
        "test": Split({"expert": 4, "perturbed": 2}, {"expert": 4, "perturbed": 2}, first_seed=900_000),
    },
)
