"""The act stage: an action chunk from the scene and the context's cache of the present tick."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from omni_loop.messages import PayloadKind
from omni_loop.stage import Outputs, Payload, StageItem, StateSpec, one_by_one
from omni_loop.training.checkpoint import load_config, load_weights, revision
from omni_loop.types import StageKind

from .flow import ActConfig, ActHead, features_of

SHIPPED = Path(__file__).parent / "checkpoints"
TABLE_HALF = 256.0  # px of the table per unit of -1..1


class ActStage:
    """Inputs ``scene`` (``points [9, 2]``, ``agent_before [2]``) and ``kv [layers, 2, s, g, e]``; output
    ``chunk``: ``actions float32[horizon, 2]`` in table pixels, clipped to the table. Keeps no state: its
    noise is a function of session seed, epoch and tick.

    ``use_context`` and ``use_history`` switch parts off for ablations; ``temperature`` (0: the model's own) scales
    the noise a chunk starts from.
    """

    kind = StageKind.ACT

    def __init__(
        self,
        checkpoints: str = "",
        device: str = "cpu",
        use_context: bool = True,
        use_history: bool = True,
        temperature: float = 0.0,
    ) -> None:
        folder = (Path(checkpoints) if checkpoints else SHIPPED) / "act"
        config = load_config(folder, ActConfig)
        self.model = ActHead(config.model_copy(update={"temperature": temperature}) if temperature else config)
        load_weights(folder, self.model)
        self.model.to(device)
        self.revision = revision(folder)
        self.device, self.use_context, self.use_history = device, use_context, use_history

    def state_specs(self) -> Mapping[str, StateSpec]:
        return {}

    def run(self, items: Sequence[StageItem]) -> Sequence[Outputs | Exception]:
        return one_by_one(self._act, items)

    def _act(self, item: StageItem) -> Outputs:
        c, scene = self.model.config, item.inputs["scene"]
        points = torch.as_tensor(scene.arrays["points"], device=self.device)
        before = torch.as_tensor(scene.arrays["agent_before"], device=self.device)
        kv = torch.as_tensor(item.inputs["kv"].arrays["kv"], device=self.device)[None]
        history = torch.tensor([float(scene.meta["history"]) * self.use_history], device=self.device)
        present = torch.tensor([float(self.use_context)], device=self.device)
        generator = torch.Generator().manual_seed(item.noise_seed("act"))
        noise = torch.randn(1, c.horizon, c.action_dim, generator=generator).to(self.device)
        features = features_of(before[None], points[None, 0], points[None, 1:], history)
        chunk = self.model.sample(noise, features, history, kv, present)[0]
        actions = ((chunk + 1) * TABLE_HALF).clamp(0, 2 * TABLE_HALF).float().cpu()
        return {"chunk": Payload(PayloadKind.ACTIONS, {"actions": actions}, {"revision": self.revision})}

    def warm_up(self) -> None:
        c = self.model.config
        kv = torch.zeros(1, c.context_layers, 2, c.context_tokens, c.context_kv_heads, c.context_head_dim)
        one = torch.ones(1, device=self.device)
        noise = torch.zeros(1, c.horizon, c.action_dim, device=self.device)
        self.model.sample(noise, torch.zeros(1, c.features, device=self.device), one, kv.to(self.device), one)


#: Factory registered as ``act``.
act = ActStage
