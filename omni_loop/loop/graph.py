"""Checks a pipeline's graph and compiles each plan into the steps that the orchestrator walks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter

from ..connect.schema import Schema, schema_of
from ..errors import ConfigError, Reason, nearest
from ..messages import PayloadKind
from ..types import Op, SessionSpec
from .pipeline import CLIENT, Edge, Pipeline, Plan

OBSERVATION, ACTIONS, GOAL = "observation", "actions", "goal"  # outputs of CLIENT
EXECUTED = "executed"  # array that the orchestrator adds to the observation
_CLIENT_KINDS = {OBSERVATION: PayloadKind.OBSERVATION, ACTIONS: PayloadKind.ACTIONS, GOAL: PayloadKind.GOAL}
_CLIENT_SENDS = {
    Op.INFER: (OBSERVATION,),
    Op.RECONDITION: (OBSERVATION,),
    Op.PREDICT: (ACTIONS,),
    Op.PLAN: (GOAL,),
}


@dataclass(frozen=True, slots=True)
class StageStep:
    """One stage inside a plan. It may start when every stage of ``after`` is done."""

    name: str
    full: str  # "pipeline/stage"
    inputs: tuple[Edge, ...]  # from the client, from stages of this plan, and feedback
    after: frozenset[str]


@dataclass(frozen=True, slots=True)
class CompiledPlan:
    """A validated :class:`Plan`; ``answer`` and ``besides`` are in topological order."""

    op: Op
    plan: Plan
    answer: tuple[StageStep, ...]
    besides: tuple[StageStep, ...]
    takes_actions: bool  # some stage reads the client's actions
    needs_actions: bool  # ... and cannot run without them
    streams: Mapping[str, tuple[Edge, ...]]  # stage -> edges whose parts lead to the plan's frames
    shows: str | None  # the stage whose parts are the plan's frames


@dataclass(frozen=True, slots=True)
class CompiledPipeline:
    """A validated pipeline with its spec."""

    pipeline: Pipeline
    spec: SessionSpec
    plans: Mapping[Op, CompiledPlan]
    feedback: Mapping[str, tuple[Edge, ...]]  # stage -> its edges into the next tick
    fed_to: Mapping[str, str]  # name of a feedback edge -> the stage it leads to
    schemas: Mapping[str, Schema]  # by edge name

    @property
    def stages(self) -> tuple[str, ...]:
        """Full names of all stages."""
        return tuple(f"{self.pipeline.name}/{s.name}" for s in self.pipeline.stages)


def compile_pipeline(pipeline: Pipeline) -> CompiledPipeline:
    """Validate ``pipeline`` and its spec; ConfigError names what is wrong and the nearest right name."""
    validate(pipeline)
    spec = pipeline.spec()
    _check_spec(pipeline, spec)
    feedback = {s.name: tuple(e for e in pipeline.outputs_of(s.name) if e.feedback) for s in pipeline.stages}
    fed_to = {e.name: e.target for e in pipeline.edges if e.feedback}
    plans = {op: _compile_plan(pipeline, op, plan) for op, plan in pipeline.plans.items()}
    schemas = {e.name: schema_of(e.kind, e.schema) for e in pipeline.edges}
    return CompiledPipeline(pipeline, spec, plans, feedback, fed_to, schemas)


def validate(pipeline: Pipeline) -> None:
    """Raise ConfigError unless every edge, plan and output of ``pipeline`` fits."""
    names = [s.name for s in pipeline.stages]
    for name, count in Counter(names).items():
        if count > 1:
            raise _bad(pipeline, f"two stages are called {name!r}")
        if not name.replace("_", "").replace("-", "").isalnum() or name == CLIENT:
            raise _bad(pipeline, f"{name!r} is no stage name (letters, digits, '-' and '_'; {CLIENT!r} is taken)")
    if not pipeline.plans:
        raise _bad(pipeline, "it has no plan for any operation")
    for edge in pipeline.edges:
        _check_edge(pipeline, edge, names)
    _check_unique(pipeline)
    for op, plan in pipeline.plans.items():
        _check_plan(pipeline, op, plan, names)


def _bad(pipeline: Pipeline, text: str) -> ConfigError:
    return ConfigError(f"pipeline {pipeline.name!r}: {text}", reason=Reason.BAD_CONFIG)


def _check_edge(pipeline: Pipeline, edge: Edge, names: list[str]) -> None:
    if edge.source != CLIENT and edge.source not in names:
        raise _bad(pipeline, f"edge {edge.name} starts at unknown stage {edge.source!r}." + nearest(edge.source, names))
    if edge.target not in names:
        raise _bad(pipeline, f"edge {edge.name} ends at unknown stage {edge.target!r}." + nearest(edge.target, names))
    try:
        schema_of(edge.kind, edge.schema)
    except ConfigError as error:
        raise _bad(pipeline, f"edge {edge.name} {error.text}") from None
    if edge.streams:
        _check_stream(pipeline, edge)
    if edge.source != CLIENT:
        return
    kind = _CLIENT_KINDS.get(edge.output)
    if kind is None:
        known = nearest(edge.output, _CLIENT_KINDS)
        raise _bad(pipeline, f"edge {edge.name}: the client has no output {edge.output!r}.{known}")
    if kind != edge.kind:
        raise _bad(pipeline, f"edge {edge.name} is of kind {edge.kind}, the client's {edge.output} is of kind {kind}")
    if edge.feedback:
        raise _bad(pipeline, f"edge {edge.name}: what the client sent cannot be fed back to the next tick")


def _check_stream(pipeline: Pipeline, edge: Edge) -> None:
    if edge.source == CLIENT or edge.feedback:
        raise _bad(pipeline, f"edge {edge.name} streams, but only what a stage makes within the tick comes in parts")
    for other in pipeline.inputs_of(edge.target):
        if other is not edge and not other.optional:
            text = f"edge {edge.name} streams, but {edge.target!r} needs {other.input!r} too, which has no parts"
            raise _bad(pipeline, text)


def _check_unique(pipeline: Pipeline) -> None:
    kinds: dict[tuple[str, str], Edge] = {}
    inputs: dict[tuple[str, str], Edge] = {}
    for edge in pipeline.edges:
        twin = inputs.setdefault((edge.target, edge.input), edge)
        if twin is not edge:
            raise _bad(pipeline, f"edges {twin.name} and {edge.name} fill the same input; give it two names")
        first = kinds.setdefault((edge.source, edge.output), edge)
        if first.kind != edge.kind:
            raise _bad(pipeline, f"edges {first.name} and {edge.name} disagree: {first.kind} and {edge.kind}")


def _check_plan(pipeline: Pipeline, op: Op, plan: Plan, names: list[str]) -> None:
    planned = plan.answer + plan.besides
    if not plan.answer:
        raise _bad(pipeline, f"plan {op} answers with no stage")
    if op is Op.PLAN and plan.besides:
        raise _bad(
            pipeline, f"plan {op} commits nothing, so that nothing can run besides it; let {plan.besides[0]!r} answer"
        )
    if op is Op.PLAN and plan.chunk is None:
        raise _bad(pipeline, f"plan {op} has no chunk; it answers with the actions found")
    for name, count in Counter(planned).items():
        if name not in names:
            raise _bad(pipeline, f"plan {op} names unknown stage {name!r}." + nearest(name, names))
        if count > 1:
            raise _bad(pipeline, f"plan {op} names stage {name!r} twice")
    for what, output in (("chunk", plan.chunk), ("frames", plan.frames), ("progress", plan.progress)):
        if output is not None:
            _check_output(pipeline, op, what, output, plan.answer if what == "chunk" else planned)
    fed = {stage for other in pipeline.plans.values() for stage in other.answer + other.besides}
    for stage in planned:
        for edge in pipeline.inputs_of(stage):
            if not edge.optional:
                _check_source(pipeline, op, plan, edge, fed)
    try:
        _order(pipeline, plan.answer, planned)
        _order(pipeline, planned, planned)
    except CycleError as cycle:
        loop = " > ".join(cycle.args[1])
        raise _bad(pipeline, f"plan {op} has a cycle inside the tick: {loop} (mark an edge as feedback)") from None


def _check_output(pipeline: Pipeline, op: Op, what: str, output: str, planned: tuple[str, ...]) -> None:
    # Whether the stage gives that output is seen when it first runs: a final output needs no edge.
    stage, _, name = output.partition(".")
    if not name:
        raise _bad(pipeline, f"plan {op}: {what} is {output!r}, expected 'stage.output'")
    if stage not in planned:
        known = nearest(stage, planned)
        raise _bad(pipeline, f"plan {op}: {what} comes from {stage!r}, which does not run before it.{known}")


def _check_source(pipeline: Pipeline, op: Op, plan: Plan, edge: Edge, fed: Iterable[str]) -> None:
    if edge.source == CLIENT:
        if edge.output not in _CLIENT_SENDS[op]:
            raise _bad(
                pipeline, f"plan {op}: edge {edge.name} needs {edge.output}, which a client does not send for {op}"
            )
    elif edge.feedback:
        if edge.source not in fed:
            raise _bad(pipeline, f"plan {op}: edge {edge.name} is fed back by {edge.source!r}, which no plan runs")
    elif edge.source not in plan.answer + plan.besides:
        raise _bad(pipeline, f"plan {op}: edge {edge.name} needs stage {edge.source!r}, which the plan does not run")
    elif edge.target in plan.answer and edge.source in plan.besides:
        raise _bad(pipeline, f"plan {op}: edge {edge.name}: an answer cannot wait for what runs besides it")


def _check_spec(pipeline: Pipeline, spec: SessionSpec) -> None:
    if spec.pipeline != pipeline.name:
        raise _bad(pipeline, f"its spec is for {spec.pipeline!r}")
    if set(spec.ops) != set(pipeline.plans):
        raise _bad(pipeline, f"its spec offers {_list(spec.ops)}, its plans {_list(pipeline.plans)}")
    for array in spec.observations:
        if array.name == EXECUTED:
            raise _bad(pipeline, f"observation key {EXECUTED!r} is taken by the executed actions")
    if len(spec.action.shape) != 1:
        raise _bad(pipeline, f"its action has shape {spec.action.shape}, expected one axis [action_dim]")
    for op, plan in pipeline.plans.items():
        if plan.frames is not None and spec.frame is None:
            raise _bad(pipeline, f"plan {op} predicts frames, its spec has none")
        if op in (Op.PREDICT, Op.PLAN) and spec.max_predict < 1:
            raise _bad(pipeline, f"plan {op} needs max_predict >= 1 in the spec")


def _order(pipeline: Pipeline, stages: tuple[str, ...], planned: tuple[str, ...]) -> tuple[str, ...]:
    graph = {s: [e.source for e in pipeline.inputs_of(s) if not e.feedback and e.source in planned] for s in stages}
    return tuple(s for s in TopologicalSorter(graph).static_order() if s in stages)


def _compile_plan(pipeline: Pipeline, op: Op, plan: Plan) -> CompiledPlan:
    def steps(stages: tuple[str, ...], available: tuple[str, ...]) -> tuple[StageStep, ...]:
        order = _order(pipeline, stages, available)
        return tuple(_compile_stage(pipeline, op, stage, stages, available) for stage in order)

    planned = plan.answer + plan.besides
    reads = [e for s in planned for e in pipeline.inputs_of(s) if (e.source, e.output) == (CLIENT, ACTIONS)]
    needs = any(not e.optional and e.target in plan.answer for e in reads)
    shown = None if plan.frames is None else plan.frames.partition(".")[0]
    streams = {s: tuple(e for e in pipeline.outputs_of(s) if e.streams and e.target == shown) for s in planned}
    return CompiledPlan(
        op=op,
        plan=plan,
        answer=steps(plan.answer, plan.answer),
        besides=steps(plan.besides, planned),
        takes_actions=op is Op.PREDICT and bool(reads),
        needs_actions=needs,
        streams={stage: edges for stage, edges in streams.items() if edges},
        shows=shown,
    )


def _compile_stage(
    pipeline: Pipeline, op: Op, stage: str, group: tuple[str, ...], available: tuple[str, ...]
) -> StageStep:
    inputs, after = [], set()
    for edge in pipeline.inputs_of(stage):
        if edge.source == CLIENT:
            if edge.output in _CLIENT_SENDS[op]:
                inputs.append(edge)
        elif edge.feedback:
            # Real frames replace what was imagined: nothing of the tick before is handed to them.
            if op is not Op.RECONDITION:
                inputs.append(edge)
        elif edge.source in available:
            inputs.append(edge)
            if edge.source in group:
                after.add(edge.source)
    return StageStep(stage, f"{pipeline.name}/{stage}", tuple(inputs), frozenset(after))


def _list(ops: Iterable[Op]) -> str:
    return ", ".join(sorted(ops)) or "nothing"
