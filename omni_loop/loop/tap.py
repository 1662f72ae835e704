"""What the loop tells whoever records it: sessions as they come, turn and end, ticks as they commit or fail.

A tap hears everything on the event loop, in the order in which it happened, and must neither wait nor raise. What it
hears holds references: arrays of requests and results belong to nobody once they are made, and nobody writes to them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from ..errors import OmniLoopError
from ..messages import Scalar
from ..types import Op, SessionSpec, TickResult
from .request import TickRequest

Origin = Literal["open", "fork", "restore"]
Turning = Literal["reset", "rewind", "snapshot", "lost"]
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Opened:
    """A session is there. ``source``: the id of the session it is a fork of, or the name of the snapshot it continues;
    ``seq``: the last one that was over there; the next tick is ``tick`` of ``epoch``, at ``step``."""

    session: str
    spec: SessionSpec
    seed: int
    prompt: str
    keys: tuple[str, ...]
    options: Mapping[str, Scalar]
    origin: Origin
    source: str
    epoch: int
    tick: int
    seq: int
    step: int


@dataclass(frozen=True, slots=True)
class Turned:
    """A session left the straight line of ticks: ``epoch``, ``step`` and ``seed`` hold from here on. ``name`` is a
    snapshot's, or says why the session is lost."""

    session: str
    kind: Turning
    epoch: int
    step: int
    seed: int
    prompt: str
    name: str = ""


@dataclass(frozen=True, slots=True)
class Ticked:
    """A tick was answered and, unless it was a plan, committed: tick ``tick`` of ``epoch`` under ``seed``, at control
    step ``step``; afterwards the session stands at ``stands``. ``executed float32[k, action_dim]`` are the actions
    executed before it, as sent or as the server took them from the chunk before; None for an op that has none."""

    request: TickRequest
    executed: NDArray[np.float32] | None
    epoch: int
    tick: int
    step: int
    stands: int
    seed: int
    result: TickResult


@dataclass(frozen=True, slots=True)
class Failed:
    """A tick ended with nothing committed: it failed, its deadline passed, or its caller went away or replaced it."""

    session: str
    seq: int
    op: Op
    epoch: int
    error: OmniLoopError


class Tap(Protocol):
    """Whoever records. No method waits, but :meth:`stop`."""

    def opened(self, event: Opened) -> None: ...

    def turned(self, event: Turned) -> None: ...

    def ticked(self, event: Ticked) -> None: ...

    def failed(self, event: Failed) -> None: ...

    def ended(self, session: str, why: str) -> None:
        """Nothing of the session follows; ``why`` is a :class:`~omni_loop.errors.Reason`."""

    def healthy(self) -> bool:
        """False while something that should be recorded is not."""

    def stop(self) -> None:
        """Write what was heard, and end. Blocks; nothing is told afterwards."""


Watch = Callable[[Ticked], None]  # on the event loop; it must neither wait nor raise


class Tapped:
    """Tells a tap, if there is one; an error of its own is logged and ends nothing."""

    def __init__(self, tap: Tap | None) -> None:
        self._tap = tap
        self._watching: dict[Watch, None] = {}

    def __bool__(self) -> bool:
        return self._tap is not None

    def opened(self, event: Opened) -> None:
        self._tell(lambda tap: tap.opened(event))

    def turned(self, event: Turned) -> None:
        self._tell(lambda tap: tap.turned(event))

    def ticked(self, event: Ticked) -> None:
        self._tell(lambda tap: tap.ticked(event))
        for watch in tuple(self._watching):
            try:
                watch(event)
            except Exception:  # as in _tell
                _log.exception("who watches the ticks failed")

    def watch(self, watch: Watch) -> Callable[[], None]:
        """Tell ``watch`` of ticks too, from now on; the returned function ends it."""
        self._watching[watch] = None
        return lambda: self._watching.pop(watch, None)

    def failed(self, event: Failed) -> None:
        self._tell(lambda tap: tap.failed(event))

    def ended(self, session: str, why: str) -> None:
        self._tell(lambda tap: tap.ended(session, why))

    def healthy(self) -> bool:
        return self._tap is None or self._tap.healthy()

    def stop(self) -> None:
        self._tell(lambda tap: tap.stop())

    def _tell(self, call: Callable[[Tap], Any]) -> None:
        if self._tap is None:
            return
        try:
            call(self._tap)
        except Exception:
            # A recorder's bug must not cost a robot its chunk; the log says what it was.
            _log.exception("the recorder failed")
