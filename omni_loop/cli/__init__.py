"""The command line: ``omni-loop serve | demo | eval | train | replay | export | view | bench | check``."""

from __future__ import annotations

import os
import sys

from ..errors import OmniLoopError
from ..registry import missing_extra


def main() -> None:
    """Entry point. What a user can repair is one red line and exit code 2, never a traceback."""
    try:
        from .app import app  # here, since typer itself comes with an extra

        app()
    except OmniLoopError as e:
        _fail(e.text)
    except ModuleNotFoundError as e:
        _fail(missing_extra(e).text)
    except OSError as e:  # of a disk or a network: what it is about is all there is to say
        about = f": {e.filename}" if e.filename else ""
        _fail(f"{e.strerror or str(e) or type(e).__name__}{about}")


def _fail(text: str) -> None:
    line = f"error: {' '.join(text.split())}"
    colour = sys.stderr.isatty() and "NO_COLOR" not in os.environ
    print(f"\033[31m{line}\033[0m" if colour else line, file=sys.stderr)
    sys.exit(2)
