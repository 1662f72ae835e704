"""The runners of a deployment: built, started, pinged and stopped; and which runner has which stage."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from ..connect.base import Connector
from ..connect.local import LocalConnector
from ..connect.router import Router
from ..connect.shm import ShmConnector
from ..errors import ConfigError, nearest
from .edges import choose, full_name, routes_of, schemas_of
from .graph import CompiledPipeline, compile_pipeline
from .pipeline import load_pipeline
from .tick import Route

if TYPE_CHECKING:
    from ..config import Deployment, PipelineConfig
    from ..runner.handle import RunnerHandle


class Pool:
    """Started runners and the route of each pipeline through them. Replicas of a stage come later."""

    def __init__(
        self,
        graphs: Iterable[CompiledPipeline],
        handles: Sequence[RunnerHandle],
        connectors: Mapping[str, str] | None = None,
    ) -> None:
        """``connectors``: chosen for edges, by their full names."""
        self._connectors = connectors or {}
        self._handles = tuple(handles)
        self._by_stage = {stage: handle for handle in handles for stage in handle.stages}
        self.routes: Mapping[str, Route] = {g.pipeline.name: self._route(g) for g in graphs}
        self._stopped = False

    @classmethod
    async def start(cls, deployment: Deployment) -> Pool:
        """Load the pipelines, place their stages, start every runner; what was started is stopped on failure."""
        graphs = [await asyncio.to_thread(_load, named) for named in deployment.pipelines]
        _check_stage_options(deployment, graphs)
        connectors = choose(deployment, graphs)
        pool = cls(graphs, _build(deployment, graphs, connectors), connectors)
        outcomes = await asyncio.gather(*(h.start() for h in pool._handles), return_exceptions=True)
        failures = [o for o in outcomes if isinstance(o, BaseException)]
        if failures:
            await pool.stop()
            raise failures[0]
        return pool

    @property
    def alive(self) -> bool:
        """Every runner is."""
        return not self._stopped and all(h.alive for h in self._handles)

    async def ping(self) -> None:
        """Through every runner's work loop, with payloads there and back. Raises PayloadError when they do not come
        through, ServerUnavailable when a runner is gone."""
        await asyncio.gather(*(h.ping() for h in self._handles))

    async def stop(self) -> None:
        """Stop every runner, then raise the first error there was."""
        self._stopped = True
        outcomes = await asyncio.gather(*(h.stop() for h in self._handles), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    def _route(self, graph: CompiledPipeline) -> Route:
        name = graph.pipeline.name
        handles = {}
        for stage in graph.pipeline.stages:
            full = f"{name}/{stage.name}"
            if full not in self._by_stage:
                raise ConfigError(f"no runner has the stage {full!r}.{nearest(full, self._by_stage)}")
            handles[stage.name] = self._by_stage[full]
        chosen = {e.name: self._connectors.get(full_name(graph, e), "") for e in graph.pipeline.edges}
        return Route(graph, handles, {edge: connector for edge, connector in chosen.items() if connector})


def _load(named: str | PipelineConfig) -> CompiledPipeline:
    return compile_pipeline(load_pipeline(named))


def _check_stage_options(deployment: Deployment, graphs: Sequence[CompiledPipeline]) -> None:
    factories = {stage.factory for graph in graphs for stage in graph.pipeline.stages}
    for factory in deployment.stage_options:
        if factory not in factories:
            raise ConfigError(f"stage_options names no stage factory in use: {factory!r}.{nearest(factory, factories)}")


def _build(
    deployment: Deployment, graphs: Sequence[CompiledPipeline], connectors: Mapping[str, str]
) -> list[RunnerHandle]:
    # Runners bring torch, which this package never imports before a server is really started.
    from ..runner.ledger import Ledger
    from ..runner.local import LocalRunner
    from ..runner.process import ProcessRunner
    from ..runner.runner import RunnerSettings, StageEntry
    from ..runner.state import Budget

    entries: dict[str, StageEntry] = {}
    for graph in graphs:
        for stage, full in zip(graph.pipeline.stages, graph.stages, strict=True):
            options = {**stage.options, **deployment.stage_options.get(stage.factory, {})}
            entries[full] = (full, stage.factory, options)
    placed = deployment.place(entries)
    pools = deployment.pools
    budget = Budget(
        max_sessions=deployment.limits.max_sessions,
        nbytes=pools.budget_bytes,
        blocks=pools.blocks,
        rewind_ticks=deployment.session.rewind_ticks,
        evict=pools.evict,
    )
    # Runners of this process draw on one budget per device; a process has its own.
    ledger = Ledger({r.device: pools.budget_bytes for r in deployment.runners if r.placement == "thread"})
    schemas, routes = schemas_of(graphs), routes_of(connectors, graphs)
    handles: list[RunnerHandle] = []
    for runner in deployment.runners:
        stages = [entry for full, entry in entries.items() if placed[full] == runner.name]
        if not stages:
            raise ConfigError(f"runner {runner.name!r} has no stage left to run; leave it out")
        settings = RunnerSettings(
            threads=runner.threads,
            device=runner.device,
            budget=budget,
            max_batch=runner.max_batch,
            max_wait_ms=runner.max_wait_ms,
            queue_ms=pools.queue_ms,
            edges={full: schemas[full] for full, _, _ in stages},
        )
        if runner.placement == "process":
            handles.append(ProcessRunner(runner.name, stages, settings))
        else:
            connector = _connector(runner.connector or "local", routes)
            handles.append(LocalRunner(runner.name, stages, settings, connector, ledger=ledger))
    return handles


_BACKENDS: Mapping[str, Callable[[], Connector]] = {"local": LocalConnector, "shm": ShmConnector}


def _connector(default: str, routes: Mapping[str, str]) -> Connector:
    """Of a runner in a thread."""
    backends = dict.fromkeys((default, *routes.values()))
    made = {name: _BACKENDS[name]() for name in backends}
    return made[default] if len(made) == 1 else Router(made, routes)
