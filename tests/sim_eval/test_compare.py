from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from omni_loop.env import EVALUATION_SEED
from omni_loop.errors import ConfigError, UnknownName
from omni_loop_sim_eval import compare, compare_page, leaderboard, leaderboard_page, rows, stored
from omni_loop_sim_eval.difference import difference
from omni_loop_sim_eval.pooled import pooled
from omni_loop_sim_eval.sequential import confidence
from omni_loop_sim_eval.stats import interval, mcnemar

from .pages import read
from .runs import write_run

S = EVALUATION_SEED
YES, NO = True, False


def load(*folders: Path) -> list[stored.StoredRun]:
    return [stored.load(folder) for folder in folders]


def test_one_task_counts_pairs_by_seed(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", {"": [YES] * 10 + [NO] * 10})
    b = write_run(tmp_path / "b", {"": [NO] * 8 + [YES] * 4 + [NO] * 18})
    found = compare.compare(*load(a, b))
    one = found.pooled
    assert (one.pairs.both, one.pairs.only_a, one.pairs.only_b, one.pairs.neither) == (2, 8, 2, 8)
    assert (one.a.rate, one.b.rate) == (0.5, 0.2), "over the episodes that both have"
    assert one.a.bounds == interval(10, 20)
    assert one.difference == difference(8, 2, 20)
    assert one.pairs.p == mcnemar(8, 2)
    assert [seed for _, seed in one.only_b] == [S + 10, S + 11]
    assert (found.tasks, found.left_out) == ((), (0, 10))
    assert one.adjusted == one.pairs.p


def test_several_tasks_one_by_one_and_pooled(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", {"reach": [YES] * 20, "push": [NO] * 20, "only-a": [YES]})
    b = write_run(tmp_path / "b", {"push": [YES] * 9 + [NO] * 11, "reach": [YES] * 19 + [NO]})
    found = compare.compare(*load(a, b))
    assert [t.task for t in found.tasks] == ["reach", "push"]
    assert (found.pooled.pairs.only_a, found.pooled.pairs.only_b, found.pooled.pairs.pairs) == (1, 9, 40)
    rate, bounds = pooled({"reach": (19, 20), "push": (9, 20)})
    assert (found.pooled.b.rate, found.pooled.b.bounds) == (rate, bounds)
    reach, push = found.tasks
    assert push.adjusted == pytest.approx(2 * mcnemar(0, 9)), "corrected for two tasks"
    assert reach.adjusted == 1
    assert found.left_out == (1, 0)


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"env": "toi"}, r"cannot be paired: env is 'toy' in .*a and 'toi' in .*b"),
        ({"first_seed": S + 100}, rf"has seeds {S} to {S + 3}, .*b {S + 100} to {S + 103}, and none in common"),
        ({"tasks": {"reech": [YES]}}, r"has no task 'reach'\. Did you mean 'reech'\?"),
        ({"said": {"suite.env": "toy", "suite.env_options": {"size": 2}}}, "env_options is {'size': 1} in"),
        (
            {"said": {"suite.env": "toy", "suite.tasks.reach": {"env_options": {}, "max_steps": 7}}},
            "max_steps of reach is 9 in .* and 7 in",
        ),
    ],
)
def test_runs_that_cannot_be_paired_are_refused(tmp_path: Path, other: dict[str, object], says: str) -> None:
    said = {
        "suite.env": "toy", "suite.env_options": {"size": 1},
        "suite.tasks.reach": {"env_options": {}, "max_steps": 9, "prompt": "reach"},
    }  # fmt: skip
    a = write_run(tmp_path / "a", {"reach": [YES] * 4}, said=said)
    b = write_run(tmp_path / "b", **({"tasks": {"reach": [YES] * 4}} | other))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=says):
        compare.compare(*load(a, b))


def test_a_run_without_episodes_and_bad_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="without a single episode"):
        stored.load(write_run(tmp_path / "a", {}))
    folder = write_run(tmp_path / "b", {"": [YES]})
    (folder / "summary.json").write_text("[1]")
    with pytest.raises(ConfigError, match=r"B: .*summary.json holds a list, wanted an object"):
        stored.load(folder, "B")
    with pytest.raises(ConfigError, match="there is no run in"):
        stored.find([tmp_path / "nowhere"])
    run = stored.load(write_run(tmp_path / "c", {"": [YES]}))
    with pytest.raises(UnknownName, match=r"'wilsen'. Did you mean 'wilson'"):
        compare.compare(run, run, method="wilsen")


