"""``python -m omni_loop.serve --control-fd N < deployment.json``: the child of a :class:`BackgroundServer`.

The control socket works both ways: the child writes its addresses when it serves (a line of JSON, by endpoint; the gRPC
port's under ""), and ends when the other side closes, so it never outlives its parent.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import signal
import socket
import sys
from collections.abc import Mapping

from ..config import Deployment
from ..errors import OmniLoopError
from . import event_loop
from .app import Start, serve_until


def main(arguments: list[str] | None = None, start: Start | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--control-fd", type=int, required=True)
    control = socket.socket(fileno=parser.parse_args(arguments).control_fd)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    deployment = Deployment.model_validate_json(sys.stdin.read())
    try:
        event_loop.run(_serve(deployment, control, start))
    except OmniLoopError as error:
        print(f"{type(error).__name__}: {error.text}", file=sys.stderr)
        return 1
    return 0


async def _serve(deployment: Deployment, control: socket.socket, start: Start | None) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    loop.add_signal_handler(signal.SIGINT, stop.set)
    control.setblocking(False)

    addresses: dict[str, str] = {}

    def ready(address: str) -> None:
        control.send(f"{json.dumps({**addresses, '': address})}\n".encode())

    def endpoints(others: Mapping[str, str]) -> None:
        addresses.update(others)

    def closed() -> None:
        loop.remove_reader(control)
        stop.set()

    loop.add_reader(control, closed)  # the parent sends nothing: readable means closed
    await serve_until(stop, deployment, ready, start=start, on_endpoints=endpoints)


if __name__ == "__main__":
    sys.exit(main())
