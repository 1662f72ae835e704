"""The flow-matching head: what it is conditioned on, and that an absent context is no context."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from omni_loop_policies.flow import ActConfig, ActHead, features_of
from omni_loop_policies.stages import act


@pytest.fixture
def head(small_checkpoints: Path) -> ActHead:
    return act(checkpoints=str(small_checkpoints)).model


@pytest.fixture
def given(head: ActHead) -> dict[str, Tensor]:
    c, g = head.config, torch.Generator().manual_seed(0)
    kv = (4, c.context_layers, 2, c.context_tokens, c.context_kv_heads, c.context_head_dim)
    return {
        "noise": torch.randn(4, c.horizon, c.action_dim, generator=g),
        "features": torch.rand(4, c.features, generator=g) * 2 - 1,
        "history": torch.tensor([1.0, 0.0, 1.0, 1.0]),
        "kv": torch.randn(kv, generator=g),
        "present": torch.ones(4),
    }


def test_a_context_that_is_dropped_is_a_context_that_is_not_there(head: ActHead, given: dict[str, Tensor]) -> None:
    absent = {**given, "present": torch.zeros(4)}
    want = head.sample(**absent)
    assert torch.equal(head.sample(**{**absent, "kv": torch.zeros_like(given["kv"])}), want)
    assert torch.equal(head.sample(**{**absent, "kv": given["kv"].flip(0) * 9}), want)
    assert (head.sample(**given) - want).abs().max() > 1e-4
    mixed = {**given, "present": torch.tensor([1.0, 0.0, 1.0, 0.0])}
    both, rows = head.sample(**mixed), [1, 3]
    assert torch.allclose(both[rows], want[rows], atol=1e-5)


def test_rows_of_a_batch_do_not_touch(head: ActHead, given: dict[str, Tensor]) -> None:
    together = head.sample(**given)
    alone = torch.cat([head.sample(**{k: v[i : i + 1] for k, v in given.items()}) for i in range(4)])
    assert (together - alone).abs().max() <= 1e-5


def test_blocks_read_the_last_layers_of_the_context() -> None:
    head = ActHead(ActConfig(width=16, condition=16, blocks=2, query_heads=2, context_layers=3, context_head_dim=8))
    for p in head.parameters():
        torch.nn.init.normal_(p, std=0.3)
    c = head.config
    x, t, f, one = torch.randn(1, c.horizon, 2), torch.rand(1), torch.randn(1, c.features), torch.ones(1)
    kv = torch.randn(1, 3, 2, c.context_tokens, c.context_kv_heads, 8, requires_grad=True)
    head.velocity(x, t, f, one, kv, one).square().sum().backward()
    assert kv.grad is not None
    read = [bool(kv.grad[0, i].any()) for i in range(3)]
    assert read == [False, True, True]


def test_before_training_the_head_follows_no_path(given: dict[str, Tensor], head: ActHead) -> None:
    fresh = ActHead(head.config)
    assert not fresh.velocity(given["noise"], torch.rand(4), *list(given.values())[1:]).any()


def test_a_sample_is_the_end_of_euler_steps_along_the_velocity(head: ActHead, given: dict[str, Tensor]) -> None:
    """What does not change over the steps is computed once; the result is that of the plain loop."""
    noise, given_rest, n = given["noise"], list(given.values())[1:], head.config.steps
    x = noise * head.config.temperature
    with torch.no_grad():
        for i in range(n):
            x = x + head.velocity(x, torch.full((len(x),), i / n), *given_rest) / n
    want = x * head.config.scale + given["features"][:, None, 2:4]
    assert (head.sample(**given) - want).abs().max() <= 1e-5
    assert (want - noise).abs().max() > 1e-2


def test_a_straight_path_ends_where_it_leads(
    head: ActHead, given: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Euler steps are exact on ``x_t = (1 - t) noise + t actions``; the agent's position and the scale come after."""
    goal = torch.randn(given["noise"].shape)
    straight = (goal - given["noise"] * head.config.temperature).flatten(1)
    monkeypatch.setattr(head, "_flow", lambda *_: straight)
    want = goal * head.config.scale + given["features"][:, None, 2:4]
    assert torch.allclose(head.sample(**given), want, atol=1e-5)


def test_features() -> None:
    before, agent, points = torch.tensor([[0.1, 0.2]]), torch.tensor([[0.3, 0.1]]), torch.rand(1, 8, 2)
    known = features_of(before, agent, points, torch.ones(1))
    assert known.shape == (1, ActConfig().features)
    assert torch.allclose(known[0, :2], torch.tensor([1.6, -0.8]))
    assert torch.equal(known[0, 2:4], agent[0])
    assert torch.equal(known[0, 4:], points.flatten())
    unknown = features_of(before, agent, points, torch.zeros(1))
    assert not unknown[0, :2].any()
    assert torch.equal(unknown[0, 2:], known[0, 2:])
