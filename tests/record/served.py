"""A real server of the board's toy pipeline on a loop of its own, for blocking clients in the test's thread."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from omni_loop import registry
from omni_loop.config import Deployment, Listen, RecordConfig, SnapshotConfig
from omni_loop.loop.pipeline import StageDef
from omni_loop.serve.app import Server
from omni_loop.testing.rows.toys import NAME, PIPELINE, STAGES, Faults

TOY = replace(PIPELINE, stages=tuple(StageDef(s.name, s.kind, f"board-{s.name}") for s in PIPELINE.stages))


def deployment(record: Path | None = None, snapshots: Path | None = None, **more: Any) -> Deployment:
    return Deployment(
        pipelines=(NAME,),
        listen=Listen(port=0),
        record=RecordConfig(folder=None if record is None else str(record)),
        snapshots=SnapshotConfig(folder=None if snapshots is None else str(snapshots)),
        **more,
    )


@contextlib.contextmanager
def registered() -> Iterator[None]:
    """The toy pipeline and its stages have names while the context lasts."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(registry.registered(registry.PIPELINES, NAME, TOY))
        for name, kind in STAGES.items():
            factory = functools.partial(_make, kind)
            stack.enter_context(registry.registered(registry.STAGES, f"board-{name}", factory))
        yield


def _make(kind: Any) -> Any:
    return kind(Faults())


@contextlib.contextmanager
def served(chosen: Deployment) -> Iterator[str]:
    """The address of a server that lives as long as the context."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="server")
    thread.start()
    server = Server(chosen)
    try:
        yield asyncio.run_coroutine_threadsafe(server.start(), loop).result(60)
    finally:
        asyncio.run_coroutine_threadsafe(server.stop(1.0), loop).result(60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
