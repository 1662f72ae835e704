"""The columns of a recorded part, taken apart into ticks."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..errors import rebuild
from ..types import ActionChunk, Array, FramePrediction, Op, PlanSummary, Progress, TickResult, Timings
from . import layout

if TYPE_CHECKING:
    import zarr


@dataclass(frozen=True, slots=True)
class Tick:
    """One recorded tick: what was asked, what had been executed before, and what was answered.

    ``stands``: the step the session stood at afterwards. ``kept`` False: the disk did not take the arrays, and only
    numbers are here; ``frames_kept`` False: it was answered with frames that are not here. ``plan``: what was searched
    for, as :class:`~omni_loop.loop.request.PlanRequest` has it, with ``goal`` and ``init`` when given.
    """

    order: int
    at_ns: int
    op: Op
    seq: int
    epoch: int
    tick: int
    step: int
    stands: int
    seed: int
    kept: bool
    frames_kept: bool
    arrays: Mapping[str, Array]
    executed: NDArray[np.float32] | None
    actions: NDArray[np.float32] | None
    steps: int
    frames: int
    plan: Mapping[str, Any] | None
    result: TickResult


class Table:
    """One part. Raises whatever a group raises that is not as :mod:`.layout` says."""

    def __init__(self, group: zarr.Group) -> None:
        self._about: dict[str, Any] = dict(group.attrs[layout.EPISODE])  # type: ignore[arg-type]
        self._columns: list[str] = list(self._about["columns"])
        self._numbers, self._times, self._rows = (
            self._all(group, name) for name in (layout.TICKS, layout.TIMES, layout.ROWS)
        )
        if len(self._numbers) != self._about["ticks"]:
            raise ValueError(f"it says that it has {self._about['ticks']} ticks, and holds {len(self._numbers)}")
        self._kept = self._numbers[:, layout.NUMBERS.index("kept")]
        text = bytes(self._all(group, layout.EVENTS)).decode()
        self._events: list[dict[str, Any]] = [json.loads(line) for line in text.splitlines()]
        self._arrays = {name: self._all(group, name) for name in self._columns}
        counts = np.maximum(self._rows, 0)
        self._starts = np.cumsum(counts, axis=0) - counts
        self._notes = {(e["event"], e["row"]): e for e in self._events if "row" in e}

    @staticmethod
    def _all(group: zarr.Group, name: str) -> NDArray[Any]:
        stored: Any = group[name]
        return np.asarray(stored[...])

    def read(self) -> tuple[list[Tick], list[dict[str, Any]]]:
        return [self._tick(i) for i in range(len(self._numbers))], [e for e in self._events if "row" not in e]

    def _own(self, i: int, place: str) -> NDArray[Any] | None:
        """The rows of tick ``i`` in a column; None: it has none there, or they were lost."""
        if place not in self._columns or not self._kept[i]:
            return None
        c = self._columns.index(place)
        count, start = int(self._rows[i, c]), int(self._starts[i, c])
        return None if count == layout.ABSENT else self._arrays[place][start : start + count]

    def _tick(self, i: int) -> Tick:
        n = dict(zip(layout.NUMBERS, map(int, self._numbers[i]), strict=True))
        op = layout.OPS[n["op"]]
        plan = self._notes.get(("plan", i))
        asked: dict[str, Any] | None = None
        if plan is not None:
            goal, init = self._own(i, layout.GOAL), self._own(i, layout.INIT)
            asked = {**plan["asked"], "goal": None if goal is None else goal[0], "init": init}
        result = self._result(i, n, None if plan is None else plan["summary"])
        return Tick(
            op=op,
            frames_kept=result.frames is not None or n["frames_step"] == layout.ABSENT,
            kept=bool(n["kept"]),
            arrays=self._observed(i, op),
            executed=self._own(i, layout.EXECUTED),
            actions=self._own(i, layout.ACTIONS),
            steps=n["asked_steps"],
            frames=n["asked_frames"],
            plan=asked,
            seed=int(np.int64(n["seed"]).astype(np.uint64)),
            result=result,
            **{name: n[name] for name in ("order", "at_ns", "seq", "epoch", "tick", "step", "stands")},
        )

    def _observed(self, i: int, op: Op) -> dict[str, Array]:
        arrays = {}
        for place in self._columns:
            if not place.startswith(layout.OBSERVATIONS):
                continue
            rows = self._own(i, place)
            if rows is None:
                continue
            key = layout.key_at(place)
            shapes = self._own(i, layout.shapes_of(key))
            if shapes is not None:
                rows = rows.reshape(tuple(map(int, shapes[0])))
            arrays[key] = rows if op is Op.RECONDITION else rows[0]
        return arrays

    def _result(self, i: int, n: Mapping[str, int], summary: dict[str, Any] | None) -> TickResult:
        seq, epoch, timings = n["seq"], n["result_epoch"], self._timings(i)
        actions, images = self._own(i, layout.CHUNK), self._own(i, layout.FRAMES)
        progress, done = (float(v) for v in self._times[i, 3:5])
        chunk = frames = None
        if actions is not None:
            revision = self._about["revisions"][n["revision"]]
            chunk = ActionChunk(seq, n["chunk_step"], actions, epoch, revision, timings)
        if images is not None:
            frames = FramePrediction(seq, n["frames_step"], images, epoch, self._own(i, layout.SCENE))
        error = self._notes.get(("frames_error", i))
        return TickResult(
            seq=seq,
            epoch=epoch,
            chunk=chunk,
            frames=frames,
            progress=None if math.isnan(progress) else Progress(seq, n["progress_step"], progress, done, epoch),
            timings=timings,
            frames_error=None
            if error is None
            else rebuild(error["code"], error["reason"], error["retryable"], error["text"]),
            plan=None if summary is None else PlanSummary(**summary),
        )

    def _timings(self, i: int) -> Timings:
        total, model, queue = (float(v) for v in self._times[i, :3])
        stages = zip(self._about["stages"], map(float, self._times[i, len(layout.REALS) :]), strict=True)
        return Timings(total, model, queue, {name: ms for name, ms in stages if not math.isnan(ms)})
