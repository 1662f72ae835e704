"""A pipeline of one stage whose every answer tells of all the state it has and of the noise of every tick before.

State of each kind takes part: paged KV, a tensor, a ring, a counter, and what is fed to the next tick. So a session
that was rebuilt, forked, rewound or restored answers like one that never was only when all of it came along.
"""

from __future__ import annotations

import numpy as np
import torch

from omni_loop.connect.schema import ArrayType, Schema
from omni_loop.loop.pipeline import CLIENT, Edge, Pipeline, Plan, StageDef
from omni_loop.loop.request import PlanRequest, SessionInfo, TickRequest
from omni_loop.messages import PayloadKind
from omni_loop.runner.runner import RunnerSettings
from omni_loop.runner.state import Budget
from omni_loop.stage import KVSpec, Payload, RingSpec, StageItem, TensorSpec
from omni_loop.types import ArraySpec, Op, SessionSpec, StageKind

from . import toy
from .toy import DIM, HORIZON

WINDOW = 4
FED = Schema("fed", (ArrayType("fed", "float64", ()),))
KV = KVSpec(layers=1, kv_heads=1, head_dim=2, block_size=2, window_blocks=WINDOW, sink_blocks=1)


def _sum(tensor: torch.Tensor) -> float:
    """In the order of the elements, however they lie in memory."""
    return float(np.ascontiguousarray(tensor.numpy()).sum(dtype=np.float64))


def _walk(item: StageItem, count: int) -> dict[str, Payload]:
    """Chunk: the walk (tensor) and the sum of the KV; its total and the sum of the ring; the count and what was fed;
    the step and the tick's noise."""
    walk, ring, kv = item.state.tensor("walk"), item.state.ring("past"), item.state.kv("kv")
    noise = np.random.default_rng(item.noise_seed("walk")).standard_normal()
    seen = item.inputs.get("observation")
    mark = float(np.asarray(seen.arrays["mark"]).sum()) if seen else 0.5
    fed = float(np.asarray(item.inputs["fed"].arrays["fed"])) if "fed" in item.inputs else -1.0
    walk.set(0.9 * walk.get() + noise + mark + 0.1 * fed)
    ring.push(walk.get().clone())
    kv.append(walk.get()[None, None, None, None, :].expand(1, 2, 2, 1, 2).contiguous(), imagined=item.op is Op.PREDICT)
    held, past = _sum(kv.gather()), _sum(torch.stack(list(ring.items())))
    rows = int(item.params.get("horizon", HORIZON))
    actions = np.zeros((rows, DIM), np.float32)
    actions[:4] = np.array(
        [[float(walk.get()[0]), held], [kv.total, past], [count, fed], [item.step, noise]], np.float32
    )[:rows]
    meta: dict[str, str | float | int | bool] = {"revision": "walker-1"}
    if item.op is Op.PLAN:
        wanted = item.inputs["goal"].arrays
        goal = float(wanted["goal"].mean()) if "goal" in wanted else -1.0
        meta |= {"cost": goal, "first_cost": 2.0, "candidates": int(item.params["candidates"]), "iterations": 1}
        actions[-1] = wanted["init"][-1] if "init" in wanted else 0.0
    frames = np.full((int(item.params["frames"]), 4, 4, 3), count, np.uint8)
    outputs = {
        "actions": Payload(PayloadKind.ACTIONS, {"actions": actions}, meta),
        "fed": Payload(FED.kind, {"fed": np.float64(noise + fed)}),
    }
    if item.op in (Op.PREDICT, Op.PLAN):
        outputs["frames"] = Payload(PayloadKind.FRAMES, {"frames": frames})
    return outputs


toy.MODELS["walk"] = (StageKind.ACT, _walk)
toy.SPECS["walk"] = {"kv": KV, "walk": TensorSpec((2,)), "past": RingSpec((2,), capacity=3)}

SPEC = SessionSpec(
    pipeline="walker",
    observations=toy.SPEC.observations,
    action=ArraySpec("action", "float32", (DIM,)),
    horizon=HORIZON,
    execution_horizon=2,
    control_hz=10,
    ops=(Op.INFER, Op.PREDICT, Op.RECONDITION, Op.PLAN),
    frame=toy.SPEC.frame,
    max_predict=8,
)

WALKER = Pipeline(
    name="walker",
    spec=lambda: SPEC,
    stages=(StageDef("walk", StageKind.ACT, "walk"), StageDef("context", StageKind.CONTEXT, "context")),
    edges=(
        Edge(CLIENT, "observation", "walk", "observation", PayloadKind.OBSERVATION, optional=True),
        Edge(CLIENT, "observation", "context", "observation", PayloadKind.OBSERVATION),
        Edge(CLIENT, "goal", "walk", "goal", PayloadKind.GOAL, optional=True),
        Edge("walk", "fed", "walk", "fed", FED.kind, feedback=True, optional=True, schema=FED),
    ),
    plans={
        Op.INFER: Plan(("walk", "context"), chunk="walk.actions", progress="context.progress"),
        Op.PREDICT: Plan(("walk",), frames="walk.frames"),
        Op.RECONDITION: Plan(("walk",)),
        Op.PLAN: Plan(("walk",), chunk="walk.actions", frames="walk.frames"),
    },
)
# One full session takes its sink, its window and a block that is staged: six blocks of seven.
TIGHT = RunnerSettings(budget=Budget(blocks=7), queue_ms=1.0)
ONE = (("walk", "context"),)
TWO = (("walk",), ("context",))


def plain(name: str) -> toy.ToyStage:
    """A stage that nothing scripts, as a factory that another process can import."""
    return toy.plain(name)


def plan(info: SessionInfo, seq: int, **wanted: object) -> TickRequest:
    return TickRequest(info.id, info.token, seq, Op.PLAN, plan=PlanRequest(**wanted))  # type: ignore[arg-type]


async def walk(setup: toy.Toy, info: SessionInfo, steps: range, first_seq: int = 0) -> list[list[list[float]]]:
    """Infer at each of ``steps``, with seqs from ``first_seq`` on (0: a step more each); what the chunks said."""
    said = []
    for number, step in enumerate(steps):
        seq = first_seq + number if first_seq else step + 1
        said.append(toy.actions(await setup.core.tick(toy.infer(info, seq, step, mark=step))))
    return said
