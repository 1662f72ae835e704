"""A small pipeline over real state, whose every answer tells its session's whole history.

Context, act, frames and decode stages keep paged KV, tensors, rings and counters, and draw noise. What a session is
answered is a pure function of its seed and of the ticks it committed, computed item by item: a tick lost, doubled,
mixed up between sessions or left half done changes every bit that follows. :class:`Faults` makes a stage's model go
wrong for one session.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...loop.pipeline import CLIENT, Edge, Pipeline, Plan, StageDef
from ...messages import PayloadKind
from ...stage import CounterSpec, KVSpec, Outputs, Payload, RingSpec, StageItem, StateSpec, TensorSpec
from ...types import ArraySpec, Op, SessionSpec, StageKind

NAME = "board-toy"
WIDTH, HORIZON, DIM = 4, 4, 2
MAX_FRAMES = 4
CONTEXT_KV = KVSpec(
    layers=2, kv_heads=1, head_dim=WIDTH, block_size=2, window_blocks=4, sink_blocks=1, scratch_blocks=MAX_FRAMES
)
FRAMES_KV = KVSpec(layers=1, kv_heads=2, head_dim=2, block_size=1, window_blocks=4, scratch_blocks=MAX_FRAMES)

SPEC = SessionSpec(
    pipeline=NAME,
    observations=(ArraySpec("x", "float32", (WIDTH,)),),
    action=ArraySpec("action", "float32", (DIM,), low=-1, high=1),
    horizon=HORIZON,
    execution_horizon=2,
    control_hz=5,
    ops=(Op.INFER, Op.PREDICT, Op.RECONDITION),
    frame=ArraySpec("frame", "uint8", (2, 2, 3)),
    max_predict=MAX_FRAMES,
)

PIPELINE = Pipeline(
    name=NAME,
    spec=lambda: SPEC,
    stages=(
        StageDef("context", StageKind.CONTEXT, "context"),
        StageDef("act", StageKind.ACT, "act"),
        StageDef("frames", StageKind.FRAMES, "frames"),
        StageDef("decode", StageKind.DECODE, "decode"),
    ),
    edges=(
        Edge(CLIENT, "observation", "context", "observation", PayloadKind.OBSERVATION),
        Edge(CLIENT, "observation", "frames", "observation", PayloadKind.OBSERVATION, optional=True),
        Edge(CLIENT, "actions", "frames", "actions", PayloadKind.ACTIONS, optional=True),
        Edge("context", "hidden", "act", "hidden", PayloadKind.HIDDEN),
        Edge("frames", "latents", "decode", "latents", PayloadKind.LATENTS),
        Edge("frames", "last", "frames", "last", PayloadKind.LATENTS, feedback=True, optional=True),
    ),
    plans={
        Op.INFER: Plan(
            ("context", "act"),
            ("frames", "decode"),
            chunk="act.actions",
            frames="decode.frames",
            progress="context.progress",
        ),
        Op.PREDICT: Plan(("frames", "decode"), frames="decode.frames"),
        Op.RECONDITION: Plan(("context", "frames"), progress="context.progress"),
    },
)

Spoil = Callable[[StageItem, dict[str, Payload]], Outputs]


@dataclass
class Faults:
    """What goes wrong by (stage, session), until it is lifted; and in how large a batch it did."""

    planted: dict[tuple[str, str], Spoil] = field(default_factory=dict)
    met: dict[tuple[str, str], int] = field(default_factory=dict)

    def plant(self, stage: str, session: str, spoil: Spoil) -> None:
        self.planted[stage, session] = spoil

    def lift(self, stage: str, session: str) -> int:
        """The model is sound again. Sessions in the largest batch that met the fault; 0: none did."""
        self.planted.pop((stage, session), None)
        return self.met.pop((stage, session), 0)

    def spoil(self, stage: str, item: StageItem, outputs: dict[str, Payload], company: int) -> Outputs:
        """``outputs`` of ``item``, one of ``company`` in its batch, or what the fault makes of them."""
        spoil = self.planted.get((stage, item.session))
        if spoil is None:
            return outputs
        self.met[stage, item.session] = max(company, self.met.get((stage, item.session), 0))
        return spoil(item, outputs)


class _Toy:
    kind = StageKind.CONTEXT
    name = "context"
    revision = "board-1"

    def __init__(self, faults: Faults) -> None:
        self.faults = faults
        draw = torch.Generator().manual_seed(sum(map(ord, self.name)))
        self.weight = torch.randn(WIDTH, WIDTH, generator=draw) / 2

    def state_specs(self) -> Mapping[str, StateSpec]:
        raise NotImplementedError

    def warm_up(self) -> None:
        self.mix(torch.zeros(WIDTH))

    def run(self, items: Sequence[StageItem]) -> Sequence[Outputs | Exception]:
        results: list[Outputs | Exception] = []
        for item in items:
            try:
                results.append(self.faults.spoil(self.name, item, self.outputs(item), len(items)))
            except Exception as e:  # the runner answers that item with it
                results.append(e)
        return results

    def outputs(self, item: StageItem) -> dict[str, Payload]:
        raise NotImplementedError

    def mix(self, x: Tensor) -> Tensor:
        """``x @ weight``, without BLAS, whose last bit depends on where in memory ``x`` lies."""
        if x.dtype != torch.float32 or x.shape[-1] != WIDTH:
            raise TypeError(f"{self.name} takes float32[..., {WIDTH}]")
        return (x.unsqueeze(-1) * self.weight).sum(-2)

    def noise(self, item: StageItem, n: int = 1) -> Tensor:
        seed = torch.Generator().manual_seed(item.noise_seed(self.name))
        return torch.randn(n, WIDTH, generator=seed) / 4


class Context(_Toy):
    """A row of ``x`` is a block; the hidden state reads all there is of the session."""

    def state_specs(self) -> Mapping[str, StateSpec]:
        return {"kv": CONTEXT_KV, "mean": TensorSpec((WIDTH,)), "recent": RingSpec((WIDTH,), 3), "ticks": CounterSpec()}

    def outputs(self, item: StageItem) -> dict[str, Payload]:
        given = item.inputs["observation"].arrays
        rows = _tensor(given["x"]).reshape(-1, WIDTH)
        kv, mean = item.state.kv("kv"), item.state.tensor("mean")
        recent, ticks = item.state.ring("recent"), item.state.counter("ticks")
        if item.op is Op.RECONDITION:
            kv.drop_imagined()
        for row in rows:
            y = torch.tanh(self.mix(row) + 0.5 * mean.get())
            kv.append(y.expand(2, 2, CONTEXT_KV.block_size, 1, WIDTH))
            recent.push(y)
            mean.set(0.5 * mean.get() + 0.5 * y)
        ticks.set(ticks.get() + 1)
        executed = _tensor(given["executed"]).sum() if given["executed"].size else torch.zeros(())
        seen = kv.gather().contiguous().mean((0, 1, 2, 3)) + torch.stack(list(recent.items())).sum(0) + mean.get()
        hidden = torch.tanh(seen + self.noise(item)[0] + 0.1 * executed + 0.001 * (kv.total + ticks.get()))
        progress = {"progress": hidden[0].abs(), "done": hidden[1].abs()}
        return {
            "hidden": Payload(PayloadKind.HIDDEN, {"hidden": hidden}),
            "progress": Payload(PayloadKind.PROGRESS, progress),
        }


class Act(_Toy):
    """Stacks the hidden states of its batch, as a real head does: one of another shape fails for all of them."""

    kind, name = StageKind.ACT, "act"

    def state_specs(self) -> Mapping[str, StateSpec]:
        return {"last": TensorSpec((WIDTH,)), "ticks": CounterSpec()}

    def run(self, items: Sequence[StageItem]) -> Sequence[Outputs | Exception]:
        torch.stack([_tensor(item.inputs["hidden"].arrays["hidden"]) for item in items])
        return super().run(items)

    def outputs(self, item: StageItem) -> dict[str, Payload]:
        last, ticks = item.state.tensor("last"), item.state.counter("ticks")
        hidden = self.mix(_tensor(item.inputs["hidden"].arrays["hidden"])) + 0.3 * last.get()
        last.set(hidden)
        ticks.set(ticks.get() + 1)
        actions = torch.tanh(hidden[:DIM] + hidden[DIM:] + self.noise(item, HORIZON)[:, :DIM] + 0.01 * ticks.get())
        return {"actions": Payload(PayloadKind.ACTIONS, {"actions": actions.contiguous()}, {"revision": self.revision})}


@dataclass(slots=True)
class _Job:
    item: StageItem
    x: Tensor  # [n, WIDTH]
    left: int = 2
    company: int = 1

    @property
    def finished(self) -> bool:
        return self.left == 0


class Frames(_Toy):
    """A stage of two passes: sessions join between them."""

    kind, name = StageKind.FRAMES, "frames"

    def state_specs(self) -> Mapping[str, StateSpec]:
        return {"kv": FRAMES_KV, "recent": RingSpec((WIDTH,), 2), "frames": CounterSpec()}

    def begin(self, item: StageItem) -> _Job:
        n = int(item.params["frames"])
        if item.op is Op.RECONDITION:
            return _Job(item, _tensor(item.inputs["observation"].arrays["x"]).reshape(n, WIDTH))
        x = self.noise(item, n)
        if "actions" in item.inputs:
            x = x + 0.1 * _tensor(item.inputs["actions"].arrays["actions"]).sum(1, keepdim=True)
        if "last" in item.inputs:
            x = x + _tensor(item.inputs["last"].arrays["latents"])
        return _Job(item, x)

    def advance(self, jobs: Sequence[_Job]) -> Sequence[Exception | None]:
        for job in jobs:
            kv = job.item.state.kv("kv")
            past = kv.gather().contiguous().sum((0, 1, 2)).reshape(WIDTH) if kv.length else torch.zeros(WIDTH)
            job.x = torch.tanh(self.mix(job.x) + 0.1 * past)
            job.left -= 1
            job.company = max(job.company, len(jobs))
        return [None] * len(jobs)

    def finish(self, job: _Job) -> Outputs:
        item, real = job.item, job.item.op is Op.RECONDITION
        kv, recent, frames = item.state.kv("kv"), item.state.ring("recent"), item.state.counter("frames")
        if real:
            kv.drop_imagined()
        for row in job.x:
            kv.append(row.reshape(1, 1, 1, 2, 2).expand(1, 2, 1, 2, 2), imagined=not real)
            recent.push(row)
        frames.set(frames.get() + len(job.x))
        latents = (
            job.x + kv.gather().contiguous().mean() + torch.stack(list(recent.items())).sum() + 0.01 * frames.get()
        )
        made = {
            "latents": Payload(PayloadKind.LATENTS, {"latents": latents}),
            "last": Payload(PayloadKind.LATENTS, {"latents": torch.tanh(latents[-1])}),
        }
        return self.faults.spoil(self.name, item, made, job.company)

    def run(self, items: Sequence[StageItem]) -> Sequence[Outputs | Exception]:
        raise NotImplementedError("it is run in passes")


class Decode(_Toy):
    kind, name = StageKind.DECODE, "decode"

    def state_specs(self) -> Mapping[str, StateSpec]:
        return {}

    def outputs(self, item: StageItem) -> dict[str, Payload]:
        latents = torch.tanh(self.mix(_tensor(item.inputs["latents"].arrays["latents"])))
        pixels = (127.5 * (latents + 1)).to(torch.uint8).repeat(1, 3)
        return {"frames": Payload(PayloadKind.FRAMES, {"frames": pixels.reshape(-1, 2, 2, 3)})}


STAGES: dict[str, type[_Toy]] = {kind.name: kind for kind in (Context, Act, Frames, Decode)}


def _tensor(value: Any) -> Tensor:
    return value if isinstance(value, Tensor) else torch.tensor(value)
