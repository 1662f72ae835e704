"""Cosmos under actions: the published layers, and which frame answers to which action."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from omni_loop.errors import InvalidInput
from omni_loop.stage import Stage
from omni_loop.testing.stage_driver import Driver

from . import tiny

pytest.importorskip("transformers")
pytest.importorskip("torchvision")


@pytest.fixture
def apart(stages: dict[str, Stage]) -> Iterator[Driver]:
    """A stage whose frames do not attend to each other, so that it shows where an action enters."""
    stage: Any = stages["action-quick"]
    weights = [block.attn1.to_out[0].weight for block in stage.pipe.transformer.transformer_blocks]
    kept = [w.clone() for w in weights]
    for w in weights:
        w.zero_()
    driver = Driver(stage)
    yield driver
    driver.close()
    for w, old in zip(weights, kept, strict=True):
        w.copy_(old)


def rollout(driver: Driver, session: str, images: NDArray[np.uint8], actions: NDArray[np.float32]) -> Any:
    """Two predictions of eight frames each."""
    driver.open(session, seed=5)
    driver.tick(session, 0, tiny.see(0, images[:1], 3))
    made = [tiny.frames(driver.tick(session, 1 + i, tiny.ahead(8 * i, actions[8 * i : 8 * i + 8]))) for i in range(2)]
    return np.concatenate(made)


@pytest.mark.parametrize("at", [0, 3, 4, 7, 8, 15])
def test_an_impulse_answers_in_its_latent_frame(apart: Driver, images: NDArray[np.uint8], at: int) -> None:
    """Action i leads to frame i. A latent frame stands for four, so its first may answer too; none before it does."""
    actions = np.zeros((16, 3), np.float32)
    still = rollout(apart, "still", images, actions)
    actions[at] = 40.0  # random weights answer faintly
    pushed = rollout(apart, "pushed", images, actions)
    assert (pushed[: at // 4 * 4] == still[: at // 4 * 4]).all()
    assert (pushed[at] != still[at]).any()


def test_the_layers_compute_what_was_published() -> None:
    """Against the arithmetic of ActionChunkConditionedMinimalV1LVGDiT, written out."""
    model = tiny.action_transformer().eval()
    names = {name for name in model.state_dict() if name.startswith("action_embedder")}
    assert names == {
        f"action_embedder_{part}.fc{i}.{kind}"
        for part in ("B_D", "B_3D")
        for i in (1, 2)
        for kind in ("weight", "bias")
    }
    action, mask = torch.randn(2, 8, 3), torch.zeros(2, 1, 3, 4, 8)
    mask[:, :, 0] = 1
    time = torch.rand(2, 1, 3, 1, 1)
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    hook = model.time_embed.register_forward_hook(lambda *args: seen.append(args[2]))
    with torch.no_grad():
        model(
            hidden_states=torch.randn(2, 4, 3, 4, 8),
            timestep=time,
            encoder_hidden_states=torch.randn(2, 5, 32),
            condition_mask=mask,
            padding_mask=torch.zeros(1, 1, 16, 32),
            action=action,
        )
        hook.remove()
        state = model.state_dict()
        added = []
        for part in ("B_D", "B_3D"):
            w = {k: state[f"action_embedder_{part}.{k}"] for k in ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias")}
            hidden = F.gelu(action.reshape(2, 2, 12) @ w["fc1.weight"].T + w["fc1.bias"], approximate="tanh")
            embedded = hidden @ w["fc2.weight"].T + w["fc2.bias"]
            added.append(torch.cat([torch.zeros_like(embedded[:, :1]), embedded], 1).flatten(0, 1))
        waves = model.time_embed.time_proj(time.flatten())
        modulation = model.time_embed.t_embedder(waves) + added[1]
        normed = model.time_embed.norm(waves + added[0])
    assert torch.allclose(seen[0][0], modulation, atol=1e-5)
    assert torch.allclose(seen[0][1], normed, atol=1e-5)
    assert added[0].abs().max() > 0.01
    assert model.time_embed.offsets is None  # nothing of a call outlives it


@pytest.mark.parametrize("driver", ["action-quick"], indirect=True)
def test_half_a_latent_frame_of_actions_is_refused(driver: Driver, images: NDArray[np.uint8]) -> None:
    driver.tick("s", 0, tiny.see(0, images[:1], 3))
    with pytest.raises(InvalidInput, match="multiple of 4"):
        driver.run("s", 1, tiny.ahead(0, np.zeros((6, 3), np.float32)))
