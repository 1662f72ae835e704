"""The recorder: hears the loop, and writes what it heard on a thread of its own.

::

    loop ──(bounded queue of references)──► thread: sessions' open parts ──► chunks ──► sealed episodes

The loop never waits for it. What does not fit the queue, what the disk does not take, what does not fit ``max_bytes``
is counted: once in the log when it begins and once when it is over, in the counter
``omni_loop_record_lost_ticks_total``, and as a gap in the episode. Writing goes on as soon as the disk takes it again.
"""

from __future__ import annotations

import functools
import json
import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..errors import ConfigError
from ..telemetry import metrics
from . import layout, sealed
from .files import Files
from .lines import Lines
from .room import Room

if TYPE_CHECKING:
    from ..config import Deployment
    from ..loop.tap import Failed, Opened, Ticked, Turned

Why = Literal["queue", "disk", "gone", "error"]
STOP_S = 30.0  # to write what was heard, when the server stops
_RETRY_S = 1.0  # between attempts to seal what could not be sealed
_log = logging.getLogger(__name__)

_recorded = metrics.counter("omni_loop_recorded_ticks_total", "Ticks in sealed episodes")
_lost = metrics.counter("omni_loop_record_lost_ticks_total", "Ticks that were to be recorded and are not", ("why",))
_degraded = metrics.gauge("omni_loop_record_degraded", "1 while ticks that should be recorded are not")


@dataclass(slots=True)
class Counts:
    """Of ticks: ``heard`` = ``written`` (in sealed episodes) + ``lost`` + those on their way. ``waiting``: of anything
    that was heard, what the writer has not seen to yet."""

    heard: int = 0
    written: int = 0
    lost: int = 0
    waiting: int = 0


@dataclass(frozen=True, slots=True)
class Item:
    """What waits for the thread. ``gap``: ticks of the session that were dropped before it."""

    kind: str
    order: int
    at_ns: int
    session: str
    event: Any
    nbytes: int = 0
    gap: int = 0


