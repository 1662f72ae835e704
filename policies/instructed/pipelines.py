"""The shipped pipelines of instructed policies: Meta-World from its state, and from one camera."""

from __future__ import annotations

from functools import partial

from omni_loop.loop.pipeline import CLIENT, Edge, Pipeline, Plan, StageDef
from omni_loop.messages import PayloadKind as P
from omni_loop.types import ArraySpec, Op, SessionSpec, StageKind

_STATE = ArraySpec(
    "state", "float32", (39,), description="hand, fingers and objects now and a control step ago, and the goal"
)
_IMAGE = ArraySpec("image", "uint8", (64, 64, 3), "RGB", description="the task's camera")
_GRIPPER = ArraySpec("gripper", "float32", (4,), "m, m, m, 1", description="the hand's position; how far it is open")
_ACTION = ArraySpec(
    "action", "float32", (4,), low=-1, high=1, description="where the hand goes, in x, y and z; fingers: 1 closes"
)


def _spec(pipeline: str, observations: tuple[ArraySpec, ...], description: str) -> SessionSpec:
    return SessionSpec(
        pipeline=pipeline,
        observations=observations,
        action=_ACTION,
        horizon=16,
        execution_horizon=8,
        control_hz=80.0,
        ops=(Op.INFER,),
        prompt=True,
        description=description,
    )


def _pipeline(name: str, observations: tuple[ArraySpec, ...], description: str) -> Pipeline:
    return Pipeline(
        name,
        partial(_spec, name, observations, description),
        (
            StageDef("instruct", StageKind.CONTEXT, "instruct", {"checkpoint": name}),
            StageDef("act", StageKind.ACT, "instructed_act", {"checkpoint": name}),
        ),
        (
            Edge(CLIENT, "observation", "act", "observation", P.OBSERVATION),
            Edge("instruct", "kv", "act", "kv", P.KV),
        ),
        {Op.INFER: Plan(answer=("instruct", "act"), chunk="act.chunk")},
        description,
    )


METAWORLD = _pipeline("metaworld", (_STATE,), "Meta-World from its state; the instruction says which of six tasks")
METAWORLD_PIXELS = _pipeline(
    "metaworld-pixels", (_IMAGE, _GRIPPER), "Meta-World from a camera; the instruction says which of three tasks"
)
