"""CPU time of another process, from ``/proc``."""

from __future__ import annotations

import os
from pathlib import Path

from omni_loop.errors import Unsupported


def cpu_seconds(pid: int) -> float:
    """User and system time of ``pid`` and of its living descendants.

    Raises:
        Unsupported: this system has no ``/proc``.
    """
    if not Path("/proc/self/stat").exists():
        raise Unsupported("CPU of a server is read from /proc, which this system does not have")
    return sum(_ticks(p) for p in _tree(pid)) / os.sysconf("SC_CLK_TCK")


def _tree(pid: int) -> list[int]:
    children = [int(c) for task in Path(f"/proc/{pid}/task").iterdir() for c in (task / "children").read_text().split()]
    return [pid, *(p for child in children for p in _tree(child))]


def _ticks(pid: int) -> int:
    """Clock ticks; the name of the process, which may hold anything, ends with the last parenthesis."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])
