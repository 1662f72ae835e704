"""What a player measures: how long answers take, and how far actions jump where a chunk takes over from another."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

RECENT = 10  # delays the estimate is made from
KEPT = 1000  # latencies the quantiles are made from


class Delays:
    """Delays in control periods. The estimate is the longest of the last few, as in real-time chunking
    (arXiv:2506.07339, algorithm 1): a chunk that comes earlier than thought joins as well, a later one may jump."""

    def __init__(self, control_hz: float) -> None:
        self._hz = control_hz
        self._periods: deque[int] = deque(maxlen=RECENT)
        self._latencies: deque[float] = deque(maxlen=KEPT)

    @property
    def known(self) -> bool:
        return bool(self._periods)

    @property
    def periods(self) -> int:
        """That an answer is expected to take; 0 before the first."""
        return max(self._periods, default=0)

    def add(self, periods: int, latency_s: float) -> None:
        """An answer took so many periods; where nobody played meanwhile, what its time would have been in them."""
        self._periods.append(periods or math.ceil(latency_s * self._hz))
        self._latencies.append(latency_s)

    def latency_ms(self, share: float) -> float:
        """Quantile of the last latencies; 0 when there is none."""
        return float(np.quantile(self._latencies, share)) * 1e3 if self._latencies else 0.0


@dataclass(slots=True)
class Seams:
    """Euclidean lengths, in the unit of the action. ``jump``: from the last action of one chunk to the first of the
    next; ``stride``: between actions of one chunk."""

    count: int = 0
    jump_sum: float = 0.0
    jump_max: float = 0.0
    strides: int = 0
    stride_sum: float = 0.0

    def add(self, step: NDArray[np.float32], seam: bool) -> None:
        length = float(np.linalg.norm(step))
        if seam:
            self.count += 1
            self.jump_sum += length
            self.jump_max = max(self.jump_max, length)
        else:
            self.strides += 1
            self.stride_sum += length

    @property
    def jump(self) -> float:
        """Mean jump; 0 when there was no seam."""
        return self.jump_sum / self.count if self.count else 0.0

    @property
    def stride(self) -> float:
        """Mean stride; 0 when there was none."""
        return self.stride_sum / self.strides if self.strides else 0.0
