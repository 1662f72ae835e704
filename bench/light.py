"""A policy whose forward pass takes next to nothing, for what is measured around it: it looks at the colours of three
cameras of 224 x 224, 450 KB, and at 14 joints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from omni_loop.connect.base import as_numpy
from omni_loop.loop.pipeline import CLIENT, Edge, Pipeline, Plan, StageDef
from omni_loop.messages import PayloadKind
from omni_loop.stage import Outputs, Payload, StageItem, StateSpec, in_one
from omni_loop.types import ArraySpec, Op, SessionSpec, StageKind

CAMERAS, SIZE, JOINTS, HORIZON, ACTIONS = 3, 224, 14, 10, 4
_CAMERA = tuple(f"cam{i}" for i in range(CAMERAS))
_EVERY = 8  # pixels of a row and a column between those that are looked at


class Light:
    """Actions are a fixed linear map of joints and pixels."""

    kind = StageKind.ACT
    revision = "light"

    def __init__(self, device: str = "cpu") -> None:
        draw = torch.Generator().manual_seed(0)
        seen = JOINTS + CAMERAS * (SIZE // _EVERY) ** 2 * 3
        self._weights = (torch.randn(seen, HORIZON * ACTIONS, generator=draw) / seen).to(device)

    def state_specs(self) -> Mapping[str, StateSpec]:
        return {}

    def run(self, items: Sequence[StageItem]) -> Sequence[Outputs | Exception]:
        return in_one(_seen, self._act, items)

    def _act(self, given: Sequence[Tensor]) -> list[Outputs]:
        actions = (torch.stack(list(given)).to(self._weights.device) @ self._weights).cpu()
        chunks = actions.view(-1, HORIZON, ACTIONS).unbind()
        return [{"chunk": Payload(PayloadKind.ACTIONS, {"actions": c}, {"revision": self.revision})} for c in chunks]

    def warm_up(self) -> None:
        self._act([torch.zeros(len(self._weights))])


def _seen(item: StageItem) -> Tensor:
    arrays = item.inputs["observation"].arrays
    pixels = [as_numpy(arrays[name])[::_EVERY, ::_EVERY].astype(np.float32).reshape(-1) for name in _CAMERA]
    return torch.from_numpy(np.concatenate([as_numpy(arrays["state"]), *pixels]))


def light(name: str) -> Pipeline:
    """A template, named in deployments as ``omni_loop_bench.light:light``."""
    spec = SessionSpec(
        pipeline=name,
        observations=(
            ArraySpec("state", "float32", (JOINTS,)),
            *(ArraySpec(camera, "uint8", (SIZE, SIZE, 3), low=0, high=255) for camera in _CAMERA),
        ),
        action=ArraySpec("action", "float32", (ACTIONS,)),
        horizon=HORIZON,
        execution_horizon=HORIZON // 2,
        control_hz=10.0,
        ops=(Op.INFER,),
    )
    return Pipeline(
        name=name,
        spec=lambda: spec,
        stages=(StageDef("act", StageKind.ACT, f"{__name__}:Light"),),
        edges=(Edge(CLIENT, "observation", "act", "observation", PayloadKind.OBSERVATION),),
        plans={Op.INFER: Plan(answer=("act",), chunk="act.chunk")},
        description="colours of three cameras",
    )
