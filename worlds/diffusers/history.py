"""What a session goes on from: its last frames as floats, and those that were last when it last observed.

Two short rings stand for any rewind that a Recondition may ask for without holding every imagined frame::

    steps     0 1 2 3 4 | 5 6 7 8 9 ...      5 and later were imagined
    seen      0 1 2 3 4                      what replaces imagined frames continues from here,
    recent            6 7 8 9                or from here, when it keeps some of them
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from omni_loop.errors import InvalidInput, Reason, StateError
from omni_loop.stage import CounterSpec, RingSpec, StateSpec, StateView


def history_specs(context: int, more: int, height: int, width: int, dtype: str) -> dict[str, StateSpec]:
    """``more``: further frames held, so that a Recondition may keep so many more imagined ones."""
    # Steps count from the first frame's, the origin; ``real``: up to the last observed one.
    return {
        "recent": RingSpec((3, height, width), context + more, dtype),
        "seen": RingSpec((3, height, width), context, dtype),
        "origin": CounterSpec(),
        "length": CounterSpec(),
        "real": CounterSpec(),
    }


@dataclass(frozen=True, slots=True)
class Observed:
    """Frames to be written: ``frames`` are the last ones, from ``origin`` on there are ``length``."""

    frames: Sequence[Tensor]
    origin: int
    length: int
    fresh: bool  # nothing is left of what came before


def recent(state: StateView) -> Sequence[Tensor]:
    """The last frames ``float[3, h, w]`` in -1..1, oldest first. Raises StateError when there are none."""
    frames = state.ring("recent").items()
    if not frames:
        raise StateError("no frame to predict from: send one with Recondition first")
    return frames


def observe(state: StateView, context: int, first: int, images: Sequence[Tensor], executed: int) -> Observed:
    """What the history becomes when ``images`` are the frames from step ``first`` on, each but a very first one reached
    by an executed action.

    Raises:
        InvalidInput: another number of executed actions.
        StateError: ``first`` leaves a gap, or lies further back than what is held allows.
    """
    origin, length, n = state.counter("origin").get(), state.counter("length").get(), len(images)
    fresh = not length or first <= origin
    if not fresh and first > origin + length:
        text = f"step {first} does not follow: the session holds frames up to step {origin + length - 1}"
        raise StateError(text, reason=Reason.BAD_REQUEST)
    wanted = n - 1 if fresh else n
    if executed != wanted:
        raise InvalidInput(
            f"{n} frames from step {first} need {wanted} executed actions (action t leads from frame t to t + 1), "
            f"got {executed}"
        )
    if fresh:
        return Observed(images[-context:], first, n, True)
    before = _before(state, context, first, n)
    return Observed([*before, *images][-context:], origin, first - origin + n, False)


def _before(state: StateView, context: int, first: int, n: int) -> Sequence[Tensor]:
    """The frames before step ``first`` that ``n`` new ones leave room for."""
    origin = state.counter("origin").get()
    count = min(max(context - n, 0), first - origin)
    if not count:
        return ()
    for ring, counter in (("seen", "real"), ("recent", "length")):
        frames, end = state.ring(ring).items(), origin + state.counter(counter).get()
        start = end - len(frames)
        if start <= first - count and first <= end:
            return frames[first - count - start : first - start]
    raise StateError(
        f"step {first} lies too far back for {n} frames: send {min(context, n + count)} frames or more from there",
        reason=Reason.BAD_REQUEST,
    )


def commit_observed(state: StateView, observed: Observed) -> None:
    for name in ("recent", "seen"):
        ring = state.ring(name)
        ring.clear()
        for frame in observed.frames:
            ring.push(frame)
    state.counter("origin").set(observed.origin)
    state.counter("length").set(observed.length)
    state.counter("real").set(observed.length)


def commit_imagined(state: StateView, frames: Sequence[Tensor]) -> None:
    ring, length = state.ring("recent"), state.counter("length")
    for frame in frames:
        ring.push(frame)
    length.set(length.get() + len(frames))
