"""Random numbers by row: a session's do not depend on who else is in the batch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from omni_loop.errors import StageFailed
from omni_loop_policies.lerobot.chunks import averaged
from omni_loop_policies.lerobot.noise import Rows, generators, normal, seeded

DRAWS: dict[str, Callable[[int], Tensor]] = {
    "randn": lambda n: torch.randn(n, 3),
    "randn of a shape": lambda n: torch.randn((n, 3), dtype=torch.float64),
    "randn of a size": lambda n: torch.randn(size=(n, 2, 3), generator=None),
    "rand": lambda n: torch.rand(n, 4),
    "randn_like": lambda n: torch.randn_like(torch.zeros(n, 5)),
    "rand_like": lambda n: torch.rand_like(torch.zeros(n, 5, dtype=torch.float16)),
    "multinomial": lambda n: torch.multinomial(torch.ones(n, 50), 4),
    "several rows a session": lambda n: torch.multinomial(torch.ones(3 * n, 50), 2),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_a_sessions_rows_are_its_own(draw: Callable[[int], Tensor]) -> None:
    def drawn(*seeds: int) -> list[tuple[Tensor, ...]]:
        with Rows(seeds):
            twice = [draw(len(seeds)) for _ in range(2)]
        return [made.chunk(len(seeds)) for made in twice]

    together, alone, others = drawn(1, 2, 3), drawn(2), drawn(9, 2, 8)
    for at in range(2):
        assert (together[at][1] == alone[at][0]).all()
        assert (others[at][1] == alone[at][0]).all()
        assert (together[at][0] != together[at][1]).any()
        assert together[at][1].dtype == alone[at][0].dtype
    assert (alone[0][0] != alone[1][0]).any()


def test_noise_to_start_from_is_what_a_row_draws_first() -> None:
    with Rows([4, 5]):
        drawn = torch.randn(2, 6, 3)
    assert (normal(generators([4, 5]), (6, 3), "cpu") == drawn).all()


@pytest.mark.parametrize(
    "draw", [lambda: torch.randn(3, 2), lambda: torch.normal(0.0, 1.0, (2, 2)), lambda: torch.zeros(2).normal_()]
)
def test_what_cannot_be_drawn_by_session_is_refused(draw: Callable[[], Tensor]) -> None:
    with Rows([1, 2]), pytest.raises(StageFailed, match="draws"):
        draw()


def test_a_seeded_call_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(0)
    want = torch.randn(4)
    torch.manual_seed(0)
    with seeded(3, "cpu"):
        first = torch.randn(4)
    assert (torch.randn(4) == want).all()
    with seeded(3, "cpu"):
        assert (torch.randn(4) == first).all()


def test_chunks_are_averaged_where_they_meet() -> None:
    """By hand: chunks of three steps sent at steps 0, 2 and 3; the oldest weighs most."""
    chunks = torch.tensor([[0.0, 1, 2], [10, 11, 12], [20, 21, 22]])[..., None]
    got = averaged(chunks, torch.tensor([0, 2, 3]), 3, decay=0.5)
    w = torch.exp(torch.tensor([0.0, -0.5]))
    want = [(w[0] * 11 + w[1] * 20) / w.sum(), (w[0] * 12 + w[1] * 21) / w.sum(), 22]
    assert torch.allclose(got[:, 0], torch.tensor([float(x) for x in want]))
