"""What can be drawn: whether anything can, by a simulator of others that draws by itself with MuJoCo, and how large."""

from __future__ import annotations

import functools

from omni_loop.errors import ConfigError

from . import headless

LARGEST = 4096  # px: beyond, an option is a slip and a frame takes seconds


@functools.cache  # asking the system for its libraries takes longer than a frame
def drawable() -> None:
    """Raises :class:`~omni_loop.errors.MissingExtra` where it cannot; the text names what to install."""
    if headless.prepare() is None:
        headless.backend()


def side(option: str, px: int) -> int:
    """``px``, the length of an image's side that an env's ``option`` says, if an image can have it."""
    if not 1 <= px <= LARGEST:
        raise ConfigError(f"{option} is {px}, wanted 1 to {LARGEST} px")
    return px