def test_page_and_json_hold_everything(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", {"<reach>": [YES] * 20, "push": [NO] * 20}, suite="first")
    b = write_run(tmp_path / "b", {"<reach>": [YES] * 19 + [NO], "push": [YES] * 12 + [NO] * 8}, suite="second")
    (a / "report.html").write_text("x")
    one, other = load(a, b)
    found = compare.compare(one, other)
    page = read(compare_page.render(found, one, other, tmp_path / "out" / "index.html"))
    said = page.said()
    for text in (
        "first",
        "second",
        "second succeeds more often than first, by 27.5 points",
        "<reach>",
        "Holm",
        "Tango",
    ):
        assert text in said, text
    assert str(S + 19) in said
    assert [attributes["href"] for tag, attributes in page.tags if tag == "a"] == ["../a/report.html"]
    data = json.loads(json.dumps(compare.to_json(found, one, other)))
    assert data["pooled"]["p"] == mcnemar(1, 12)
    assert data["pooled"]["only_a"] == [{"task": "<reach>", "seed": S + 19}]
    assert [t["task"] for t in data["tasks"]] == ["<reach>", "push"]
    assert data["tasks"][1]["pairs"] == {"both": 0, "only_a": 0, "only_b": 12, "neither": 8}


def test_verdict_says_no_more_than_the_pairs(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / str(k), {"": [YES] * k + [NO] * (50 - k)}) for k in (29, 25)]
    a, b = load(*runs)
    found = compare.compare(a, b)
    assert compare.verdict(found.pooled, ("a", "b"), 0.95).startswith("No difference is shown. One of up to 19 points")


def test_seeds_that_follow_each_other_are_a_range() -> None:
    keys = [("push", 7), ("reach", 5), ("reach", 3), ("reach", 4), ("reach", 9), ("reach", 10)]
    assert compare_page.seeds(keys) == [("push", 1, "7"), ("reach", 5, "3–5, 9, 10")]


def test_names_fall_back_to_folders(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, {"": [YES]}) for name in ("x/run", "y/run", "y/other")]
    x, y, z = load(*runs)
    assert compare_page.names(x, z) == ("run", "other")
    assert compare_page.names(x, y) == (str(runs[0]), str(runs[1]))
    assert sorted(leaderboard.names([x, y, z]).values()) == sorted(
        [f"toy-suite ({runs[0]})", f"toy-suite ({runs[1]})", "toy-suite (other)"]
    )


def test_a_live_run_says_how_late_its_policy_was(tmp_path: Path) -> None:
    live = {"suite.mode": "live", "suite.live": {"latency_ms": 200.0, "chunks": "joined"}}
    a, b = load(
        write_run(tmp_path / "a", {"": [YES]}, said=live),
        write_run(tmp_path / "b", {"": [YES]}, said=live | {"suite.mode": "sync"}),
    )
    assert (a.policy, b.policy) == ("toy, live at 200 ms (joined)", "toy")
    (odd,) = load(write_run(tmp_path / "c", {"": [YES]}, said=live | {"suite.live": {}}))
    assert odd.policy == "toy, live"


def test_leaderboard_sorts_and_marks_what_cannot_be_told_apart(tmp_path: Path) -> None:
    write_run(tmp_path / "all" / "good", {"": [YES] * 49 + [NO]}, suite="good")
    write_run(tmp_path / "all" / "better", {"": [YES] * 50}, suite="better")
    write_run(tmp_path / "all" / "bad", {"": [YES] * 20 + [NO] * 30}, suite="bad")
    write_run(tmp_path / "all" / "elsewhere", {"": [YES] * 30}, suite="elsewhere", first_seed=S + 500)
    write_run(tmp_path / "all" / "tasks", {"reach": [YES] * 5, "push": [NO] * 5}, suite="tasks", env="arm")
    found = leaderboard.boards(leaderboard.read([tmp_path]))
    assert [board.env for board in found] == ["arm", "toy"]
    entries = {e.name: e for e in found[1].entries}
    assert list(entries) == ["better", "elsewhere", "good", "bad"]
    assert {name: e.rank for name, e in entries.items()} == {"better": 1, "elsewhere": 1, "good": 1, "bad": 3}
    assert entries["good"].alike == ("better",)
    assert entries["bad"].alike == ()
    assert entries["elsewhere"].unpaired == ("better", "good", "bad")
    assert found[1].tests == 3
    assert [(t.name, t.successes, t.episodes) for t in found[0].entries[0].tasks] == [("reach", 5, 5), ("push", 0, 5)]


