"""What LeRobot says while its datasets are read and written, kept from the terminal."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

# At its import it tells with a whole traceback that torchcodec finds no FFmpeg; videos are then decoded by PyAV.
_CHATTY = "lerobot.utils.import_utils"


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No word of optional packages, no progress bar for every episode's table; errors are still heard."""
    logger = logging.getLogger(_CHATTY)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with _no_bars():
            yield
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def _no_bars() -> Iterator[None]:
    try:
        from datasets.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
    except ModuleNotFoundError:  # whoever needs LeRobot says so in a moment
        yield
        return
    if are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()