class Recorder:
    """A :class:`~omni_loop.loop.tap.Tap` that writes to a run of its own in ``deployment.record.folder``.

    Raises:
        MissingExtra: zarr is not installed. ConfigError: the folder cannot be made or written to.
    """

    def __init__(self, deployment: Deployment, files: Files | None = None) -> None:
        config = deployment.record
        if config.folder is None:
            raise ConfigError("record.folder: nothing is recorded without one")
        self._config = config
        self.run = Path(config.folder) / f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{secrets.token_hex(4)}"
        self._about = json.dumps(_about(deployment), indent=1)
        try:
            self._begin_run()
            room = Room(Path(config.folder), config.max_bytes)
        except OSError as error:
            text = f"record.folder: {config.folder} cannot be written: {error.strerror or type(error).__name__}"
            raise ConfigError(text) from error
        self._lines = Lines(self.run, config, room, files or Files(), self._on_lost, self._on_written)
        self._queue: queue.SimpleQueue[Item | None] = queue.SimpleQueue()
        self._order = 0
        # Each is written by one thread only: ``_in`` by the loop, ``_out`` by the writer.
        self._in_bytes = self._in_items = self._out_bytes = self._out_items = 0
        self._dropped: dict[str, int] = {}  # ticks by session, told with its next event
        self._lost_by_loop = self._lost_by_writer = self._written = self._heard = 0
        self._overflows = False
        self._trouble = ""  # why the writer cannot write now
        self._stopped = False
        self._thread = threading.Thread(target=self._work, name="recorder", daemon=True)
        self._thread.start()

    @property
    def counts(self) -> Counts:
        lost, waiting = self._lost_by_loop + self._lost_by_writer, self._in_items - self._out_items
        return Counts(self._heard, self._written, lost, waiting)

    # Heard on the loop -------------------------------------------------------------------------------------

    def opened(self, event: Opened) -> None:
        self._put("opened", event.session, event)

    def turned(self, event: Turned) -> None:
        self._put("turned", event.session, event)

    def failed(self, event: Failed) -> None:
        self._put("failed", event.session, event)

    def ended(self, session: str, why: str) -> None:
        self._put("ended", session, why)
        self._dropped.pop(session, None)

    def ticked(self, event: Ticked) -> None:
        self._heard += 1
        self._put("ticked", event.request.session, event, _nbytes(event))

    def healthy(self) -> bool:
        return not self._overflows and not self._trouble

    def stop(self) -> None:
        if self._stopped:
            return
        self._stopped = True
        self._queue.put(None)
        self._thread.join(STOP_S)
        if self._thread.is_alive():
            left = self.counts.heard - self.counts.written - self.counts.lost
            _log.error("recording: the disk did not take %d ticks within %g s; they are lost", left, STOP_S)

    def _put(self, kind: str, session: str, event: Any, nbytes: int = 0) -> None:
        self._order += 1
        if not self._fits(kind, nbytes):
            if kind == "ticked":
                self._dropped[session] = self._dropped.get(session, 0) + 1
                self._lost_by_loop += 1
                _lost.inc(why="queue")
            if not self._overflows:
                self._overflows = True
                _degraded.set(1)
                _log.error("recording: more waits than may wait; ticks are being lost")
            return
        if self._overflows and self._in_items == self._out_items:  # not at the first free place: it would come and go
            self._overflows = False
            _degraded.set(0 if self.healthy() else 1)
            _log.warning("recording: the queue is empty again; %d ticks were lost", self.counts.lost)
        gap = self._dropped.pop(session, 0)
        self._in_bytes += nbytes
        self._in_items += 1
        self._queue.put(Item(kind, self._order, time.time_ns(), session, event, nbytes, gap))

    def _fits(self, kind: str, nbytes: int) -> bool:
        waiting, held = self._in_items - self._out_items, self._in_bytes - self._out_bytes
        if kind in ("ticked", "failed"):
            return waiting < self._config.queue_events and held + nbytes <= self._config.queue_bytes
        # How sessions come, turn and go is small, and without it what follows says little.
        return waiting < 2 * self._config.queue_events

    # On the thread -----------------------------------------------------------------------------------------

    def _work(self) -> None:
        again = 0.0  # when to try to seal what could not be sealed
        while True:
            if self._lines.unsealed and time.monotonic() >= again:
                self._try(self._lines.retry)
                again = time.monotonic() + _RETRY_S
            try:
                item = self._queue.get(timeout=_RETRY_S if self._lines.unsealed else None)
            except queue.Empty:
                continue
            if item is None:
                break
            self._try(functools.partial(self._lines.take, item))
            self._out_bytes += item.nbytes
            self._out_items += 1
        self._try(self._lines.finish)
        self._try(self._tidy)

    def _try(self, action: Callable[[], None]) -> None:
        """An error that is no disk's is a bug: it is logged whole, and the next item is tried."""
        try:
            action()
            trouble = self._lines.trouble
        except Exception as error:
            _log.exception("the recorder failed")
            trouble = type(error).__name__
        if not (self.run / layout.RUN).exists():  # when it stops, nothing is mended, nor well again
            trouble = (self._trouble if self._stopped else self._mend_run()) or trouble
        trouble = trouble or ("episodes wait to be sealed" if self._lines.unsealed else "")
        if trouble and not self._trouble:
            _log.error("recording is degraded: %s", trouble)
        elif self._trouble and not trouble:
            _log.warning("recording goes on; %d ticks were lost", self.counts.lost)
        self._trouble = trouble
        _degraded.set(0 if self.healthy() else 1)

    def _tidy(self) -> None:
        """A run in which nothing happened leaves no trace."""
        try:
            if [path.name for path in self.run.iterdir()] == [layout.RUN]:
                (self.run / layout.RUN).unlink()
                self.run.rmdir()
        except OSError as error:  # somebody took the folder away, or put a file there
            self._lines.trouble = error.strerror or type(error).__name__

    def _mend_run(self) -> str:
        """The run's folder again, when somebody took it away; says what is in the way."""
        try:
            self._begin_run()
        except OSError as error:
            return error.strerror or type(error).__name__
        return ""

    def _begin_run(self) -> None:
        self.run.mkdir(parents=True, exist_ok=True)
        place = self.run / layout.RUN
        beside = place.with_suffix(".new")
        beside.write_text(self._about, encoding="utf-8")
        sealed.sync(beside)
        beside.rename(place)

    def _on_lost(self, ticks: int, why: Why) -> None:
        self._lost_by_writer += ticks
        _lost.inc(ticks, why=why)

    def _on_written(self, ticks: int) -> None:
        self._written += ticks
        _recorded.inc(ticks)


def _about(deployment: Deployment) -> dict[str, Any]:
    return {
        "version": layout.VERSION,
        "began_ns": time.time_ns(),
        "deployment": deployment.model_dump(mode="json"),
    }


def _nbytes(event: Ticked) -> int:
    """Bytes of the arrays that a tick keeps in memory until it is written."""
    request, result = event.request, event.result
    arrays: list[Any] = [*request.arrays.values(), event.executed, request.actions]
    arrays += [] if result.chunk is None else [result.chunk.actions]
    arrays += [] if result.frames is None else [result.frames.frames, result.frames.scene]
    arrays += [] if request.plan is None else [request.plan.goal, request.plan.init]
    return sum(array.nbytes for array in arrays if array is not None)
