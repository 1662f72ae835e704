"""The frames stage: observes real frames, predicts the next ones under given actions.

A frame is one block of the pool: OBSERVED when it was real, IMAGINED when it was predicted. Observing drops
every block from its first step on. For that the blocks of ``max_predict`` more frames are kept than the model
looks at: what follows is as if nothing had been imagined.

Inputs: ``actions`` (the client's, or the act head's chunk), ``observation`` (real frames to recondition on) or
``latents`` (of the frame the context stage saw). Output: ``latents [n, 16, c]`` of the predicted frames with
the ``actions [n, 2]`` that lead to them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from omni_loop.errors import InvalidInput, Reason, StateError, TensorError
from omni_loop.messages import PayloadKind
from omni_loop.stage import (
    CounterSpec,
    KVSpec,
    Outputs,
    Payload,
    RingSpec,
    StageItem,
    StateSpec,
    StateView,
    one_by_one,
)
from omni_loop.training.checkpoint import load_config, load_weights, revision
from omni_loop.types import Op, StageKind

from ..dit import DiT, DiTConfig, denoise
from .shared import checkpoint, codec_of, encode, to_unit


class FramesStage:
    """See the module's text. ``max_predict`` bounds the frames of one tick, and with it its scratch."""

    kind = StageKind.FRAMES

    def __init__(
        self, checkpoints: str = "", device: str = "cpu", max_predict: int = 16, denoise_steps: int = 0
    ) -> None:
        folder = checkpoint("world", checkpoints)
        config = load_config(folder, DiTConfig)
        self.model = DiT(config)
        load_weights(folder, self.model)
        self.model.to(device)
        self.codec = codec_of(checkpoint("codec", checkpoints), device)
        self.steps = denoise_steps or config.denoise_steps
        self.max_predict, self.device, self.revision = max_predict, device, revision(folder)

    def state_specs(self) -> Mapping[str, StateSpec]:
        c = self.model.config
        held = c.window - 1 + self.max_predict
        return {
            "kv": KVSpec(
                layers=c.layers,
                kv_heads=c.heads,
                head_dim=c.head_dim,
                block_size=c.tokens,
                window_blocks=held,
                scratch_blocks=self.max_predict + 1,
            ),
            # Latents of the same frames: the residual's base, also after a step back.
            "recent": RingSpec((c.tokens, c.token_dim), capacity=held),
            "origin": CounterSpec(),  # control step of the first frame
        }

    def run(self, items: Sequence[StageItem]) -> Sequence[Outputs | Exception]:
        return one_by_one(self._tick, items)

    @torch.no_grad()
    def _tick(self, item: StageItem) -> Outputs:
        if item.op is Op.RECONDITION and "observation" in item.inputs:
            return self._recondition(item)
        if "latents" in item.inputs and item.op is not Op.PREDICT:
            # A lone real frame every few steps: what came before does not lead to it frame by frame.
            self._restart(item.state, item.step)
            seen = torch.as_tensor(item.inputs["latents"].arrays["latents"], device=self.device)
            self._append(item.state, seen[None], None, imagined=False)
        return self._predict(item)

    def _recondition(self, item: StageItem) -> Outputs:
        arrays = item.inputs["observation"].arrays
        first, n = int(item.params.get("first_step", item.step)), len(arrays["image"])
        if not 0 < n <= self.max_predict + 1:
            raise InvalidInput(f"{n} frames at once, between 1 and {self.max_predict + 1} can be observed")
        executed = self._actions("executed", arrays.get("executed", torch.zeros(0, self.model.config.action_dim)))
        fresh = self._rewind(item.state, first)
        expected = n - 1 if fresh else n
        if len(executed) != expected:
            raise InvalidInput(
                f"{n} frames from step {first} need {expected} executed actions (action t leads from frame t "
                f"to t + 1), got {len(executed)}"
            )
        frames = encode(self.codec, arrays["image"])  # [n, 16, c]
        for i, latents in enumerate(frames):
            lead = i - 1 if fresh else i
            action = executed[lead][None, None] if lead >= 0 else None
            self._append(item.state, latents[None, None], action, imagined=False)
        return {
            "latents": Payload(PayloadKind.LATENTS, {"latents": frames, "actions": executed}, {"first_step": first})
        }

    def _rewind(self, state: StateView, first: int) -> bool:
        """Make ``first`` the next step to be observed; whether it is the first frame of all."""
        kv, ring, c = state.kv("kv"), state.ring("recent"), self.model.config
        origin, held = state.counter("origin").get(), list(ring.items())
        present = origin + kv.total // c.tokens
        if not held or first <= origin:
            self._restart(state, first)
            return True
        if first > present:
            raise StateError(
                f"step {first} does not follow: the session holds frames up to step {present - 1}",
                reason=Reason.BAD_REQUEST,
            )
        oldest = present - len(held)
        if first - oldest < min(c.window - 1, first - origin):
            raise StateError(
                f"step {first} lies too far back: frames can be replaced from step {oldest + c.window - 1} on, or all "
                f"of them from step {origin}",
                reason=Reason.BAD_REQUEST,
            )
        if first < present:
            kv.truncate((first - origin) * c.tokens)
            ring.clear()
            for latents in held[: first - oldest]:
                ring.push(latents)
        return False

    def _restart(self, state: StateView, first: int) -> None:
        state.kv("kv").truncate(0)
        state.ring("recent").clear()
        state.counter("origin").set(first)

    def _actions(self, name: str, px: Any) -> Tensor:
        """Actions ``[n, a]`` in -1..1."""
        actions, width = to_unit(px), self.model.config.action_dim
        if actions.ndim != 2 or actions.shape[1] != width:
            raise TensorError(f"{name!r} has shape {list(actions.shape)}, expected [n, {width}]")
        return actions.to(self.device)

    def _predict(self, item: StageItem) -> Outputs:
        if "actions" not in item.inputs:
            raise InvalidInput("predict needs the 'actions' to predict under: float32[n, 2]")
        actions = self._actions("actions", item.inputs["actions"].arrays["actions"])
        count = int(item.params.get("frames", 0) or item.params.get("steps", 0)) or len(actions)
        if not 0 < count <= min(len(actions), self.max_predict):
            raise InvalidInput(
                f"{count} frames asked for, between 1 and {min(len(actions), self.max_predict)} can be predicted"
            )
        if not item.state.ring("recent").items():
            raise StateError("no frame to predict from: send one with Recondition (or Infer) first")
        generator = torch.Generator().manual_seed(item.noise_seed("frames"))
        latents = torch.cat([self._next(item.state, action[None, None], generator) for action in actions[:count]])
        meta = {"first_step": item.step + 1}
        return {"latents": Payload(PayloadKind.LATENTS, {"latents": latents, "actions": actions[:count]}, meta)}

    def _next(self, state: StateView, action: Tensor, generator: torch.Generator) -> Tensor:
        """Denoise one frame against the committed blocks, then write its own block: ``[1, 16, c]``."""
        prev = torch.as_tensor(state.ring("recent").items()[-1], device=self.device)[None, None]
        context = self._context(state)
        noise = torch.randn(prev.shape, generator=generator).to(self.device)
        known = torch.ones(1, 1, dtype=torch.bool, device=self.device)
        latents = denoise(self.model, prev, action, known, context, noise, self.steps)
        self._append(state, latents, action, imagined=True, context=context)
        return latents[0]

    def _context(self, state: StateView) -> Tensor:
        c = self.model.config
        kv = state.kv("kv").gather()  # holds more than the model looks at: see the module's text
        return self.model.roped_context(kv[:, :, max(0, kv.shape[2] - (c.window - 1) * c.tokens) :].unsqueeze(2))

    def _append(
        self, state: StateView, latents: Tensor, action: Tensor | None, imagined: bool, context: Tensor | None = None
    ) -> None:
        """The clean pass of ``latents [1, 1, 16, c]``: its keys and values become the next block."""
        ring = state.ring("recent")
        held = ring.items()
        prev = torch.as_tensor(held[-1], device=self.device)[None, None] if held else latents
        known = torch.tensor([[action is not None]], device=self.device)
        led = torch.zeros(1, 1, 2, device=self.device) if action is None else action.to(self.device)
        context = self._context(state) if context is None else context
        level = torch.zeros(1, 1, device=self.device)
        _, kv = self.model.frame(latents, prev, level, led, known, context)
        state.kv("kv").append(kv[:, :, 0], imagined=imagined)
        ring.push(latents[0, 0])

    def warm_up(self) -> None:
        c = self.model.config
        z = torch.zeros(1, 1, c.tokens, c.token_dim, device=self.device)
        context = torch.zeros(c.layers, 2, 1, c.heads, 0, c.head_dim, device=self.device)
        action, known = torch.zeros(1, 1, c.action_dim, device=self.device), torch.ones(1, 1, dtype=torch.bool)
        denoise(self.model, z, action, known.to(self.device), context, z, self.steps)


#: Factory registered as ``frames``.
frames = FramesStage
