"""A server for an evaluation: one that runs already, or one that lives as long as the evaluation."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from omni_loop.client import Tls
from omni_loop.config import Deployment

from .api import Connect, Server
from .served import deployment_of
from .suite import EvalSuite

_SAYS = {"pipelines", "stage_options"}  # of a deployment, what an answer depends on


@contextmanager
def server(
    suite: EvalSuite,
    address: str,
    console: Console,
    checkpoint: str = "",
    record: Path | None = None,
    token: str | None = None,
    tls: Tls | None = None,
) -> Iterator[Connect]:
    """How to connect: to ``address``, or to a server of the suite's deployment that lives as long as this context."""
    if address:
        yield Server(address, suite.time_limit_s, token, tls)
        return
    from omni_loop.serve.background import BackgroundServer

    deployment = deployment_of(suite, checkpoint, record)
    with console.status(f"starting a server for {suite.deployment}"):
        started = BackgroundServer(deployment)
        started.start()
    try:
        yield Server(started.address, suite.time_limit_s, serves=describe(deployment))
    finally:
        started.stop()


def describe(deployment: Deployment) -> str:
    """What of ``deployment`` an answer depends on, as one line."""
    return json.dumps(deployment.model_dump(mode="json", include=_SAYS), sort_keys=True)
