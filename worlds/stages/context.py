"""The context stage: sees an observation (real or imagined), remembers it, judges progress.

Inputs: ``observation`` (real) or ``imagined`` (the frames stage's latents of the tick before, in a pipeline
that feeds them back). A real one drops what was imagined since the last real one. Outputs: ``kv`` (the present
tick's cache for the act head), ``scene`` (points and the agent's position before), ``latents`` (of the frame seen,
for the frames stage), ``progress``; where chunks are chosen from several, ``window`` (all of the cache).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from omni_loop.errors import InvalidInput, StateError
from omni_loop.messages import PayloadKind
from omni_loop.stage import KVSpec, Outputs, PagedKV, Payload, StageItem, StateSpec, one_by_one
from omni_loop.training.checkpoint import revision
from omni_loop.types import StageKind

from ..context import layout
from ..context.decode import read_instruction, read_tick
from ..context.perceive import INSTRUCTION, load_context
from ..scene import pose_points
from .shared import checkpoint, codec_of, encode, tensor_of, to_unit


@dataclass(frozen=True, slots=True)
class Sight:
    """One tick's senses in -1..1: latents ``[1, 16, c]``, ``points [9, 2]``, the agent's position before
    ``[2]`` and whether it is known, actions executed since the tick before ``[k, 2]``."""

    latents: Tensor
    points: Tensor
    agent_before: Tensor
    history: float
    executed: Tensor


class ContextStage:
    """See the module's text. Sessions' caches live in the paged pool; the instruction is the sink."""

    kind = StageKind.CONTEXT

    def __init__(self, checkpoints: str = "", device: str = "cpu") -> None:
        self.codec = codec_of(checkpoint("codec", checkpoints), device)
        folder = checkpoint("context", checkpoints)
        self.model = load_context(folder).to(device)
        self.revision = revision(folder)
        self.device = device

    def state_specs(self) -> Mapping[str, StateSpec]:
        c = self.model.config
        per_tick = layout.TICK // 16
        return {
            "kv": KVSpec(
                layers=c.num_hidden_layers,
                kv_heads=c.num_key_value_heads,
                head_dim=c.head_dim,
                block_size=16,
                window_blocks=c.window_ticks * per_tick,
                sink_blocks=layout.INSTRUCTION // 16,
                scratch_blocks=layout.INSTRUCTION // 16 + per_tick,
            )
        }

    def run(self, items: Sequence[StageItem]) -> Sequence[Outputs | Exception]:
        return one_by_one(self._tick, items)

    @torch.no_grad()
    def _tick(self, item: StageItem) -> Outputs:
        sight = self._sight(item)
        kv = item.state.kv("kv")
        if real := "observation" in item.inputs:
            kv.drop_imagined()
        past = self._past(kv, item.prompt)
        tokens = self.codec.tokens(self.codec.unpatchify(sight.latents))
        executed, known = layout.pick_executed(sight.executed)
        given = layout.given_tokens(tokens, sight.points[None], executed[None], torch.tensor([known]))
        reading = read_tick(self.model, past, given.to(self.device))
        kv.append(reading.kv[:, :, 0], imagined=not real)
        outputs = {
            "kv": Payload(PayloadKind.KV, {"kv": reading.kv[:, :, 0]}),
            "scene": Payload(
                PayloadKind.SCENE,
                {"points": sight.points, "agent_before": sight.agent_before},
                {"history": sight.history},
            ),
            "latents": Payload(PayloadKind.LATENTS, {"latents": sight.latents}),
            "progress": Payload(PayloadKind.PROGRESS, {"progress": reading.progress[0], "done": reading.done[0]}),
        }
        if "samples" in item.params:  # imagined outcomes will be read behind all of it
            outputs["window"] = Payload(PayloadKind.KV, {"kv": kv.gather()})
        return outputs

    def _past(self, kv: PagedKV, prompt: str) -> Tensor:
        """Cache ``[layers, 2, 1, s, g, e]``; a session's first tick reads the instruction."""
        if kv.total == 0:
            tokens = layout.instruction_tokens(prompt or INSTRUCTION).to(self.device)
            kv.append(read_instruction(self.model, tokens[None])[:, :, 0])
        return kv.gather().unsqueeze(2)

    def _sight(self, item: StageItem) -> Sight:
        if seen := item.inputs.get("observation"):
            return self._real(seen)
        if imagined := item.inputs.get("imagined"):
            return self._imagined(imagined)
        raise StateError("nothing to look at: this session has had no observation yet; call Infer first")

    def _real(self, payload: Payload) -> Sight:
        """The client measures the agent; the T is read from the frame unless its pose is given."""
        arrays = payload.arrays
        latents = encode(self.codec, arrays["image"][None])
        agent = to_unit(arrays["agent_pos"])  # [2, 2]: before, now
        if "block_pose" in arrays:
            keypoints = to_unit(pose_points(tensor_of(arrays["block_pose"]).float()))
        else:
            keypoints = self.codec.scene(self.codec.unpatchify(latents))[0, 1:]
        points = torch.cat([agent[1:], keypoints.cpu()])
        executed = to_unit(arrays["executed"]) if "executed" in arrays else torch.zeros(0, 2)
        return Sight(latents, points, agent[0], 1.0, executed)

    def _imagined(self, payload: Payload) -> Sight:
        """All is read from the last two imagined frames."""
        latents = torch.as_tensor(payload.arrays["latents"], device=self.device)  # [n, 16, c]
        if len(latents) == 0:
            raise InvalidInput("the tick before imagined no frames: nothing to look at")
        last = self.codec.scene(self.codec.unpatchify(latents[-2:])).cpu()
        executed = torch.as_tensor(payload.arrays["actions"], dtype=torch.float32).cpu()
        history = float(len(last) == 2)
        return Sight(latents[-1:], last[-1], last[0, 0], history, executed)

    def warm_up(self) -> None:
        tokens = layout.instruction_tokens(INSTRUCTION).to(self.device)
        past = read_instruction(self.model, tokens[None])
        image = torch.full((1, self.codec.config.frame_size, self.codec.config.frame_size, 3), 255, dtype=torch.uint8)
        z = self.codec.unpatchify(encode(self.codec, image))
        points = self.codec.scene(z)
        given = layout.given_tokens(self.codec.tokens(z), points, torch.zeros(1, 2, 2), torch.tensor([False]))
        read_tick(self.model, past, given)


#: Factory registered as ``context``.
context = ContextStage
