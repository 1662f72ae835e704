"""Which lines of some code have run, at almost no cost: each is reported once (PEP 669)."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType

_TOOL = 4  # of sys.monitoring: none of those that debuggers, coverage and profilers take


class Lines:
    """``count`` lines of files whose path holds ``part`` have run since :meth:`watched` began."""

    def __init__(self, part: str) -> None:
        self.count = 0
        self._part = part

    @contextmanager
    def watched(self) -> Iterator[Lines]:
        events = sys.monitoring.events
        sys.monitoring.use_tool_id(_TOOL, "omni-loop-fuzz")
        try:
            sys.monitoring.register_callback(_TOOL, events.LINE, self._line)
            sys.monitoring.set_events(_TOOL, events.LINE)
            sys.monitoring.restart_events()
            yield self
        finally:
            sys.monitoring.set_events(_TOOL, 0)
            sys.monitoring.register_callback(_TOOL, events.LINE, None)
            sys.monitoring.free_tool_id(_TOOL)

    def _line(self, code: CodeType, line: int) -> object:
        self.count += self._part in code.co_filename
        return sys.monitoring.DISABLE
