"""Imagined envs: how far an imagined episode goes the way of the real one, and what stepping many at once saves.

Real episodes are the expert's, each taken up where the T first moves: until then a world has nothing to say. The
imagined one begins with the real frames up to there and gets the same actions.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from omni_loop.config import Deployment
from omni_loop.env import EVALUATION_SEED
from omni_loop_envs.pusht.env import PushT
from omni_loop_envs.pusht.expert import PushTExpert
from omni_loop_worlds.imagined import Coverage, ImaginedEnv, ImaginedVectorEnv, ServedWorld, Start

from .rows import Bench, Measured, Settings

_EPISODES, _SEEN, _AHEAD = 40, 8, 32
_MOVED = 1.0  # px
_MANY, _STEPS = 8, 40


@dataclass(frozen=True)
class Real:
    """``frames uint8[n, h, w, 3]`` and the ``n - 1`` actions between them, up to where the T first moves;
    ``actions float32[32, 2]`` from there on, and ``coverage float[33]``, its first before them."""

    start: Start
    actions: NDArray[np.float32]
    coverage: NDArray[np.float64]


def _real(seed: int) -> Real | None:
    """None: the episode ends within the steps to be imagined."""
    env, expert = PushT(), PushTExpert()
    frames, actions, coverage, pose = [env.reset(seed, ("image",))["image"]], [], [0.0], env.state[2:]
    expert.reset(seed)
    first = None
    while first is None or len(actions) < first + _AHEAD:
        actions.append(np.clip(expert.act(env.state), 0, 512).astype(np.float32))
        step = env.step(actions[-1], ("image",))
        frames.append(step.arrays["image"])
        coverage.append(step.info["coverage"])
        if first is None and np.abs(env.state[2:4] - pose[:2]).max() > _MOVED:
            first = len(actions) - 1
        if step.done:
            break
    env.close()
    if first is None or len(actions) < first + _AHEAD:
        return None
    begin = max(0, first + 1 - _SEEN)
    executed = np.array(actions[begin:first], np.float32).reshape(-1, 2)
    start = Start({"image": np.stack(frames[begin : first + 1])}, executed)
    return Real(start, np.array(actions[first:]), np.array(coverage[first:]))


class Dreams:
    """A server of the world model, and real episodes to be imagined."""

    def __init__(self, settings: Settings, world: ServedWorld) -> None:
        self._settings, self.world = settings, world
        self.repeats = 2 if settings.quick else _STEPS

    @cached_property
    def real(self) -> dict[int, Real]:
        found: dict[int, Real] = {}
        seed, count = EVALUATION_SEED, 1 if self._settings.quick else _EPISODES
        while len(found) < count:
            if (one := _real(seed)) is not None:
                found[seed] = one
            seed += 1
        return found

    @cached_property
    def away(self) -> NDArray[np.float64]:
        """``[episodes, 2, 32]``: coverage imagined, and that before the first action, minus the real one."""
        env = ImaginedEnv(self.world, lambda seed: self.real[seed].start, judge=Coverage(), max_steps=_AHEAD)
        rows: list[NDArray[np.float64]] = []
        for seed, real in self.real.items():
            self._settings.say(f"imagining episode {len(rows) + 1} of {len(self.real)}")
            env.reset(seed=seed)
            imagined = np.array([env.step(action)[4]["coverage"] for action in real.actions if not env.present.over])
            imagined = np.pad(imagined, (0, _AHEAD - len(imagined)), mode="edge")  # over: it stays as it is
            rows.append(np.stack([imagined, np.full(_AHEAD, real.coverage[0])]) - real.coverage[1:])
        env.close()
        return np.array(rows)

    def after(self, steps: int) -> Measured:
        ours, still = np.abs(self.away[:, :, steps - 1]).mean(0)
        return Measured(float(ours), float(still))


@contextmanager
def _subject(settings: Settings) -> Iterator[Dreams]:
    options = {"checkpoints": settings.checkpoints} if settings.checkpoints else {}
    deployment = Deployment(pipelines=("pusht-world",), stage_options={"frames": options, "decode": options})
    world = ServedWorld(deployment, "pusht-world").hold()
    try:
        yield Dreams(settings, world)
    finally:
        world.release()


BENCH: Bench[Dreams] = Bench("imagined", _subject)


@BENCH.row("coverage")
def imagined_coverage_8(dreams: Dreams) -> Measured:
    """Mean error of the coverage judged 8 imagined steps after the T first moves; baseline: the T stays."""
    return dreams.after(8)


@BENCH.row("coverage")
def imagined_coverage_16(dreams: Dreams) -> Measured:
    """The same after 16."""
    return dreams.after(16)


@BENCH.row("coverage")
def imagined_coverage_32(dreams: Dreams) -> Measured:
    """The same after 32."""
    return dreams.after(32)


@BENCH.row("ms")
def imagined_step_of_8(dreams: Dreams) -> Measured:
    """A step of 8 imagined envs at once, each; baseline: one after the other."""
    world, start = dreams.world, next(iter(dreams.real.values())).start
    many = ImaginedVectorEnv(world, lambda seed: start, _MANY, max_steps=10 * _STEPS)
    actions = np.full((_MANY, 2), 256, np.float32)
    many.reset(seed=0)
    together, alone = [], []
    for _ in range(dreams.repeats):
        began = time.perf_counter()
        many.step(actions)
        middle = time.perf_counter()
        for env, action in zip(many.envs, actions, strict=True):
            env.step(action)
        together.append(middle - began)
        alone.append(time.perf_counter() - middle)
    many.close()
    return Measured(*(1e3 / _MANY * float(np.median(times)) for times in (together, alone)))
