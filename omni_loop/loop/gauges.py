"""Sessions by phase, counted when somebody reads the metrics, so that a tick pays nothing for it."""

from __future__ import annotations

import functools
import weakref

from ..session.machine import Phase
from ..session.manager import SessionManager
from ..telemetry import metrics

_sessions = metrics.gauge("omni_loop_sessions", "Sessions of this server", ("phase",))


def show(manager: SessionManager) -> None:
    """The gauge shows the sessions of ``manager`` from now on, for as long as it lives."""
    seen = weakref.ref(manager)
    for phase in Phase:
        _sessions.follow(functools.partial(_count, seen, phase), phase=str(phase))


def _count(seen: weakref.ref[SessionManager], phase: Phase) -> float:
    manager = seen()
    return 0.0 if manager is None else float(sum(session.machine.phase is phase for session in manager))
