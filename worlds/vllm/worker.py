"""What vLLM's engine process imports of ours before it builds the model: the engine's arguments name
:class:`WorkerExtension`, and looking it up runs this module there, and nowhere else."""

from __future__ import annotations

import os
import threading
from multiprocessing import connection, parent_process

from .model import register


class WorkerExtension:
    """Adds nothing to the worker: see the module's text."""


def _end_with_parent() -> None:
    """vLLM does not notice when whoever started its engine was killed, and nobody is left to end it."""
    parent = parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)


register()
threading.Thread(target=_end_with_parent, name="end-with-parent", daemon=True).start()
