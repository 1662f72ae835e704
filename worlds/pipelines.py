"""The shipped pipelines: what exists and how it is joined. Names of stages are registry names."""

from __future__ import annotations

from functools import partial

from omni_loop.loop.pipeline import CLIENT, Edge, Pipeline, Plan, StageDef
from omni_loop.messages import PayloadKind as P
from omni_loop.types import ArraySpec, Op, SessionSpec, StageKind

_IMAGE = ArraySpec("image", "uint8", (96, 96, 3), "RGB", description="the table from above")
_AGENT = ArraySpec(
    "agent_pos", "float32", (2, 2), "px", -32, 544, description="the agent's position a control step ago and now"
)
_POSE = ArraySpec(
    "block_pose", "float32", (3,), "px, px, rad", optional=True, description="the T's pose, where it is known"
)
_ACTION = ArraySpec("action", "float32", (2,), "px", 0, 512, description="where the agent shall go")
_FRAME = ArraySpec("frame", "uint8", (96, 96, 3), "RGB")
_HORIZON, _EXECUTE, _HZ = 16, 8, 10.0

_CONTEXT = StageDef("context", StageKind.CONTEXT, "context")
_ACT = StageDef("act", StageKind.ACT, "act")
_FRAMES = StageDef("frames", StageKind.FRAMES, "frames")
_DECODE = StageDef("decode", StageKind.DECODE, "decode")
_CHOOSE = StageDef("choose", StageKind.CONTEXT, "choose")

_SEE = Edge(CLIENT, "observation", "context", "observation", P.OBSERVATION)
_THINK = (
    Edge("context", "scene", "act", "scene", P.SCENE),
    Edge("context", "kv", "act", "kv", P.KV),
)
_IMAGINE = (
    Edge("context", "latents", "frames", "latents", P.LATENTS),
    Edge("act", "chunk", "frames", "actions", P.ACTIONS),
    Edge("frames", "latents", "decode", "latents", P.LATENTS, streams=True),
)


def _pusht_spec(pipeline: str = "pusht") -> SessionSpec:
    return SessionSpec(
        pipeline=pipeline,
        observations=(_IMAGE, _AGENT, _POSE),
        action=_ACTION,
        horizon=_HORIZON,
        execution_horizon=_EXECUTE,
        control_hz=_HZ,
        ops=(Op.INFER,),
        frame=_FRAME,
        max_predict=_HORIZON,
        prompt=True,
        description="PushT: context and action chunk; the chunk's frames on request",
    )


def _world_spec() -> SessionSpec:
    return SessionSpec(
        pipeline="pusht-world",
        observations=(_IMAGE,),
        action=_ACTION,
        horizon=_HORIZON,
        execution_horizon=_EXECUTE,
        control_hz=_HZ,
        ops=(Op.RECONDITION, Op.PREDICT, Op.PLAN),
        frame=_FRAME,
        max_predict=_HORIZON,
        description="PushT's world model under the client's actions",
    )


def _imagine_spec() -> SessionSpec:
    return SessionSpec(
        pipeline="pusht-imagine",
        observations=(_IMAGE, _AGENT, _POSE),
        action=_ACTION,
        horizon=_HORIZON,
        execution_horizon=_EXECUTE,
        control_hz=_HZ,
        ops=(Op.INFER, Op.PREDICT),
        frame=_FRAME,
        max_predict=_EXECUTE,
        prompt=True,
        description="PushT's policy inside its world model: every tick imagines the chunk's first steps",
    )


def _plan_spec() -> SessionSpec:
    return SessionSpec(
        pipeline="pusht-plan",
        observations=(_IMAGE, _AGENT, _POSE),
        action=_ACTION,
        horizon=_HORIZON,
        execution_horizon=_EXECUTE,
        control_hz=_HZ,
        ops=(Op.INFER,),
        frame=_FRAME,
        max_predict=_EXECUTE,
        prompt=True,
        description="PushT: of several chunks the one whose imagined outcome is best; its frames on request",
    )


_ACTING = Plan(
    answer=("context", "act"),
    besides=("frames", "decode"),
    chunk="act.chunk",
    frames="decode.frames",
    progress="context.progress",
)
_IMAGINING = Plan(
    answer=("context", "act", "frames", "decode"),
    chunk="act.chunk",
    frames="decode.frames",
    progress="context.progress",
)

PUSHT = Pipeline(
    "pusht",
    _pusht_spec,
    (_CONTEXT, _ACT, _FRAMES, _DECODE),
    (_SEE, *_THINK, *_IMAGINE),
    {Op.INFER: _ACTING},
    "observation -> context -> act; frames of the chunk besides",
)

PUSHT_VLLM = Pipeline(
    "pusht-vllm",
    partial(_pusht_spec, "pusht-vllm"),
    (StageDef("context", StageKind.CONTEXT, "context_vllm"), _ACT, _FRAMES, _DECODE),
    (
        _SEE,
        Edge("context", "scene", "act", "scene", P.SCENE),
        Edge("context", "hidden", "act", "hidden", P.HIDDEN),
        *_IMAGINE,
    ),
    {Op.INFER: _ACTING},
    "pusht with vLLM as the context's engine: tokens in, hidden states out",
)

PUSHT_WORLD = Pipeline(
    "pusht-world",
    _world_spec,
    (_FRAMES, _DECODE),
    (
        Edge(CLIENT, "observation", "frames", "observation", P.OBSERVATION, optional=True),
        Edge(CLIENT, "actions", "frames", "actions", P.ACTIONS, optional=True),
        Edge(CLIENT, "goal", "frames", "goal", P.GOAL, optional=True),
        Edge("frames", "latents", "decode", "latents", P.LATENTS, streams=True),
    ),
    {
        Op.RECONDITION: Plan(answer=("frames",)),
        Op.PREDICT: Plan(answer=("frames", "decode"), frames="decode.frames"),
        Op.PLAN: Plan(answer=("frames", "decode"), chunk="frames.plan", frames="decode.frames"),
    },
    "real frames and executed actions in, predicted frames out; plans towards a goal frame",
)

PUSHT_IMAGINE = Pipeline(
    "pusht-imagine",
    _imagine_spec,
    (_CONTEXT, _ACT, _FRAMES, _DECODE),
    (
        Edge(CLIENT, "observation", "context", "observation", P.OBSERVATION, optional=True),
        Edge("frames", "latents", "context", "imagined", P.LATENTS, feedback=True, optional=True),
        *_THINK,
        *_IMAGINE,
    ),
    dict.fromkeys((Op.INFER, Op.PREDICT), _IMAGINING),
    "observation -> context -> act -> frames, and the imagined frames are the next tick's observation",
)

PUSHT_PLAN = Pipeline(
    "pusht-plan",
    _plan_spec,
    (_CONTEXT, _ACT, _FRAMES, _CHOOSE, _DECODE),
    (
        _SEE,
        *_THINK,
        Edge("context", "latents", "frames", "latents", P.LATENTS),
        Edge("act", "chunks", "frames", "chunks", P.ACTIONS),
        Edge("act", "chunks", "choose", "chunks", P.ACTIONS),
        Edge("frames", "futures", "choose", "futures", P.LATENTS),
        Edge("context", "window", "choose", "window", P.KV),
        Edge("choose", "latents", "decode", "latents", P.LATENTS),
    ),
    {
        Op.INFER: Plan(
            answer=("context", "act", "frames", "choose"),
            besides=("decode",),
            chunk="choose.chunk",
            frames="decode.frames",
            progress="context.progress",
        )
    },
    "observation -> context -> several chunks -> their futures -> the chunk whose future is best",
    options={"samples": 16},
)
