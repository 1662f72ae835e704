"""``omni-loop bench eval``: an evaluation as a command, what it found, and when two are the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from omni_loop.errors import EnvFailed
from omni_loop_bench.eval_lerobot import Beside, Theirs
from omni_loop_bench.eval_runs import Ran, Runs, evaluate
from omni_loop_bench.eval_same import differing
from omni_loop_bench.rows import Settings, find
from omni_loop_sim_eval.episodes import EpisodeResult, Outcome


def result(episode: int, *, task: str = "", success: bool = True, nudge: float = 0.0) -> EpisodeResult:
    outcome = Outcome.SUCCESS if success else Outcome.FAILURE
    actions = np.full((3, 2), episode + nudge, np.float32)
    return EpisodeResult(episode, 2_000_000 + episode, outcome, 3, 0.5, actions, task=task)


def ran(*results: EpisodeResult, seconds: float = 1.0) -> Ran:
    return Ran(tuple(results), seconds, 2 * seconds, seconds)


def test_an_evaluation_is_a_command_of_its_own(tmp_path: Path) -> None:
    pytest.importorskip("gym_pusht")
    made = Runs(Settings(quick=True), tmp_path).run("pusht-state", 100, "--workers", "1")
    (episode,) = made.results
    assert episode.seed == 2_000_000
    assert len(episode.actions) == episode.steps > 0
    assert 0 < made.done_s < made.command_s
    assert made.cpu_s > 0
    assert made.rate == episode.success


def test_a_command_that_fails_is_an_error_that_says_what_it_said(tmp_path: Path) -> None:
    with pytest.raises(EnvFailed, match=r"ended with 2:[\s\S]*Did you mean 'pusht-state'"):
        evaluate("pusht-stat", tmp_path)


def test_the_same_episodes_are_none_that_differ() -> None:
    one = ran(result(0), result(1, task="a"))
    assert differing([one, ran(result(1, task="a"), result(0))]) == 0


@pytest.mark.parametrize(
    "other",
    [
        ran(result(0), result(1, success=False)),
        ran(result(0), result(1, nudge=1e-6)),
        ran(result(0)),
        ran(result(0), result(1, task="a"), result(1)),
    ],
)
def test_what_differs_is_counted(other: Ran) -> None:
    assert differing([ran(result(0), result(1)), other]) == 1


@pytest.fixture
def beside(tmp_path: Path) -> Beside:
    """Three rounds of two episodes each, the second of theirs lost."""
    made = Beside(Runs(Settings(), tmp_path))
    single, ten = (Theirs((True, False), s, 4 * s) for s in (6.0, 4.0))
    made.__dict__["rounds"] = [(ran(result(0), result(1), seconds=s), [single, ten]) for s in (1.0, 2.0, 9.0)]
    return made


def test_theirs_counts_as_it_is_faster_and_medians_are_compared(beside: Beside) -> None:
    value = beside.per_minute(whole=False)
    assert (value.ours, value.baseline) == (60.0, 30.0)
    assert beside.per_minute(whole=True).baseline == 7.5


def test_seeds_are_paired(beside: Beside) -> None:
    ours, theirs = beside.outcomes()
    assert ours == {2_000_000: True, 2_000_001: True}
    assert theirs == {2_000_000: True, 2_000_001: False}


def test_every_shipped_row_says_what_it_measures() -> None:
    rows = find("eval").rows
    assert {"metaworld_state", "pusht_image", "fetch_pick_place", "same_pusht", "metaworld_cpu_s", "lerobot_rate"} <= {
        *rows
    }
    assert all(row.what for row in rows.values())
