"""From the ticks of a recorded episode to control steps: what was seen at each, and what was done there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..errors import Unsupported
from ..types import Array, Op
from .reader import Episode


@dataclass(frozen=True, slots=True)
class Seen:
    """One observed control step. ``done float32[k, action_dim]``: the actions executed from here to the next observed
    step; after the last one those that were sent, of which nobody said whether they were executed."""

    step: int
    arrays: Mapping[str, Array]
    done: NDArray[np.float32]


def timeline(episode: Episode) -> list[Seen]:
    """Observed steps in order, as they count in the end: what was taken back is left out, and imagined steps are no
    observations. A recondition gives as many as it had frames.

    Raises:
        Unsupported: the episode is not complete.
    """
    if not episode.complete:
        raise Unsupported(f"episode {episode.name}: {episode.incomplete}")
    steps: dict[int, Mapping[str, Array]] = {}
    before: dict[int, NDArray[np.float32]] = {}  # executed since the observed step before
    sent = np.zeros((0, *episode.spec.action.shape), np.float32)
    for tick in episode.line:
        if tick.op is Op.INFER:
            steps[tick.step] = tick.arrays
            before[tick.step] = _rows(tick.executed, episode)
            sent = sent[:0] if tick.result.chunk is None else tick.result.chunk.actions
        elif tick.op is Op.RECONDITION:
            executed = _rows(tick.executed, episode)
            count = len(next(iter(tick.arrays.values()), ()))
            for i in range(count):
                at, row = tick.step + i, i - (count - len(executed))
                steps[at] = {key: array[i] for key, array in tick.arrays.items()}
                before[at] = executed[row : row + 1] if row >= 0 else executed[:0]
            sent = sent[:0]
    order = sorted(steps)
    done = [before[step] for step in order[1:]]
    return [Seen(step, steps[step], then) for step, then in zip(order, [*done, sent], strict=True)]


def _rows(executed: NDArray[np.float32] | None, episode: Episode) -> NDArray[np.float32]:
    return np.zeros((0, *episode.spec.action.shape), np.float32) if executed is None else executed
