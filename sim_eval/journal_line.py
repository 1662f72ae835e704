"""An episode's result as one line of JSON and back, to the bit: what the journal holds and worker processes send."""

from __future__ import annotations

import base64
import json
import zlib
from typing import Any

import numpy as np

from omni_loop.errors import InvalidInput
from omni_loop.types import Array

from .results import EpisodeResult, Outcome, Prediction, Tick

_DTYPES = ("float32", "uint8")


def encode(result: EpisodeResult) -> str:
    """``result`` as a line without its end. Arrays are base64 of compressed little-endian bytes."""
    row = {
        "task": result.task,
        "episode": result.episode,
        "seed": result.seed,
        "outcome": str(result.outcome),
        "steps": result.steps,
        "score": result.score,
        "deadline_misses": result.deadline_misses,
        "reason": result.reason,
        "wall_s": result.wall_s,
        "ended_s": result.ended_s,
        "env_died": result.env_died,
        "policy_revision": result.policy_revision,
        "session": result.session,
        "actions": _array(result.actions),
        "ticks": [
            [t.step, t.round_trip_ms, t.total_ms, t.model_ms, t.queue_ms, dict(t.stages_ms), t.frames]
            for t in result.ticks
        ],
        "predictions": [[p.seed, p.step, _array(p.actions), _array(p.frames)] for p in result.predictions],
    }
    return json.dumps(row, separators=(",", ":"))


def decode(line: str | bytes) -> EpisodeResult:
    """The result that :func:`encode` made ``line`` of.

    Raises:
        InvalidInput: it is no such line.
    """
    try:
        row = json.loads(line)
        return EpisodeResult(
            episode=int(row["episode"]),
            seed=int(row["seed"]),
            outcome=Outcome(row["outcome"]),
            steps=int(row["steps"]),
            score=float(row["score"]),
            actions=_read(row["actions"], "float32"),
            ticks=tuple(
                Tick(int(step), float(trip), float(total), float(model), float(queued), dict(stages), bool(frames))
                for step, trip, total, model, queued, stages, frames in row["ticks"]
            ),
            predictions=tuple(
                Prediction(int(p[0]), int(p[1]), _read(p[2], "float32"), _read(p[3], "uint8"))
                for p in row["predictions"]
            ),
            reason=str(row["reason"]),
            wall_s=float(row["wall_s"]),
            policy_revision=str(row["policy_revision"]),
            session=str(row["session"]),
            task=str(row["task"]),
            deadline_misses=int(row["deadline_misses"]),
            ended_s=float(row["ended_s"]),
            env_died=bool(row["env_died"]),
        )
    except (ValueError, KeyError, TypeError, IndexError, OverflowError, RecursionError, zlib.error) as e:
        raise InvalidInput(f"no line of a finished episode: {type(e).__name__}: {e}") from None


def _array(values: Array) -> dict[str, Any]:
    little = np.ascontiguousarray(values, values.dtype.newbyteorder("<"))
    data = base64.b64encode(zlib.compress(little.tobytes(), 6)).decode()
    return {"dtype": values.dtype.name, "shape": list(values.shape), "data": data}


def _read(said: dict[str, Any], dtype: str) -> Array:
    if said["dtype"] != dtype or dtype not in _DTYPES:
        raise ValueError(f"an array of {said['dtype']}, wanted {dtype}")
    flat = np.frombuffer(zlib.decompress(base64.b64decode(said["data"])), np.dtype(dtype).newbyteorder("<"))
    return flat.reshape(said["shape"]).astype(dtype)
