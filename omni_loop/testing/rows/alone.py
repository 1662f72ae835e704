"""A part of a row in a process of its own, where it may leave behind what this one would stumble over.

gRPC's poller, which belongs to the process, does not outlive a server whose accepting ended, see
:mod:`omni_loop.serve.listening`: a later event loop of the process would crash on it.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import subprocess
import sys

from ..board import Broken

_WAIT_S = 3600.0
_QUIET = {"GRPC_VERBOSITY": "NONE"}  # its core prints what it was sent


def alone(part: str, seed: int, full: bool, wait_s: float = _WAIT_S) -> float:
    """``module:function`` of the rows, as a row's own ``measure``. Raises :class:`~..board.Broken` as it does, and when
    the process ends otherwise."""
    command = [sys.executable, "-m", __name__, part, str(seed), str(int(full))]
    try:
        done = subprocess.run(command, capture_output=True, env=_QUIET | os.environ, timeout=wait_s)
    except subprocess.TimeoutExpired:
        raise Broken(f"{part} took more than {wait_s:g} s") from None
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        raise Broken(f"{part} ended with {done.returncode}: {done.stderr.decode(errors='replace').strip()[-500:]}")
    said = json.loads(lines[-1])
    if said["broken"]:
        raise Broken(said["broken"])
    return float(said["number"])


def main(part: str, seed: str, full: str) -> None:
    logging.getLogger("omni_loop").setLevel(logging.CRITICAL + 1)  # faults are made on purpose
    logging.getLogger("asyncio").setLevel(logging.CRITICAL + 1)
    module, _, function = part.partition(":")
    number, broken = 0.0, ""
    try:
        number = getattr(importlib.import_module(f"{__package__}.{module}"), function)(int(seed), full == "1")
    except Broken as error:
        broken = str(error)
    print(json.dumps({"number": number, "broken": broken}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
