"""Frames the world model predicted beside the real ones of the same steps under the same actions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .episodes import EpisodeResult, Prediction
from .replay import Replay
from .video import Frame, beside, caption, resize

_GAP = 3  # px between the frames of a strip


@dataclass(frozen=True, slots=True)
class Comparison:
    """``predicted`` and ``real uint8[n, h, w, 3]`` of steps ``first_step``..; ``before`` is the frame both
    started from."""

    seed: int
    first_step: int
    before: Frame
    predicted: NDArray[np.uint8]
    real: NDArray[np.uint8]

    @property
    def moved(self) -> float:
        """Mean change of the real frames against ``before``, in grey levels."""
        return float(np.abs(self.real.astype(np.int16) - self.before).mean())


def compare(prediction: Prediction, replay: Replay) -> Comparison:
    """Match a prediction with the frames its episode really had."""
    if replay.seen is None:
        raise ValueError("the replay kept no camera frames")
    first, n = prediction.step + 1, len(prediction.frames)
    return Comparison(
        prediction.seed, first, replay.seen[prediction.step], prediction.frames, replay.seen[first : first + n]
    )


def wanted(results: Sequence[EpisodeResult]) -> list[EpisodeResult]:
    """Episodes that hold predictions."""
    return [r for r in results if r.predictions]


def select(comparisons: Sequence[Comparison], keep: int) -> list[Comparison]:
    """The ``keep`` longest and liveliest: a still scene shows nothing about a world model."""
    chosen = sorted(comparisons, key=lambda c: (len(c.predicted), c.moved), reverse=True)[:keep]
    return sorted(chosen, key=lambda c: (c.seed, c.first_step))


def psnr(a: NDArray[np.uint8], b: NDArray[np.uint8]) -> float:
    """Peak signal-to-noise ratio in dB over all pixels; 99 for equal frames."""
    error = float(((a.astype(np.float64) - b.astype(np.float64)) ** 2).mean())
    return 99.0 if error == 0 else min(99.0, 10 * np.log10(255**2 / error))


def by_horizon(comparisons: Sequence[Comparison]) -> list[dict[str, float]]:
    """Per steps ahead: mean PSNR of the prediction, and of repeating the frame before as a yardstick."""
    longest = max((len(c.predicted) for c in comparisons), default=0)
    rows = []
    for i in range(longest):
        at = [c for c in comparisons if len(c.predicted) > i]
        rows.append(
            {
                "ahead": i + 1,
                "n": len(at),
                "psnr": round(float(np.mean([psnr(c.predicted[i], c.real[i]) for c in at])), 2),
                "copy_psnr": round(float(np.mean([psnr(c.before, c.real[i]) for c in at])), 2),
            }
        )
    return rows


def strip(comparison: Comparison) -> Frame:
    """An image: the frame before, then the real frames above the predicted ones."""
    h, w = comparison.before.shape[:2]
    columns = 1 + len(comparison.predicted)
    out = np.full((2 * h + _GAP, columns * (w + _GAP) - _GAP, 3), 255, np.uint8)
    for row, frames in enumerate((comparison.real, comparison.predicted)):
        y = row * (h + _GAP)
        for column, frame in enumerate([comparison.before, *frames]):
            x = column * (w + _GAP)
            out[y : y + h, x : x + w] = frame
    return out


def side_by_side(comparisons: Sequence[Comparison], width: int = 288) -> Iterator[Frame]:
    """Video frames: real left, predicted right, one comparison after the other."""
    for c in comparisons:
        pairs = [(c.before, c.before), *zip(c.real, c.predicted, strict=True)]
        for ahead, (real, predicted) in enumerate(pairs):
            left = caption(resize(real, width), "real", f"step {c.first_step - 1 + ahead}")
            right = caption(resize(predicted, width), "predicted", f"{ahead} ahead")
            yield beside([left, right])
