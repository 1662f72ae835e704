from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from omni_loop.env import EVALUATION_SEED
from omni_loop.errors import ConfigError
from omni_loop_sim_eval.ab import Side, batches, check, contest, said
from omni_loop_sim_eval.sequential import SequentialTest, replay

from .toy import ToyServer, toy_suite

S = EVALUATION_SEED
TASKS = [{"name": "one", "prompt": "one"}, {"name": "two", "prompt": "two"}]


def side(folder: Path, server: ToyServer, **fields: object) -> Side:
    return Side(toy_suite(**{"max_steps": 20, "predictions": {"episodes": 0}} | fields), server.connect, folder)


def test_it_stops_when_decided_and_the_runs_are_on_the_same_seeds(tmp_path: Path) -> None:
    weak, strong = ToyServer(lost=frozenset(range(S, S + 100))), ToyServer(lost=frozenset({S + 2}))
    heard: list[int] = []
    found = contest(
        side(tmp_path / "a", weak),
        side(tmp_path / "b", strong),
        60,
        SequentialTest(),
        on_state=lambda s: heard.append(s.pairs),
    )
    assert found.last.verdict == "b"
    assert found.last.pairs == 8, "seven that favour b; both lost the third"
    assert heard == list(range(1, 9))
    assert sorted(weak.opened) == sorted(strong.opened)
    assert [r.seed for r in found.a.results] == [S + i for i in range(8)]
    assert said(found, ("weak", "strong"), 60) == (
        "Decided after 8 pairs, 52 fewer than the 60 it was allowed: strong is better than weak."
    )


def test_equal_policies_use_up_what_they_may(tmp_path: Path) -> None:
    server = ToyServer(lost=frozenset({S + 1}))
    found = contest(side(tmp_path / "a", server), side(tmp_path / "b", server), 13, SequentialTest())
    assert (found.last.pairs, found.last.verdict, found.last.p) == (13, "", 1.0)
    assert said(found, ("a", "b"), 13) == "Not decided after 13 pairs."


def test_pairs_come_in_the_same_order_whatever_the_batches(tmp_path: Path) -> None:
    """Episode by episode over all tasks; the verdict is the one that all pairs in that order give."""
    lost = frozenset({S, S + 3, S + 4, S + 6, S + 7, S + 8, S + 9, S + 10, S + 11, S + 12})
    found = contest(
        side(tmp_path / "a", ToyServer(lost=lost), tasks=TASKS),
        side(tmp_path / "b", ToyServer(), tasks=TASKS),
        40,
        SequentialTest(),
    )
    wanted = replay([(S + i not in lost, True) for i in range(20) for _ in TASKS])
    assert found.states == wanted
    assert found.last.verdict == "b"


def test_an_interrupted_contest_goes_on(tmp_path: Path) -> None:
    weak, strong = ToyServer(lost=frozenset(range(S, S + 100))), ToyServer()
    first = contest(side(tmp_path / "a", weak), side(tmp_path / "b", strong), 5, SequentialTest())
    assert (first.last.pairs, first.last.verdict) == (5, "")
    before = len(weak.opened)
    again = contest(side(tmp_path / "a", weak), side(tmp_path / "b", strong), 60, SequentialTest())
    assert again.last.verdict == "b"
    assert again.last.pairs == 7
    ran = [seed for seed in weak.opened[before:] if seed != S]  # S: of the preflights
    assert sorted(ran) == [S + 5, S + 6, S + 7], "what was there is not run again"


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"env": "toi"}, "env is 'toy' in toy-suite and 'toi' in other"),
        ({"first_seed": S + 1}, rf"first_seed is {S} in toy-suite and {S + 1} in other"),
        ({"max_steps": 21}, "max_steps of the task is 20 in toy-suite and 21 in other"),
        ({"tasks": TASKS}, r"tasks are \(one\) in toy-suite and one, two in other"),
    ],
)
def test_suites_that_cannot_be_paired_are_refused(other: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=f"cannot be paired: {says}"):
        check(toy_suite(max_steps=20), toy_suite(**{"max_steps": 20, "name": "other"} | other))


def test_batches_grow_and_end_at_the_most() -> None:
    assert batches(1, 5) == [5]
    sizes = batches(1, 200)
    assert (sizes[0], sizes[-1]) == (8, 200)
    assert all(b <= max(a + 1, 1.3 * a) for a, b in itertools.pairwise(sizes))
    assert batches(6, 100)[:2] == [2, 3]
    assert batches(6, 100)[-1] == 17, "episodes of each task"
