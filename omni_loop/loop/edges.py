"""What a deployment says of its pipelines' edges: which connector each goes by, and what each runner checks there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from ..connect.schema import EdgeSchema, StageEdges
from ..errors import ConfigError, nearest
from .graph import CompiledPipeline
from .pipeline import CLIENT, Edge

if TYPE_CHECKING:
    from ..config import Deployment


def full_name(graph: CompiledPipeline, edge: Edge) -> str:
    """``pipeline/source.output>target.input``, as a deployment names the edge."""
    return f"{graph.pipeline.name}/{edge.name}"


def choose(deployment: Deployment, graphs: Sequence[CompiledPipeline]) -> dict[str, str]:
    """The connectors of the edges that ``deployment.edges`` names, by full name. An edge's own name comes before
    patterns, a longer pattern before a shorter one.

    Raises:
        ConfigError: a name or pattern that fits no edge, with the nearest; a connector that does not reach from one end
            of its edge to the other.
    """
    edges = {full_name(graph, edge): (graph, edge) for graph in graphs for edge in graph.pipeline.edges}
    chosen: dict[str, str] = {}
    # The strongest last.
    for pattern in sorted(deployment.edges, key=lambda name: (name in edges, len(name))):
        named = [pattern] if pattern in edges else [name for name in edges if fnmatchcase(name, pattern)]
        if not named:
            raise ConfigError(f"edges: no edge is called {pattern!r}.{nearest(pattern, edges)}")
        chosen.update(dict.fromkeys(named, deployment.edges[pattern]))
    placement = {runner.name: runner.placement for runner in deployment.runners}
    placed = deployment.place(stage for graph in graphs for stage in graph.stages)
    for name, connector in chosen.items():
        graph, edge = edges[name]
        ends = [end for end in (edge.source, edge.target) if end != CLIENT]
        for runner in (placed[f"{graph.pipeline.name}/{end}"] for end in ends):
            if connector == "local" and placement[runner] == "process":
                text = f"edges: {name!r} cannot go by 'local', since runner {runner!r} is a process; take 'shm'"
                raise ConfigError(text)
    return chosen


def routes_of(chosen: Mapping[str, str], graphs: Iterable[CompiledPipeline]) -> dict[str, str]:
    """Backends by the edges of payload keys: of what is given to a stage under its edge's full name, and of a stage's
    outputs, ``pipeline/stage.output``. An output of several edges is put once, by the first choice among them."""
    routes = dict(chosen)
    for graph in graphs:
        for edge in graph.pipeline.edges:
            name = full_name(graph, edge)
            if edge.source != CLIENT and name in chosen:
                routes.setdefault(f"{graph.pipeline.name}/{edge.source}.{edge.output}", chosen[name])
    return routes


def schemas_of(graphs: Iterable[CompiledPipeline]) -> dict[str, StageEdges]:
    """By full stage name, what its runner checks."""
    schemas: dict[str, StageEdges] = {}
    for graph in graphs:
        for stage, full in zip(graph.pipeline.stages, graph.stages, strict=True):
            outputs: dict[str, tuple[EdgeSchema, ...]] = {}
            for edge in graph.pipeline.outputs_of(stage.name):
                one = EdgeSchema(full_name(graph, edge), graph.schemas[edge.name])
                outputs[edge.output] = (*outputs.get(edge.output, ()), one)
            inputs = {
                edge.input: EdgeSchema(full_name(graph, edge), graph.schemas[edge.name])
                for edge in graph.pipeline.inputs_of(stage.name)
            }
            schemas[full] = StageEdges(outputs, inputs)
    return schemas
