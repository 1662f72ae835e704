"""Instructions as tokens, and the phrasings a policy learns from."""

from __future__ import annotations

import itertools

import pytest
import torch

from omni_loop.errors import InvalidInput, UnknownName
from omni_loop_policies.instructed.phrases import OTHER, TASKS, task, texts
from omni_loop_policies.instructed.samples import vocabulary
from omni_loop_policies.instructed.words import BEGIN, END, MOST_WORDS, TOKENS, UNKNOWN, Vocabulary, words_of

WORDS = Vocabulary(("door", "open", "the"))
LEARNED = {name: set(texts(found.patterns)) for name, found in TASKS.items()}


def test_a_text_is_its_words_between_begin_and_end() -> None:
    tokens = WORDS.tokens("Open the DOOR!")
    assert tokens.tolist() == [BEGIN, 4, 5, 3, *[END] * (TOKENS - 4)]
    assert tokens.dtype == torch.int64
    assert (tokens == WORDS.tokens(" open,\n the (door)")).all()


def test_unknown_words_count_as_words() -> None:
    assert WORDS.tokens("open that дверь 🚪 the door_2")[1:8].tolist() == [4, UNKNOWN, UNKNOWN, 5, 3, UNKNOWN, END]


@pytest.mark.parametrize("text", ["", " \n", "?!", "🚪"])
def test_no_words_are_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="empty"):
        WORDS.tokens(text)


def test_as_many_words_as_fit_and_no_more() -> None:
    assert WORDS.tokens("door " * MOST_WORDS)[-1] == END
    with pytest.raises(InvalidInput, match="31 words"):
        WORDS.tokens("door " * (MOST_WORDS + 1))


def test_patterns_stand_for_all_their_texts() -> None:
    assert texts(["{|please} open {the|a} door", "open the door"]) == [
        "open the door", "open a door", "please open the door", "please open a door",
    ]  # fmt: skip


def test_no_text_is_learned_for_two_tasks_or_for_none() -> None:
    pools = [*LEARNED.values(), set(texts(OTHER))]
    assert min(map(len, pools)) > 100
    for a, b in itertools.combinations(pools, 2):
        assert not a & b


def test_held_out_texts_are_never_learned() -> None:
    learned = {" ".join(words_of(text)) for pool in (*LEARNED.values(), texts(OTHER)) for text in pool}
    held_out = [text for found in TASKS.values() for text in found.held_out]
    assert len(set(held_out)) == 24
    assert not learned & set(held_out)


def test_every_learned_word_is_in_the_vocabulary_and_fits() -> None:
    known = Vocabulary(vocabulary())
    for text in itertools.chain(*LEARNED.values()):
        assert UNKNOWN not in known.tokens(text)


def test_a_task_nobody_has_words_for_is_named() -> None:
    with pytest.raises(UnknownName, match="Did you mean 'door-open-v3'"):
        task("door-open-v2")
