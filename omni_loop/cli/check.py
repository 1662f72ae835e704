"""The work of ``omni-loop check``: start what the server starts, without listening, and report each step; or run the
reliability board."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from .. import registry
from ..config import Deployment, Listen, PipelineConfig, load_deployment, shipped
from ..errors import CheckpointError, OmniLoopError, Reason, ServerUnavailable
from ..loop.orchestrator import Orchestrator
from ..loop.pipeline import StageDef
from ..testing import board, board_table
from . import output
from .check_config import check_access, check_options, compiled_of, options_of, shown
from .steps import Steps, absent, say_machine


def check_all(deployments: Sequence[str], console: Console) -> bool:
    """Check each of ``deployments`` (none: everything shipped); True when nothing is wrong. A part that fails does not
    hide the others. Weights and extras that are not on this machine are wrong only where a deployment was named."""
    say_machine(console)
    good = True
    for name in deployments or shipped("serve"):
        console.print(f"[bold]{escape(name)}[/bold]", highlight=False)
        steps = Steps(console, absent(not deployments))
        deployment = steps.step("configuration", partial(load_deployment, name))
        if deployment is not None:
            check_access(deployment, steps)
            _check_deployment(deployment, steps, () if deployments else (CheckpointError,))
        good &= steps.good
    return good


def run_board(rows: Sequence[str], seed: int | None, scale: board.Scale, path: Path | None) -> bool:
    """Run ``rows`` of the reliability board (none: all), a line of JSON each, to ``path`` too. False: one failed, or
    one asked for by name did not run."""
    names = board.chosen(rows)
    asked = {row.strip().upper() for row in rows}
    if path is not None:
        output.file(path, "--json")
    good = True
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # its core says of every fault what we make on purpose
    ours = logging.getLogger("omni_loop")
    with contextlib.ExitStack() as stack:
        stack.callback(ours.setLevel, ours.level)
        ours.setLevel(logging.CRITICAL + 1)  # thousands of faults are made on purpose
        file = None if path is None else stack.enter_context(path.open("w", encoding="utf-8"))
        for line in board.run(names, seed, scale):
            good &= bool(line.passed) or (line.passed is None and line.row not in asked)
            for out in (sys.stdout, file):
                if out is not None:
                    print(line.json(), file=out, flush=True)  # a row may take an hour
    return good


def write_table(files: Sequence[Path], out: Path | None) -> None:
    """The board as a table, of the lines of JSON in ``files``; to ``out``, or printed."""
    text = board_table.table(board_table.read(files))
    if out is None:
        print(text, end="")
        return
    output.file(out, "--out")
    out.write_text(text, encoding="utf-8")


def _check_deployment(deployment: Deployment, steps: Steps, absent: tuple[type[OmniLoopError], ...]) -> None:
    """``absent``: what a template may say of weights that are not here. What is shipped as a pipeline of its own comes
    with its weights."""
    stages: dict[str, StageDef] = {}
    for name, named in zip(deployment.names, deployment.pipelines, strict=True):
        forgiven = absent if isinstance(named, PipelineConfig) else ()
        compiled = steps.step(f"pipeline {name}", partial(compiled_of, named), shown, forgiven)
        if compiled is not None:
            stages |= zip(compiled.stages, compiled.pipeline.stages, strict=True)
    runners: dict[str, str] | None = None
    if steps.complete:
        steps.step("stage options", lambda: check_options(deployment, stages.values()))
        runners = steps.step(
            "placement", lambda: deployment.place(stages), lambda p: f"on {', '.join(sorted(set(p.values())))}"
        )
    if steps.complete:
        steps.step("start", lambda: asyncio.run(_start(deployment)), lambda _: f"of {', '.join(stages)}")
    if not steps.good:  # say which stages it is, if it is stages
        devices = {runner.name: runner.device for runner in deployment.runners}
        for full, stage in stages.items():
            options = options_of(stage, deployment, devices[runners[full]] if runners else "cpu")
            steps.step(f"stage {full}", partial(registry.build, registry.STAGES, stage.factory, options))
    steps.step("port", lambda: check_port(deployment.listen), lambda at: f"{at} is free")


async def _start(deployment: Deployment) -> None:
    """Build, place and warm up every stage, with the pools of their state, and end it all again."""
    orchestrator = await Orchestrator.start(deployment)
    await orchestrator.stop(0)


def check_port(listen: Listen) -> str:
    """The address, when it can be bound. Raises :class:`ServerUnavailable` (port busy)."""
    if listen.port == 0:
        return "any port"
    family = socket.AF_INET6 if ":" in listen.host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((listen.host, listen.port))
        except OSError:
            raise ServerUnavailable(
                f"port {listen.port} on {listen.host} is taken by another program", reason=Reason.PORT_BUSY
            ) from None
    return f"{listen.host}:{listen.port}"