def test_leaderboard_ranks_by_the_pairs_not_by_rates_over_other_episodes(tmp_path: Path) -> None:
    long = [YES] * 30 + [NO] * 20 + [YES] * 150
    runs = [write_run(tmp_path / "long", {"": long}), write_run(tmp_path / "short", {"": [YES] * 44 + [NO] * 6})]
    (board,) = leaderboard.boards(load(*runs))
    short, other = board.entries
    assert short.rate < other.rate
    assert [(short.run.folder.name, short.rank), (other.run.folder.name, other.rank)] == [("short", 1), ("long", 2)]


def test_leaderboard_keeps_worlds_of_one_adapter_apart(tmp_path: Path) -> None:
    for name, which in (("a", {"id": "A-v1"}), ("b", {"id": "B-v1"}), ("c", {"id": "A-v1"}), ("d", {"type": "pusht"})):
        write_run(tmp_path / name, {"": [YES] * 5}, suite=name, env="gymnasium", said={"suite.env_options": which})
    found = {board.env: [e.name for e in board.entries] for board in leaderboard.boards(leaderboard.read([tmp_path]))}
    assert found == {"gymnasium: A-v1": ["a", "c"], "gymnasium: B-v1": ["b"], "gymnasium: pusht": ["d"]}


def test_few_episodes_of_each_task_do_not_narrow_the_interval() -> None:
    assert pooled({"a": (0, 2), "b": (2, 2)})[1] == interval(2, 4)
    narrow = pooled({"a": (0, 10), "b": (10, 10)})[1]
    assert (narrow.method, narrow.low > interval(10, 20).low) == ("stratified wilson", True)


def test_leaderboard_says_what_broke_and_what_was_not_compared(tmp_path: Path) -> None:
    broke = write_run(tmp_path / "broke", {"": [YES] * 3 + [NO] * 2})
    kept = rows.read(broke)
    rows.write(broke, [*kept[:3], *(replace(row, outcome="error") for row in kept[3:])])
    write_run(tmp_path / "elsewhere", {"": [YES] * 5}, first_seed=S + 500)
    found = leaderboard.boards(leaderboard.read([tmp_path]))
    entries = leaderboard.to_json(found)[0]["entries"]
    assert [(e["broken"], len(e["unpaired"])) for e in entries] == [(0, 1), (2, 1)]
    said = io.StringIO()
    for table in leaderboard_page.tables(found):
        Console(file=said, width=160).print(table)
    assert "broke" in said.getvalue()
    assert "other episodes than" in said.getvalue()


def test_what_was_stopped_while_looking_shows_no_test_of_a_fixed_number(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", {"reach": [YES] * 8, "push": [YES] * 8})
    b = write_run(tmp_path / "b", {"reach": [NO] * 7 + [YES], "push": [NO] * 7 + [YES]})
    one, other = load(a, b)
    found = compare.any_time(compare.compare(one, other))
    assert found.pooled.difference == confidence(14, 0, 16)
    assert found.pooled.difference.low < difference(14, 0, 16).low, "wider than with a fixed number"
    data = compare.to_json(found, one, other)
    assert "p" not in data["pooled"]
    assert all("p" not in task and "difference" not in task for task in data["tasks"])
    page = read(compare_page.render(found, one, other, tmp_path / "page.html")).said()
    assert "confidence sequence" in page
    assert "Tango" not in page
    assert "It was stopped by what had been seen" in page
    headers = [column.header for column in compare_page.table(found, one, other).columns]
    assert "McNemar p" not in headers


def test_leaderboard_corrects_for_how_many_pairs_it_compares(tmp_path: Path) -> None:
    """Six against none is p = 0.031: enough for one pair of runs, not for the smallest of three."""
    runs = [write_run(tmp_path / "a", {"": [YES] * 6}), write_run(tmp_path / "b", {"": [NO] * 6})]
    (board,) = leaderboard.boards(load(*runs))
    assert [e.rank for e in board.entries] == [1, 2]
    runs.append(write_run(tmp_path / "c", {"": [NO] * 6}))
    (board,) = leaderboard.boards(load(*runs))
    assert [e.rank for e in board.entries] == [1, 1, 1]
