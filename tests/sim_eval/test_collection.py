from __future__ import annotations

from pathlib import Path

import pytest

from omni_loop.config import shipped
from omni_loop.errors import ConfigError, MissingExtra
from omni_loop_sim_eval import collection
from omni_loop_sim_eval.collection import Collection, chosen, is_collection, load_collection
from omni_loop_sim_eval.suite import EvalSuite

from .pages import read
from .runs import write_run
from .toy import toy_suite


def test_what_ships_is_a_collection_of_suites_that_ship() -> None:
    found, suites = load_collection("shipped")
    assert len(found.suites) >= 5
    assert set(found.suites) <= set(shipped("eval"))
    assert [suite.name for suite in suites] == list(found.suites), "a folder is found by its suite's name"
    assert all(suite.unseen for suite in suites)


def test_a_collection_is_told_from_a_suite(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("name: mine\nsuites: [pusht-state]\n")
    assert is_collection("shipped")
    assert is_collection(str(mine))
    for other in ("pusht-state", "nothing-of-the-kind", str(tmp_path / "nowhere.yaml"), "--help"):
        assert not is_collection(other)
    mine.write_text("name: [unclosed")
    assert not is_collection(str(mine))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("name: mine\nsuites: []", "suites"),
        ("name: mine\nsuites: [pusht-state, pusht-state]", "one stands twice"),
        ("name: mine\nsuites: [pusht-stat]", r"no shipped suite is called 'pusht-stat'\. Did you mean 'pusht-state'"),
        ("name: mine\nsuite: [pusht-state]", r"unknown key 'suite'\. Did you mean 'suites'"),
    ],
)
def test_a_bad_collection_is_refused(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(Exception, match=says):
        load_collection(str(tmp_path / "mine.yaml"))


def test_two_suites_of_one_name_are_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(f"name: mine\nsuites: [demo, {tmp_path}/demo.yaml]")
    from importlib import resources

    text = (resources.files("omni_loop_configs") / "eval" / "demo.yaml").read_text()
    (tmp_path / "demo.yaml").write_text(text)
    with pytest.raises(ConfigError, match="two suites are called 'demo'"):
        load_collection(str(tmp_path / "mine.yaml"))


def test_every_suite_runs_and_one_that_cannot_keeps_none_from_it(tmp_path: Path) -> None:
    suites = [toy_suite(name=name) for name in ("first", "missing", "last")]

    def evaluate(suite: EvalSuite, into: Path) -> int:
        if suite.name == "missing":
            raise MissingExtra("libosmesa6 is not installed")
        write_run(into, {"": [True] * 9 + [False]}, suite=suite.name)
        (into / "report.html").write_text("x")
        return 2 if suite.name == "last" else 0

    made = Collection(name="mine", description="all of <mine>", suites=("first", "missing", "last"))
    why = collection.run(made, suites, tmp_path, evaluate)
    assert why == {"missing": "libosmesa6 is not installed", "last": "2 episodes broke"}
    page = read((tmp_path / "index.html").read_text())
    said = page.said()
    for text in ("mine", "all of <mine>", "missing: libosmesa6 is not installed", "first", "last", "90 %"):
        assert text in said, text
    assert [a["href"] for tag, a in page.tags if tag == "a"] == ["first/report.html", "last/report.html"]


def test_a_folder_that_cannot_be_read_keeps_none_from_running(tmp_path: Path) -> None:
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "episodes.json").write_text("[")
    ran: list[str] = []

    def evaluate(suite: EvalSuite, into: Path) -> int:
        ran.append(suite.name)
        write_run(into, {"": [True]}, suite=suite.name)
        return 0

    made = Collection(name="mine", suites=("first", "last"))
    why = collection.run(made, [toy_suite(name=name) for name in made.suites], tmp_path, evaluate)
    assert ran == ["first", "last"]
    assert list(why) == ["torn"]
    assert "torn: " in read((tmp_path / "index.html").read_text()).said()


def test_some_of_the_suites() -> None:
    suites = [toy_suite(name=name) for name in ("first", "second")]
    assert chosen(suites, []) == suites
    assert [s.name for s in chosen(suites, ["second"])] == ["second"]
    with pytest.raises(ConfigError, match=r"no suite 'secnd'\. Did you mean 'second'"):
        chosen(suites, ["secnd"])
