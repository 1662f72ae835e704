"""What the live page shows: of each session its latencies and its last frame, beside the one predicted for that step.

Ticks are watched only while somebody looks. What is kept are references to arrays that were made anyway, for a few
seconds after the last look; pictures are encoded when they are fetched, off the event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from ...types import FramePrediction, Op

if TYPE_CHECKING:
    from ...loop.tap import Ticked
    from ..service import LoopService

LOOK_S = 5.0  # ticks are watched so long after the last look
_LATENCIES = 128  # of a session, that percentiles are taken of
Which = Literal["observed", "predicted"]


@dataclass(slots=True)
class Seen:
    """Of one session. ``predicted``: for the control step of ``observed`` where one was predicted, else the newest."""

    epoch: int = 0
    latencies_ms: deque[float] = field(default_factory=lambda: deque(maxlen=_LATENCIES))
    observed: tuple[int, NDArray[np.uint8]] | None = None  # control step, uint8[h, w, 3]
    predicted: tuple[int, NDArray[np.uint8]] | None = None
    ahead: FramePrediction | None = None

    def percentile(self, percent: float) -> float | None:
        return float(np.percentile(self.latencies_ms, percent)) if self.latencies_ms else None

    def hear(self, event: Ticked) -> None:
        result = event.result
        self.latencies_ms.append((result.early or result.timings).total_ms)
        if event.request.op is Op.PLAN:
            return
        if event.epoch != self.epoch:
            self.epoch, self.observed, self.predicted, self.ahead = event.epoch, None, None, None
        image = _image(event.request.arrays) if event.request.op is Op.INFER else None
        if image is not None:
            self.observed = event.step, image
            self._match(event.step)
        if result.frames is not None and len(result.frames.frames):
            self.ahead = result.frames
            if self.observed is None or self.predicted is None or image is None:
                self.predicted = result.frames.first_step, result.frames.frames[0]

    def _match(self, step: int) -> None:
        """The frame that was predicted for what has just been observed."""
        if self.ahead is None:
            return
        at = min(max(step - self.ahead.first_step, 0), len(self.ahead.frames) - 1)
        self.predicted = self.ahead.first_step + at, self.ahead.frames[at]


class LiveView:
    """By session id. All methods belong to the event loop."""

    def __init__(self, service: LoopService) -> None:
        self._service = service
        self._seen: dict[str, Seen] = {}
        self._unwatch: Callable[[], None] | None = None
        self._ends: asyncio.TimerHandle | None = None

    @property
    def watching(self) -> bool:
        return self._unwatch is not None

    def look(self) -> dict[str, Seen]:
        """What has been seen since somebody began to look, of sessions that are there."""
        core = self._service.core
        if self._unwatch is None:
            self._unwatch = core.watch(self._heard)
        if self._ends is not None:
            self._ends.cancel()
        self._ends = asyncio.get_running_loop().call_later(LOOK_S, self.close)
        there = {summary.id for summary in core.list_sessions()}
        self._seen = {id: seen for id, seen in self._seen.items() if id in there}
        return self._seen

    def frame(self, session: str, which: Which) -> tuple[int, NDArray[np.uint8]] | None:
        """Control step and ``uint8[h, w, 3]``; None: nothing of the kind was seen."""
        seen = self.look().get(session)
        return None if seen is None else getattr(seen, which)

    def close(self) -> None:
        """Nobody looks any more."""
        if self._unwatch is not None:
            self._unwatch()
        if self._ends is not None:
            self._ends.cancel()
        self._unwatch = self._ends = None
        self._seen = {}

    def _heard(self, event: Ticked) -> None:
        self._seen.setdefault(event.request.session, Seen()).hear(event)


def png(frame: NDArray[np.uint8]) -> bytes:
    """``uint8[h, w, 3]`` as a PNG file."""
    import io

    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(frame)).save(file, "png", compress_level=1)
    return file.getvalue()


def _image(arrays: Any) -> NDArray[np.uint8] | None:
    """The first camera's newest image; None: the observation has no camera."""
    for array in arrays.values():
        if isinstance(array, np.ndarray) and array.dtype == np.uint8 and array.ndim >= 3 and array.shape[-1] == 3:
            image: NDArray[np.uint8] = array.reshape(-1, *array.shape[-3:])[-1]
            return image
    return None
