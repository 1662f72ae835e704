"""Drives the policy inside the world model: one real observation, and from there no simulator."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from omni_loop.env import Env
from omni_loop.errors import Reason, StageFailed

from .api import LoopClient
from .video import GOOD, Frame, caption, resize

DONE = 0.5  # probability above which the context model says the task is done


@dataclass(frozen=True, slots=True)
class Imagined:
    """``frames uint8[1 + steps, h, w, 3]``, the first one real; ``progress`` and ``done float[1 + steps]`` as
    the context model last said: it judges once per tick, the frame the tick begins from."""

    seed: int
    frames: NDArray[np.uint8]
    progress: NDArray[np.float64]
    done: NDArray[np.float64]
    wall_s: float = 0.0

    @property
    def steps(self) -> int:
        return len(self.frames) - 1

    @property
    def done_at(self) -> int | None:
        """First step at which the context model says done."""
        over = np.flatnonzero(self.done > DONE)
        return int(over[0]) if len(over) else None


def imagine(
    client: LoopClient,
    env: Env,
    *,
    pipeline: str = "pusht-imagine",
    prompt: str = "",
    keys: tuple[str, ...] = ("image", "agent_pos"),
    frame_key: str = "image",
    seed: int,
    steps: int = 100,
    stop_when_done: bool = True,
    on_steps: Callable[[int], None] | None = None,
) -> Imagined:
    """Imagine up to ``steps`` control steps, in chunks of the pipeline's execution horizon.

    Raises:
        StageFailed: the pipeline answered a Predict without frames.
        OmniLoopError: whatever the server says.
    """
    arrays, began = env.reset(seed, {*keys, frame_key}), time.monotonic()
    session = client.open(pipeline, prompt=prompt, seed=seed, keys=keys)
    try:
        frames: list[Frame] = [arrays[frame_key]]
        said = [(0.0, 0.0)]
        most = min(session.spec.execution_horizon, session.spec.max_predict)
        while len(frames) <= steps:
            n, real = min(most, steps + 1 - len(frames)), len(frames) == 1
            seen = {key: arrays[key] for key in keys}
            result = session.infer(seen, step=0, frames=n) if real else session.predict(steps=n)
            if result.frames is None or not len(result.frames.frames):
                raise StageFailed(f"pipeline {pipeline!r} imagined no frames", reason=Reason.BAD_OUTPUT)
            if result.progress:  # a tick judges the frame it began from
                said[-1] = (result.progress.progress, result.progress.done)
            if stop_when_done and said[-1][1] > DONE:
                break  # the episode was over where this tick began: what it imagined after is not part of it
            got = result.frames.frames[:n]
            frames += list(got)
            said += [said[-1]] * len(got)
            if on_steps:
                on_steps(len(frames) - 1)
    finally:
        session.close()
    progress, done = np.array(said, np.float64).T
    return Imagined(seed, np.stack(frames), progress, done, round(time.monotonic() - began, 2))


def video_frames(imagined: Imagined, width: int = 384) -> Iterator[Frame]:
    """The imagined episode with the context model's progress drawn below it."""
    for step, frame in enumerate(imagined.frames):
        done = imagined.done_at is not None and step >= imagined.done_at
        text = "done" if done else "imagined" if step else "real"
        right = f"step {step}   progress {imagined.progress[step]:.2f}"
        bar = float(imagined.progress[step])
        yield caption(resize(frame, width), text, right, bar, **({"colour": GOOD} if done else {}))
