"""Replays an episode from its seed and executed actions, to look at it: frames are rendered here, not while
latency is measured, and only of episodes somebody will look at. That it ends the same is checked."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from omni_loop.env import Env
from omni_loop.errors import OmniLoopError, Reason

from .episodes import EpisodeResult


class ReplayMismatch(OmniLoopError):
    """The replayed episode went another way: the env is no pure function of seed and actions."""

    reason = Reason.BAD_OUTPUT


@dataclass(frozen=True, slots=True)
class Replay:
    """Frames of steps 0..n. ``views uint8[n + 1, h, w, 3]`` are for people, ``seen`` what the policy's camera
    saw (None without a frame key); ``scores float[n + 1]``."""

    result: EpisodeResult
    views: NDArray[np.uint8]
    seen: NDArray[np.uint8] | None
    scores: NDArray[np.float64]


def replay(env: Env, result: EpisodeResult, frame_key: str | None = None) -> Replay:
    """Step through ``result`` again and keep its frames.

    Raises:
        ReplayMismatch: another outcome or score than was recorded, or an end before the last action.
    """
    keys = (frame_key,) if frame_key else ()
    seen = [env.reset(result.seed, keys)]
    views, scores, success = [env.render()], [0.0], False
    for i, action in enumerate(result.actions, 1):
        step = env.step(action, keys)
        if (step.success or step.done) and i < len(result.actions):
            text = f"seed {result.seed} ended at step {i} with success={step.success} when replayed"
            raise ReplayMismatch(f"{text}; recorded were {len(result.actions)} steps")
        seen.append(dict(step.arrays))
        views.append(env.render())
        scores.append(float(step.info[env.score]) if env.score else 0.0)
        success = step.success
    # The physics repeat to the bit; a score may differ in its last place (sums over unordered shapes).
    if success != result.success or not math.isclose(max(scores), result.score, rel_tol=1e-9, abs_tol=1e-9):
        raise ReplayMismatch(
            f"seed {result.seed} replayed to success={success}, score {max(scores):g}; "
            f"recorded was success={result.success}, score {result.score:g}"
        )
    frames = np.stack([arrays[frame_key] for arrays in seen]) if frame_key else None
    return Replay(result, np.stack(views), frames, np.array(scores))
