"""An act head fed with hidden states acts as one fed with the cache they make."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from omni_loop.errors import TensorError
from omni_loop.messages import PayloadKind
from omni_loop.stage import Payload
from omni_loop.testing.stage_driver import Ask, Driver
from omni_loop_policies.stages import ActStage
from omni_loop_worlds.context import layout
from omni_loop_worlds.context.llama import ContextModel
from omni_loop_worlds.context.perceive import load_context
from omni_loop_worlds.context.project import KVProjection


def entering(model: ContextModel, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """What enters each layer ``[layers, n, d]``, and the cache ``[layers, 2, n, g, e]``, of ``tokens int64[n]``."""
    seen: list[Tensor] = []
    hooks = [
        layer.input_layernorm.register_forward_pre_hook(lambda _, args: seen.append(args[0][0]))
        for layer in model.model.layers
    ]
    with torch.no_grad():
        _, kv = model(tokens[None], model.empty_cache())
    for hook in hooks:
        hook.remove()
    return torch.stack(seen), kv[:, :, 0]


def tokens() -> Tensor:
    return torch.randint(layout.VOCABULARY, (layout.TICK,), generator=torch.Generator().manual_seed(0))


def test_the_projection_makes_the_very_cache(small_checkpoints: Path) -> None:
    model = load_context(small_checkpoints / "context")
    for layer in model.model.layers:  # norms as saved are ones, and would hide a missing weight
        assert layer.input_layernorm.weight.shape == (model.config.hidden_size,)
    hidden, kv = entering(model, tokens())
    made = KVProjection(str(small_checkpoints))(hidden)
    assert made.shape == kv.shape
    assert kv.abs().mean() > 0.01
    assert (made - kv).abs().max() <= 1e-5


def test_the_shipped_checkpoint_too() -> None:
    from omni_loop_worlds.stages.shared import SHIPPED

    hidden, kv = entering(load_context(SHIPPED / "context"), tokens())
    assert (KVProjection()(hidden) - kv).abs().max() <= 1e-4 * kv.abs().max()


@pytest.mark.parametrize("shape", [(1, 32, 48), (2, 32, 47), (32, 48)])
def test_other_shapes_are_refused(small_checkpoints: Path, shape: tuple[int, ...]) -> None:
    with pytest.raises(TensorError, match="'hidden' has shape"):
        KVProjection(str(small_checkpoints))(torch.zeros(shape))


def test_chunks_from_hidden_states_equal_chunks_from_the_cache(small_checkpoints: Path) -> None:
    hidden, kv = entering(load_context(small_checkpoints / "context"), tokens())
    points = torch.rand(9, 2, generator=torch.Generator().manual_seed(1))
    scene = Payload(PayloadKind.SCENE, {"points": points, "agent_before": points[0]}, {"history": 1.0})
    driver, chunks = Driver(ActStage(checkpoints=str(small_checkpoints))), []
    payloads = {
        "kv": Payload(PayloadKind.KV, {"kv": kv}),
        "hidden": Payload(PayloadKind.HIDDEN, {"hidden": hidden}),
        "none": Payload(PayloadKind.KV, {"kv": torch.zeros_like(kv)}),
    }
    for name, payload in payloads.items():
        driver.open(name, seed=3)
        given = "kv" if name == "none" else name
        chunks.append(
            torch.as_tensor(driver.tick(name, 0, Ask({"scene": scene, given: payload}))["chunk"].arrays["actions"])
        )
    driver.close()
    assert (chunks[0] - chunks[1]).abs().max() <= 1e-3
    assert (chunks[0] - chunks[2]).abs().max() > 0.1  # pixels: the context does make a difference
