"""How much memory something took at its worst."""

from __future__ import annotations

import contextlib
import resource
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

MIB = 1 << 20
_CLEAR = Path("/proc/self/clear_refs")  # "5" sets the peak to what is resident now; see proc(5)


@dataclass
class Peak:
    """``traced``: bytes that Python and numpy held besides at the worst; ``resident``: bytes the process grew to,
    which is above 0 only where Linux tells. Both are set when the block ends."""

    traced: int = 0
    resident: int = 0

    @property
    def bytes(self) -> int:
        return max(self.traced, self.resident)


@contextmanager
def peak() -> Iterator[Peak]:
    """Measures the block, with tracing: everything in it takes longer."""
    found = Peak()
    before = reset_resident()
    already = tracemalloc.is_tracing()
    if not already:
        tracemalloc.start()
    tracemalloc.reset_peak()
    base = tracemalloc.get_traced_memory()[0]
    try:
        yield found
    finally:
        found.traced = tracemalloc.get_traced_memory()[1] - base
        if not already:
            tracemalloc.stop()
        found.resident = resident_peak() - before


def resident_peak() -> int:
    """Most bytes that were resident since :func:`reset_resident`."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def reset_resident() -> int:
    """Forget peaks of the past, where the kernel lets us; :func:`resident_peak` from now on."""
    with contextlib.suppress(OSError):  # not Linux: an old peak may hide a new one
        _CLEAR.write_text("5")
    return resident_peak()
