"""How a session reads as tokens."""

from __future__ import annotations

import pytest
import torch

from omni_loop_worlds.context import layout as L


def test_ranges_of_tokens_follow_each_other() -> None:
    marks = {L.PAD, L.BEGIN, L.TICK_MARK, L.NONE, L.QUERY}
    ranges = [marks, range(L.BYTES, L.BYTES + 256), range(L.FRAME, L.FRAME + L.FRAME_CODES),
              range(L.PLACE, L.PLACE + L.PLACES), range(L.PROGRESS, L.PROGRESS + L.PROGRESS_BINS),
              [L.DONE_NO, L.DONE_YES]]  # fmt: skip
    tokens = [t for part in ranges for t in part]
    assert len(tokens) == len(set(tokens))
    assert max(tokens) == L.VOCABULARY - 1
    assert L.VOCABULARY <= 2048


def test_places_inside_a_tick_fill_it() -> None:
    tick = list(range(L.TICK))
    parts = [tick[L.FRAME_AT], [16], tick[L.POINTS_AT], tick[L.ACTIONS_AT], [L.QUERY_AT, L.PROGRESS_AT, L.DONE_AT]]
    assert [i for part in parts for i in part] == tick
    assert L.TICK % 16 == L.INSTRUCTION % 16 == 0


@pytest.mark.parametrize(
    "text", ["", "x", "push the T onto the goal", "schieb das T ans Ziel, größer", "把T推到目标上", "\0🙂"]
)
def test_an_instruction_is_its_bytes(text: str) -> None:
    tokens = L.instruction_tokens(text)
    assert tokens.shape == (L.INSTRUCTION,)
    assert tokens.dtype == torch.int64
    assert tokens[0] == L.BEGIN
    rest = [t for t in tokens[1:].tolist() if t != L.PAD]
    assert all(L.BYTES <= t < L.BYTES + 256 for t in rest)
    assert bytes(t - L.BYTES for t in rest) == text.encode()[: L.INSTRUCTION - 1]


def test_a_long_instruction_keeps_its_first_bytes() -> None:
    text = "ü" * 3000
    assert torch.equal(L.instruction_tokens(text), L.instruction_tokens(text[:16]))
    assert (L.instruction_tokens(text) != L.PAD).all()
    assert not torch.equal(L.instruction_tokens("a"), L.instruction_tokens("b"))


def test_places_are_bins_of_a_pixel_and_the_border_takes_the_rest() -> None:
    px = torch.tensor([0.0, 0.5, 1.0, 255.9, 511.9, 512.0, -50.0, 9000.0])
    assert (L.place_tokens(px / 256 - 1) - L.PLACE).tolist() == [0, 0, 1, 255, 511, 511, 0, 511]


def test_progress_goes_there_and_back() -> None:
    coverage = torch.linspace(0, 1, 200)
    tokens = L.progress_tokens(coverage)
    assert tokens.min() == L.PROGRESS
    assert tokens.max() == L.PROGRESS + L.PROGRESS_BINS - 1
    logits = torch.full((200, L.VOCABULARY), -1e9).scatter(1, tokens[:, None], 0.0)
    assert (L.progress_values(logits) - coverage).abs().max() <= 0.5 / (L.PROGRESS_BINS - 1) + 1e-6
    assert L.progress_tokens(torch.tensor([-1.0, 2.0])).tolist() == [L.PROGRESS, L.PROGRESS + L.PROGRESS_BINS - 1]


def test_done_is_yes_against_no_alone() -> None:
    logits = torch.randn(3, L.VOCABULARY, generator=torch.Generator().manual_seed(0))
    odds = (logits[:, L.DONE_YES] - logits[:, L.DONE_NO]).sigmoid()
    assert torch.allclose(L.done_probability(logits), odds, atol=1e-6)
    assert (L.done_probability(logits, bias=0.5) < odds).all()


def test_given_tokens_stand_where_the_layout_says() -> None:
    frame, points = torch.arange(32).view(2, 16), torch.linspace(-1, 1, 36).view(2, 9, 2)
    executed, known = torch.tensor([[[0.0, 0.5], [-0.5, 1.0]]] * 2), torch.tensor([True, False])
    given = L.given_tokens(frame, points, executed, known)
    assert given.shape == (2, L.GIVEN)
    assert torch.equal(given[:, L.FRAME_AT], frame + L.FRAME)
    assert (given[:, 16] == L.TICK_MARK).all()
    assert torch.equal(given[:, L.POINTS_AT], L.place_tokens(points[:, [0, *L.KEYPOINTS]].flatten(1)))
    assert torch.equal(given[0, L.ACTIONS_AT], L.place_tokens(executed[0].flatten()))
    assert (given[1, L.ACTIONS_AT] == L.NONE).all()
    assert (given[:, L.QUERY_AT] == L.QUERY).all()


@pytest.mark.parametrize(("k", "picked"), [(1, (0, 0)), (2, (0, 1)), (3, (1, 2)), (8, (3, 7))])
def test_the_middle_and_the_last_executed_action_are_picked(k: int, picked: tuple[int, int]) -> None:
    actions = torch.arange(2.0 * k).view(k, 2)
    executed, known = L.pick_executed(actions)
    assert known
    assert torch.equal(executed, actions[list(picked)])


def test_no_executed_action_is_said_to_be_none() -> None:
    executed, known = L.pick_executed(torch.zeros(0, 2))
    assert not known
    assert executed.shape == (2, 2)
