"""What a session remembers for vLLM, and the window rule."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from omni_loop_worlds.context import layout
from omni_loop_worlds.vllm.history import History, longest

WINDOW = 4
INSTRUCTION = layout.instruction_tokens("push the T")


def tick(i: int) -> Tensor:
    return torch.full((layout.TICK,), 100 + i)


def empty() -> History:
    return History(torch.zeros(0, layout.TICK, dtype=torch.int32))


def held(history: History) -> list[int]:
    """Which ticks, by the numbers of :func:`tick`."""
    return [int(row[0]) - 100 for row in history.ticks]


@pytest.mark.parametrize(
    ("keep", "behind"),
    [
        (1, ["", "0", "01", "012", "0123", "4", "45", "456", "4567", "8"]),
        (2, ["", "0", "01", "012", "0123", "34", "345", "3456", "67", "678"]),
        (4, ["", "0", "01", "012", "0123", "1234", "2345", "3456", "4567", "5678"]),
    ],
)
def test_a_full_context_begins_anew_at_the_last_ticks(keep: int, behind: list[str]) -> None:
    history = empty()
    for i, expected in enumerate(behind):
        assert held(history) == [int(digit) for digit in expected]
        history = history.with_tick(tick(i), imagined=False, window=WINDOW, keep=keep)


def test_a_prompt_is_the_instruction_the_ticks_and_what_is_given() -> None:
    history = empty().with_tick(tick(0), False, WINDOW, 2).with_tick(tick(1), False, WINDOW, 2)
    given = torch.arange(layout.GIVEN)
    prompt = history.prompt(INSTRUCTION, given)
    assert prompt == [*INSTRUCTION.tolist(), *[100] * 32, *[101] * 32, *range(30)]
    assert all(type(token) is int for token in prompt)


def test_prompts_begin_alike_until_the_anchor_moves() -> None:
    """What the prefix cache lives on: whole blocks of a tick each."""
    history, given, before = empty(), torch.arange(layout.GIVEN), []
    shared = []
    for i in range(9):
        prompt = history.prompt(INSTRUCTION, given)
        alike = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(before, prompt, strict=False))
        shared.append(len(list(alike)) // layout.TICK)
        before = prompt
        history = history.with_tick(tick(i), False, WINDOW, 2)
    assert shared == [0, 1, 2, 3, 4, 1, 3, 4, 1]


def test_a_real_tick_drops_the_imagined_tail() -> None:
    history = empty().with_tick(tick(0), False, WINDOW, 2)
    for i in (1, 2):
        history = history.with_tick(tick(i), True, WINDOW, 2)
    assert (held(history), history.imagined) == ([0, 1, 2], 2)
    real = history.real()
    assert (held(real), real.imagined) == ([0], 0)
    assert held(real.with_tick(tick(3), False, WINDOW, 2)) == [0, 3]
    assert held(history) == [0, 1, 2]  # as it was: the tick may be undone


def test_what_was_imagined_is_at_most_what_is_held() -> None:
    history = empty()
    for i in range(7):
        history = history.with_tick(tick(i), True, WINDOW, 2)
        assert history.imagined == len(history.ticks)
    assert held(history.real()) == []


def test_a_real_tick_ends_the_tail() -> None:
    history = empty().with_tick(tick(0), True, WINDOW, 2).real().with_tick(tick(1), False, WINDOW, 2)
    assert (held(history), history.imagined) == ([1], 0)


def test_the_longest_request_is_a_full_window_and_a_tick() -> None:
    assert longest(WINDOW) == 32 + 4 * 32 + 32 + 1
