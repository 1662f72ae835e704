"""What a pipeline's graph may not be, and that each mistake is named with the nearest right name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from omni_loop.errors import ConfigError
from omni_loop.loop.graph import compile_pipeline, validate
from omni_loop.loop.pipeline import CLIENT, Edge, Pipeline, Plan, StageDef
from omni_loop.messages import PayloadKind
from omni_loop.types import ArraySpec, Op, StageKind

from .toy import SPEC, SUM, TOY

H = PayloadKind.HIDDEN


def plans(**changes: Plan) -> dict[Op, Plan]:
    return {**TOY.plans, **{Op(name): plan for name, plan in changes.items()}}


def with_edge(*edges: Edge) -> Pipeline:
    return replace(TOY, edges=TOY.edges + edges)


BAD = [
    (replace(TOY, stages=(*TOY.stages, TOY.stages[0])), "two stages are called 'context'"),
    (replace(TOY, stages=(*TOY.stages, StageDef("a/b", StageKind.ACT, "x"))), "'a/b' is no stage name"),
    (replace(TOY, plans={}), "no plan"),
    (with_edge(Edge("contxt", "hidden", "act", "x", H)), "unknown stage 'contxt'. Did you mean 'context'"),
    (with_edge(Edge("context", "hidden", "atc", "x", H)), "unknown stage 'atc'. Did you mean 'act'"),
    (
        with_edge(Edge("context", "hidden", "act", "x", "hiden")),
        "unknown kind 'hiden'; a kind of your own needs a schema on its edge. Did you mean 'hidden'",
    ),  # type: ignore[arg-type]
    (with_edge(Edge(CLIENT, "observations", "act", "x", H)), "no output 'observations'. Did you mean 'observation'"),
    (with_edge(Edge(CLIENT, "observation", "act", "x", H)), "is of kind hidden, the client's observation is of kind"),
    (
        with_edge(Edge(CLIENT, "observation", "act", "x", PayloadKind.OBSERVATION, feedback=True)),
        "cannot be fed back",
    ),
    (with_edge(Edge("frames", "latents", "act", "hidden", PayloadKind.LATENTS)), "fill the same input"),
    (with_edge(Edge("context", "hidden", "act", "x", PayloadKind.KV)), "disagree: hidden and kv"),
    (replace(TOY, plans=plans(infer=Plan(()))), "plan infer answers with no stage"),
    (replace(TOY, plans=plans(infer=Plan(("contxt",)))), "unknown stage 'contxt'. Did you mean 'context'"),
    (replace(TOY, plans=plans(infer=Plan(("context",), ("context",)))), "names stage 'context' twice"),
    (replace(TOY, plans=plans(infer=Plan(("context",), chunk="act"))), "chunk is 'act', expected 'stage.output'"),
    (replace(TOY, plans=plans(infer=Plan(("context",), chunk="act.actions"))), "chunk comes from 'act'"),
    (
        replace(TOY, plans=plans(infer=Plan(("context",), ("act",), chunk="act.actions"))),
        "chunk comes from 'act', which does not run before it",
    ),
    (
        replace(TOY, plans=plans(predict=Plan(("context",)))),
        "needs observation, which a client does not send",
    ),
    (replace(TOY, plans=plans(infer=Plan(("act",)))), "needs stage 'context', which the plan does not run"),
    (replace(TOY, plans=plans(infer=Plan(("act",), ("context",)))), "an answer cannot wait for what runs besides it"),
    (
        with_edge(Edge("act", "a", "context", "x", H, optional=True)),
        "a cycle inside the tick: context > act > context",
    ),
]


@pytest.mark.parametrize(("pipeline", "text"), BAD, ids=[text[:40] for _, text in BAD])
def test_a_mistake_is_named(pipeline: Pipeline, text: str) -> None:
    with pytest.raises(ConfigError, match=f"pipeline 'toy': .*{text}"):
        validate(pipeline)


def test_feedback_from_a_stage_that_never_runs_is_refused() -> None:
    edge = Edge("frames", "latents", "context", "x", SUM.kind, feedback=True, schema=SUM)
    lean = replace(with_edge(edge), plans={Op.INFER: Plan(("context", "act"), chunk="act.actions")})
    with pytest.raises(ConfigError, match="is fed back by 'frames', which no plan runs"):
        validate(lean)


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (replace(SPEC, pipeline="other"), "its spec is for 'other'"),
        (replace(SPEC, ops=(Op.INFER,)), "its spec offers infer, its plans infer, predict, recondition"),
        (replace(SPEC, frame=None), "predicts frames, its spec has none"),
        (replace(SPEC, max_predict=0), "needs max_predict >= 1"),
        (replace(SPEC, action=ArraySpec("action", "float32", (2, 2))), r"its action has shape \(2, 2\)"),
        (replace(SPEC, observations=(ArraySpec("executed", "float32", (1,)),)), "'executed' is taken"),
    ],
)
def test_a_spec_that_does_not_fit_its_plans_is_named(spec: object, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        compile_pipeline(replace(TOY, spec=lambda: spec))  # type: ignore[arg-type, return-value]


def test_plans_are_compiled_in_an_order_that_can_run() -> None:
    shuffled = replace(TOY, plans=plans(infer=Plan(("act", "context"), ("frames",), chunk="act.actions")))
    plan = compile_pipeline(shuffled).plans[Op.INFER]
    assert [s.full for s in plan.answer] == ["toy/context", "toy/act"]
    assert plan.answer[1].after == {"context"}
    assert plan.besides[0].after == frozenset()  # its inputs are there before it starts
    assert {e.input for e in plan.besides[0].inputs} == {"hidden", "latents"}
    predict = compile_pipeline(TOY).plans[Op.PREDICT]
    assert (predict.takes_actions, predict.needs_actions) == (True, False)
