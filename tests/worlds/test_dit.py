"""The DiT's ways of computing one thing agree: streams with and without a mask, attention with and without."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from omni_loop_worlds.dit import (
    DiT,
    DiTConfig,
    attend,
    attend_streams,
    band_mask,
    denoise,
    noise_levels,
    rotate,
    two_stream_mask,
)
from omni_loop_worlds.stages import frames


@pytest.fixture
def model(small_checkpoints: Path) -> DiT:
    return frames(checkpoints=str(small_checkpoints)).model


@pytest.mark.parametrize(("n", "window"), [(1, 3), (2, 4), (4, 4), (7, 3), (5, 2), (6, 6)])
def test_attention_over_streams_is_attention_under_the_two_stream_mask(n: int, window: int) -> None:
    g = torch.Generator().manual_seed(n)
    q, k, v = torch.randn(3, 2, 3, 2 * n * 4, 8, generator=g)
    want = attend(q, k, v, two_stream_mask(n, 4, window))
    assert (attend_streams(q, k, v, n, window) - want).abs().max() <= 1e-5


def test_the_masks_say_who_sees_whom() -> None:
    band = band_mask(4, 2, 3)[::2, ::2].int().tolist()
    assert band == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [0, 1, 1, 1]]
    both = two_stream_mask(3, 2, 2)[::2, ::2].int().tolist()
    clean = [[1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0], [0, 1, 1, 0, 0, 0]]
    noisy = [[0, 0, 0, 1, 0, 0], [1, 0, 0, 0, 1, 0], [0, 1, 0, 0, 0, 1]]
    assert both == [*clean, *noisy]


@torch.no_grad()
def test_training_and_recompute_are_one_function(model: DiT) -> None:
    """The clean stream of a training pass is what the banded recompute gives, and so is its noisy stream."""
    c, n, g = model.config, 6, torch.Generator().manual_seed(0)
    x = torch.randn(2, 2 * n, c.tokens, c.token_dim, generator=g)
    prev, action = torch.randn(x.shape, generator=g), torch.randn(2, 2 * n, 2, generator=g)
    level, known = torch.rand(2, 2 * n, generator=g), torch.rand(2, 2 * n, generator=g) > 0.3
    position = torch.cat([torch.arange(n)] * 2)
    trained = model.streams(x, prev, level, action, known, position)
    masked = model.streams(x, prev, level, action, known, position, two_stream_mask(n, c.tokens, c.window))
    assert (trained - masked).abs().max() <= 1e-5
    clean = [t[:, :n] for t in (x, prev, level, action, known)]
    alone = model.streams(*clean, torch.arange(n), band_mask(n, c.tokens, c.window))
    assert (trained[:, :n] - alone).abs().max() <= 1e-5


def test_rotation_keeps_lengths_and_only_distances_count() -> None:
    model, g = DiT(DiTConfig(width=32, heads=2, layers=1, tokens=1)), torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 1, 16, generator=g)
    at = lambda x, p: rotate(x, model.rope(torch.tensor([p])))  # noqa: E731
    assert torch.allclose(at(a, 9).norm(), a.norm(), atol=1e-5)
    near, far = (at(a, 3) * at(b, 1)).sum(), (at(a, 43) * at(b, 41)).sum()
    assert abs(near - far) <= 1e-4
    assert abs(near - (at(a, 4) * at(b, 1)).sum()) > 1e-3


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_levels_fall_from_one_to_nothing(steps: int) -> None:
    levels = noise_levels(steps)
    assert (levels[0], levels[-1], len(levels)) == (1.0, 0.0, steps + 1)
    assert levels == sorted(levels, reverse=True)


def test_one_step_ends_at_the_clean_guess(model: DiT) -> None:
    c, g = model.config, torch.Generator().manual_seed(0)
    prev, noise = torch.randn(2, 1, 1, c.tokens, c.token_dim, generator=g)
    action, known = torch.ones(1, 1, 2), torch.ones(1, 1, dtype=torch.bool)
    context = model.roped_context(torch.zeros(c.layers, 2, 1, 0, c.heads, c.head_dim))
    guess = prev + model.frame(noise, prev, torch.ones(1, 1), action, known, context)[0]
    assert torch.equal(denoise(model, prev, action, known, context, noise, 1), guess)


@pytest.mark.parametrize("held", [0, 2, 3])
@pytest.mark.parametrize("rows", [(0, 1, 2), (1,), (0, 2)])
@torch.no_grad()
def test_a_frame_and_the_one_ahead_share_a_pass(model: DiT, held: int, rows: Sequence[int]) -> None:
    """As in two passes with the frame kept in between, from filling windows to full ones whose oldest frames stand in
    different places."""
    c, g, b = model.config, torch.Generator().manual_seed(held), 3
    one = model.roped_context(torch.randn(c.layers, 2, b, held * c.tokens, c.heads, c.head_dim, generator=g))
    if held == c.window - 1:
        one.keep([1, 2])
        one.keep([2])
    two = replace(one, room=one.room.clone(), position=list(one.position))
    n, ahead = b + len(rows), slice(b, None)
    x, prev = torch.randn(2, n, 1, c.tokens, c.token_dim, generator=g)
    level, action = torch.rand(n, 1, generator=g), torch.randn(n, 1, 2, generator=g)
    known = torch.rand(n, 1, generator=g) > 0.3
    inputs = (x, prev, level, action, known)
    for _ in range(2 if len(rows) == b else 1):  # twice: the first leaves all behind as it should be
        got, fresh = model.frame(*inputs, one, rows)
        want, kv = model.frame(*(t[:b] for t in inputs), two)
        two.keep(rows)
        alone = two if len(rows) == b else replace(two, room=two.room[:, :, list(rows)].clone())
        alone.position, alone.turn = [two.position[row] for row in rows], None
        later, its = model.frame(*(t[ahead] for t in inputs), alone)
        assert (got - torch.cat([want, later])).abs().max() <= 1e-5 * got.abs().max()
        assert (fresh - torch.cat([kv, its], 2)).abs().max() <= 1e-5 * fresh.abs().max()
    assert later.abs().max() > 0.1  # the weights do something
    assert [one.position[row] for row in rows] == alone.position
    left, want = one.room[:, :, list(rows), : alone.seen.shape[3]], alone.seen
    assert (left - want).abs().max() <= 1e-5 * want.abs().max()
