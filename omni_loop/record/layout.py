"""How a recording lies on disk, for its writer and its reader.

::

    <folder>/<run>/
        run.json                  version, when it began, the deployment that was served
        <episode>/                whole: renamed into place when its last byte was on disk
            manifest              size and digest of every other file
            zarr.json             zarr v3 group; its attributes say whose episode it is and how it began
            ticks  times  rows    a row per tick: numbers; milliseconds; how many rows of each array below are its own
            events                JSON lines: what happened besides ticks, and what a tick has that is no number
            observations/<key>  executed  actions  chunk  frames  scene  goal  init
        .open-<episode>/          being written; what a server that was killed leaves behind

An episode is one session from its opening, fork, restore or reset to its next reset or its end. A long one is sealed in
parts, so that no crash loses more than its last part. Arrays hold the rows of all ticks one after the other.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any
from urllib.parse import quote, unquote

from ..types import ArraySpec, Op, SessionSpec

VERSION = 1
RUN, OPEN, EPISODE = "run.json", ".open-", "episode"
ENDS = ("ended", "cut")  # events that end an episode; without one its last part is not here
TICKS, TIMES, ROWS, EVENTS = "ticks", "times", "rows", "events"
OBSERVATIONS, SHAPES = "observations/", "shapes/"
EXECUTED, ACTIONS, CHUNK, FRAMES, SCENE = "executed", "actions", "chunk", "frames", "scene"
GOAL, INIT = "goal", "init"
OPS = tuple(Op)
ABSENT = -1  # in ``rows``: the tick has no such array at all, rather than one without rows

# Of ``ticks``, int64. ``order`` (one for all sessions) and ``at_ns`` (of the wall clock) say when the recorder heard of
# it; ``seed`` is a uint64's bits; ``kept`` 0: the arrays were lost; the others as in a request and its result.
NUMBERS = (
    *("order", "at_ns", "seq", "op", "epoch", "tick", "step", "seed", "kept"),
    *("asked_frames", "asked_steps", "result_epoch", "chunk_step", "revision", "frames_step", "progress_step"),
    "stands",
)
# Of ``times``, float64, NaN where there is none; the milliseconds of each stage follow.
REALS = ("total_ms", "model_ms", "queue_ms", "progress", "done")

_CHUNK_BYTES = 1 << 20
_MOST_ROWS = 1024


def place(key: str) -> str:
    """Where the observations ``key`` lie in the group."""
    return OBSERVATIONS + quote(key, safe="")


def shapes_of(key: str) -> str:
    """Where the shapes of ``key`` lie, whose shape varies."""
    return SHAPES + quote(key, safe="")


def key_at(place: str) -> str:
    """The observation key whose rows lie at ``place``."""
    return unquote(place.removeprefix(OBSERVATIONS))


def varies(spec: ArraySpec) -> bool:
    """Whether its shape is another from tick to tick: then it is stored flat, its shapes beside it."""
    return any(n < 0 for n in spec.shape)


def chunk_rows(shape: Sequence[int], itemsize: int) -> int:
    """Rows of one chunk: a power of two, of about a MiB together."""
    fitting = max(1, _CHUNK_BYTES // max(1, math.prod(shape) * itemsize))
    return int(min(_MOST_ROWS, 1 << (fitting.bit_length() - 1)))


def encode_spec(spec: SessionSpec) -> dict[str, Any]:
    """``spec`` as JSON keeps it."""
    encoded: dict[str, Any] = json.loads(json.dumps(asdict(spec)))
    return encoded
