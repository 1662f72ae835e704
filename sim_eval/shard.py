"""``python -m omni_loop_sim_eval.shard --fd N``: a process that runs episodes it is told of over a socket.

Lines of JSON: the first comes from the parent and says suite and server, every other one an episode; each is answered
with the line that the journal keeps. The process ends with its parent, however that ends, even in the middle of a call
that hangs.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import queue
import socket
import threading
from typing import Any

from omni_loop.client import Tls
from omni_loop.config import validate

from . import bounds, journal_line
from .api import Connect, Server
from .jobs import Job
from .suite import EvalSuite
from .worker import Worker

READY = b"{}"


def describe(connect: Connect) -> dict[str, Any] | None:
    """``connect`` as JSON, for another process; None: it cannot be told."""
    if isinstance(connect, Server):
        tls = connect.tls and [_pem(part) for part in (connect.tls.ca, connect.tls.certificate, connect.tls.key)]
        return {"address": connect.address, "timeout_s": connect.timeout_s, "token": connect.token, "tls": tls}
    if isinstance(connect, bounds.Bound):
        return {"bound": connect.kind}
    return None


def connect_of(said: dict[str, Any], suite: EvalSuite) -> Connect:
    """What :func:`describe` said."""
    if "bound" in said:
        return bounds.connect(said["bound"], suite)
    tls = None if said["tls"] is None else Tls(*(_from_pem(part) for part in said["tls"]))
    return Server(said["address"], said["timeout_s"], said["token"], tls)


def _pem(part: Any) -> Any:
    if part is None:
        return None
    return {"pem": base64.b64encode(part).decode()} if isinstance(part, bytes) else {"path": os.fspath(part)}


def _from_pem(part: Any) -> Any:
    return None if part is None else part.get("path") or base64.b64decode(part["pem"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    with socket.socket(fileno=parser.parse_args().fd) as link:
        lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        reader = link.makefile("rb")
        said = json.loads(reader.readline())
        suite = validate(EvalSuite, said["suite"], "suite")
        worker = Worker(suite, connect_of(said["connect"], suite))
        threading.Thread(target=_read, args=(reader, lines), daemon=True, name="parent").start()
        link.sendall(READY + b"\n")
        while line := lines.get():
            job = json.loads(line)
            result = worker.run(Job(job["task"], job["episode"]))
            link.sendall(journal_line.encode(result).encode() + b"\n")
        worker.close()


def _read(reader: Any, lines: queue.SimpleQueue[bytes]) -> None:
    """Hands on what the parent says; an empty line ends the work, the end of the socket everything: also as an error,
    which it is where the parent was killed before it had read all that was said to it."""
    try:
        for line in reader:
            lines.put(line.strip())
    finally:
        os._exit(1)


if __name__ == "__main__":
    main()
