"""Whether a simulator of others, which draws by itself with MuJoCo, can do so on this machine."""

from __future__ import annotations

import functools

from . import headless


@functools.cache  # asking the system for its libraries takes longer than a frame
def drawable() -> None:
    """Raises :class:`~omni_loop.errors.MissingExtra` where it cannot; the text names what to install."""
    if headless.prepare() is None:
        headless.backend()
