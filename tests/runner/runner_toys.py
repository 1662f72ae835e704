"""A small torch stage that uses every type of state; a spawned runner imports it by name."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from omni_loop.errors import InvalidInput
from omni_loop.messages import PayloadKind, Scalar
from omni_loop.stage import CounterSpec, KVSpec, Outputs, Payload, RingSpec, StageItem, StateSpec, TensorSpec
from omni_loop.types import StageKind

KV = KVSpec(layers=2, kv_heads=1, head_dim=4, block_size=2, window_blocks=3, sink_blocks=1, scratch_blocks=4)


class Toy:
    """``x float32[4]`` in; ``y float32[4]`` out, which depends on all the session's state and on the noise seed.

    The parameter ``mode`` makes it fail after it has written to every state.
    """

    kind = StageKind.CONTEXT
    revision = "toy-1"

    def __init__(self, gain: float = 1.0, crash: bool = False) -> None:
        if crash:
            os._exit(3)
        generator = torch.Generator().manual_seed(0)
        self.weight = gain * torch.randn(4, 4, generator=generator)
        self.warm = False

    def state_specs(self) -> Mapping[str, StateSpec]:
        return {
            "kv": KV,
            "mean": TensorSpec((4,)),
            "recent": RingSpec((4,), capacity=2),
            "ticks": CounterSpec(),
        }

    def warm_up(self) -> None:
        torch.zeros(4) @ self.weight
        self.warm = True

    def run(self, items: Sequence[StageItem]) -> Sequence[Outputs | Exception]:
        assert self.warm
        return [self._one(item) for item in items]

    def _one(self, item: StageItem) -> Outputs | Exception:
        state, mode = item.state, item.params.get("mode", "")
        given = item.inputs["observation"].arrays
        x = torch.as_tensor(given["x"] if "x" in given else given["y"])  # y: what another toy gave
        y = x @ self.weight
        kv, mean, recent, ticks = state.kv("kv"), state.tensor("mean"), state.ring("recent"), state.counter("ticks")
        if item.params.get("rewind"):
            kv.drop_imagined()
        blocks = int(item.params.get("blocks", 1))
        kv.append(y.expand(2, 2, 2 * blocks, 1, 4), imagined=bool(item.params.get("imagined", False)))
        mean.set(0.5 * mean.get() + 0.5 * y)
        recent.push(x)
        ticks.set(ticks.get() + 1)
        if mode == "raise":
            raise RuntimeError("a secret of /home/somebody")
        if mode == "item":
            return ValueError("another secret")
        if mode == "typed":
            raise InvalidInput("x is not to my taste")
        if mode == "exit":
            raise SystemExit(7)
        if mode == "nan_state":
            mean.set(y * float("nan"))
        if mode == "sleep":
            time.sleep(60)
        if mode == "die":
            os._exit(9)
        seed = torch.Generator().manual_seed(item.noise_seed("toy"))
        out = y + kv.gather().sum((0, 1, 2, 3)) + mean.get() + sum(recent.items()) + torch.randn(4, generator=seed)
        if mode == "nan":
            out[1] = float("nan")
        facts: dict[str, Scalar] = {"ticks": ticks.get(), "total": kv.total, "length": kv.length, "prompt": item.prompt}
        return {
            "y": Payload(PayloadKind.HIDDEN, {"y": out}, facts),
            "kv": Payload(PayloadKind.KV, {"kv": kv.gather()}),
        }


def toy(gain: float = 1.0, crash: bool = False) -> Toy:
    return Toy(gain, crash)


def no_stage() -> object:
    return object()


class Holder(Toy):
    """Holds a process of its own, and writes down that it gave it back."""

    def __init__(self, note: str, fails: bool = False) -> None:
        super().__init__()
        self.note, self.fails = Path(note), fails
        self.held = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,))
        self.held.start()

    def warm_up(self) -> None:
        super().warm_up()
        if self.fails:
            raise RuntimeError("it cannot warm up")

    def close(self) -> None:
        self.held.kill()
        self.held.join()
        with self.note.open("a") as file:
            file.write(f"closed {self.held.exitcode}\n")
