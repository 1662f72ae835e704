"""One part of an episode as it is written: ticks gathered into columns, chunks written as they fill, then sealed."""

from __future__ import annotations

import bisect
import errno
import json
import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..errors import OmniLoopError
from ..types import ArraySpec, Op, SessionSpec, TickResult
from . import layout, sealed
from .column import Column
from .files import NODE, Files, exists, group, store

if TYPE_CHECKING:
    from ..loop.tap import Ticked

_PLAN = ("horizon", "candidates", "iterations", "method", "budget_ms")
Reserve = Callable[[int], None]  # raises OSError when there is no room for so many bytes more


class Vanished(OSError):
    """The folder that was written to is gone, and with it what lay in it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(errno.ENOENT, "the folder of the recording is gone", str(folder))


class Part:
    """``about``: whose episode, which part, how it began; JSON. ``keys``: observation keys to keep (None: all)."""

    def __init__(
        self,
        run: Path,
        name: str,
        spec: SessionSpec,
        about: Mapping[str, Any],
        keys: tuple[str, ...] | None,
        frames: bool,
        files: Files,
    ) -> None:
        self.name, self._place, self._beside = name, run / name, run / f"{layout.OPEN}{name}"
        self._spec, self._about, self._keep_frames, self._files = spec, about, frames, files
        self._kept = {s.name: s for s in spec.observations if keys is None or s.name in keys}
        self.events: list[dict[str, Any]] = []
        self.lost: set[int] = set()  # ticks whose arrays could not be written
        self.nbytes = 0  # written
        self._numbers: list[tuple[int, ...]] = []
        self._reals: list[tuple[float, ...]] = []
        self._stages: dict[str, dict[int, float]] = {}  # milliseconds by tick
        self._revisions: dict[str, int] = {}
        self._columns: dict[str, Column] = {}
        self._rows: dict[str, dict[int, int]] = {}  # of each column, how many are a tick's own
        self._starts: dict[str, tuple[list[int], list[int]]] = {}  # first rows, and the ticks they are of
        self._began = False
        self._seen_lost: dict[str, int] = {}

    @property
    def ticks(self) -> int:
        return len(self._numbers)

    # Gathering ---------------------------------------------------------------------------------------------

    def tick(self, order: int, at_ns: int, event: Ticked) -> None:
        """Take over a tick; nothing is written. Raises ValueError, changing nothing, when an array is of another dtype
        or shape than those before it: a session's never are."""
        request, result, index = event.request, event.result, self.ticks
        arrays = self._arrays(event)
        for place, rows in arrays.items():
            if place in self._columns:
                self._columns[place].check(rows)
        seed = int(np.uint64(event.seed).astype(np.int64))
        given = (
            *(order, at_ns, request.seq, layout.OPS.index(request.op), event.epoch, event.tick, event.step, seed),
            *(1, request.frames, request.steps, result.epoch),
        )
        self._numbers.append((*given, *self._labels(result), event.stands))
        for place, rows in arrays.items():
            self._add(index, place, rows)
        self._note(index, event)
        t, progress = result.timings, result.progress
        judged = (math.nan, math.nan) if progress is None else (progress.progress, progress.done)
        self._reals.append((t.total_ms, t.model_ms, t.queue_ms, *judged))
        for stage, ms in t.stages_ms.items():
            self._stages.setdefault(stage, {})[index] = ms

    def _arrays(self, event: Ticked) -> dict[str, NDArray[Any]]:
        """The rows that the tick has in each column."""
        request, result, plan = event.request, event.result, event.request.plan
        arrays: dict[str, NDArray[Any] | None] = {}
        for key, array in request.arrays.items():
            if key in self._kept:
                arrays |= _observed(self._kept[key], array, stacked=request.op is Op.RECONDITION)
        arrays |= {layout.EXECUTED: event.executed, layout.ACTIONS: request.actions}
        if plan is not None:
            arrays |= {layout.GOAL: None if plan.goal is None else plan.goal[None], layout.INIT: plan.init}
        if result.chunk is not None:
            arrays[layout.CHUNK] = result.chunk.actions
        if result.frames is not None and self._keep_frames:
            arrays |= {layout.FRAMES: result.frames.frames, layout.SCENE: result.frames.scene}
        return {place: rows for place, rows in arrays.items() if rows is not None}

    def _note(self, index: int, event: Ticked) -> None:
        """What of a tick is no number."""
        plan, result = event.request.plan, event.result
        if plan is not None:
            asked = {name: getattr(plan, name) for name in _PLAN}
            summary = None if result.plan is None else asdict(result.plan)
            self.events.append({"event": "plan", "row": index, "asked": asked, "summary": summary})
        if result.frames_error is not None:
            self.events.append({"event": "frames_error", "row": index, **describe(result.frames_error)})

    def _labels(self, result: TickResult) -> tuple[int, int, int, int]:
        chunk, frames, progress = result.chunk, result.frames, result.progress
        revision = layout.ABSENT
        if chunk is not None:
            revision = self._revisions.setdefault(chunk.policy_revision, len(self._revisions))
        return (
            layout.ABSENT if chunk is None else chunk.first_step,
            revision,
            layout.ABSENT if frames is None else frames.first_step,
            layout.ABSENT if progress is None else progress.step,
        )

    def _add(self, index: int, place: str, rows: NDArray[Any]) -> None:
        if place not in self._columns:
            self._columns[place] = Column(self._files, self._beside / place, rows.shape[1:], rows.dtype)
            self._rows[place], self._starts[place] = {}, ([], [])
        column = self._columns[place]
        self._rows[place][index] = len(rows)
        starts, ticks = self._starts[place]
        starts.append(column.rows)
        ticks.append(index)
        column.append(rows)

    # Writing -----------------------------------------------------------------------------------------------

    def write(self, reserve: Reserve, everything: bool = False) -> int:
        """Write the chunks that are full, or ``everything``; bytes written. Raises the first error there was when all
        was tried: what could not be written is in :attr:`lost` then, unless the folder itself has vanished."""
        nbytes, first = 0, None
        for place, column in self._columns.items():
            while column.due or (everything and column.waiting):
                try:
                    nbytes += self._write(column, reserve)
                except Vanished:
                    raise
                except Exception as error:
                    first = first or error
                    self._note_lost(place)
        self.nbytes += nbytes
        if first is not None:
            raise first
        return nbytes

    def _write(self, column: Column, reserve: Reserve) -> int:
        try:
            reserve(column.next_bytes)
            self._begin()
        except Vanished:
            raise
        except Exception:
            column.drop()
            raise
        return column.write()

    def seal(self) -> int:
        """Make whole what was written; its bytes on disk. Raises as :meth:`write` does, and may be called again."""
        self._begin()
        for column in self._columns.values():
            column.finish()
        self._tables()
        attributes = {
            **self._about,
            "stages": list(self._stages),
            "revisions": list(self._revisions),
            "columns": list(self._columns),
            "ticks": self.ticks,
            "lost": len(self.lost),
            "gaps": sum(event["event"] in ("gap", "lost") for event in self.events),
            "ended": any(event["event"] in layout.ENDS for event in self.events),
        }
        self._files.write(self._beside / NODE, group({layout.EPISODE: attributes}))
        nbytes = sealed.seal(self._beside, layout.VERSION).nbytes
        sealed.move(self._beside, self._place)
        return nbytes

    def discard(self) -> None:
        """Remove what was written; nobody will read it."""
        shutil.rmtree(self._beside, ignore_errors=True)  # beside what is recorded, it is only in the way

    def _begin(self) -> None:
        if not self._began:
            self._beside.mkdir(parents=True, exist_ok=True)
            self._files.write(self._beside / NODE, group({}))
            self._began = True
        elif not exists(self._beside):  # it would be made anew, without what was in it
            raise Vanished(self._beside)

    def _note_lost(self, place: str) -> None:
        column, (starts, ticks) = self._columns[place], self._starts[place]
        known = self._seen_lost.get(place, 0)
        for rows in column.lost[known:]:
            begin = max(bisect.bisect_right(starts, rows.start) - 1, 0)
            self.lost.update(ticks[begin : bisect.bisect_left(starts, rows.stop)])
        self._seen_lost[place] = len(column.lost)

    def _tables(self) -> None:
        n = self.ticks
        numbers = np.array(self._numbers, np.int64).reshape(n, len(layout.NUMBERS))
        numbers[sorted(self.lost), layout.NUMBERS.index("kept")] = 0
        times = np.full((n, len(layout.REALS) + len(self._stages)), np.nan)
        times[:, : len(layout.REALS)] = np.array(self._reals, np.float64).reshape(n, len(layout.REALS))
        for i, by_tick in enumerate(self._stages.values()):
            times[list(by_tick), len(layout.REALS) + i] = list(by_tick.values())
        rows = np.full((n, len(self._rows)), layout.ABSENT, np.int64)
        for i, counts in enumerate(self._rows.values()):
            rows[list(counts), i] = list(counts.values())
        lines = "".join(json.dumps(event) + "\n" for event in self.events).encode()
        events = np.frombuffer(lines, np.uint8)
        tables = {layout.TICKS: numbers, layout.TIMES: times, layout.ROWS: rows, layout.EVENTS: events}
        for name, table in tables.items():
            store(self._files, self._beside / name, table)
        for parent in {name.partition("/")[0] for name in self._columns if "/" in name}:
            self._files.write(self._beside / parent / NODE, group({}))


def _observed(spec: ArraySpec, array: NDArray[Any], stacked: bool) -> dict[str, NDArray[Any] | None]:
    """The rows of an observation key; ``stacked``: it has a leading axis of several steps."""
    rows = array if stacked else array[None]
    if not layout.varies(spec):
        return {layout.place(spec.name): rows}
    shape = np.array([rows.shape], np.int64)
    return {layout.place(spec.name): rows.reshape(-1), layout.shapes_of(spec.name): shape}


def describe(error: OmniLoopError) -> dict[str, Any]:
    """An error as JSON keeps it."""
    return {"code": error.code, "reason": error.reason, "text": error.text, "retryable": error.retryable}
