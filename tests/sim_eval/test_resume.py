"""A run that was ended goes on where it stopped, and nothing of another run gets mixed in."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from omni_loop.config import Deployment
from omni_loop.env import EVALUATION_SEED
from omni_loop.errors import ConfigError, Exhausted
from omni_loop_sim_eval import media
from omni_loop_sim_eval.api import Server
from omni_loop_sim_eval.results import EpisodeResult
from omni_loop_sim_eval.runner import load_run, run_suite
from omni_loop_sim_eval.store import JOURNAL, RUN, OtherRun, Store, read_journal

from .small import TESTS, SmallServer, small_suite
from .toy import ToyServer, VersionedEnv, toy_suite

S = EVALUATION_SEED
POINTS = 24
HERE = os.environ | {"PYTHONPATH": str(TESTS)}


def test_killed_at_random_points_and_resumed_the_table_is_the_same(tmp_path: Path) -> None:
    """SIGKILL to the whole process at two of the events of each run; seeded."""
    command = [sys.executable, "-m", "sim_eval.killed", str(tmp_path), "2026", str(POINTS)]
    said = subprocess.run(command, cwd=tmp_path, env=HERE, capture_output=True, text=True, timeout=100, check=False)
    assert said.returncode == 0, said.stderr
    found = json.loads(said.stdout)
    whole = found["whole"]
    assert [(row["task"], row["episode"], row["outcome"]) for row in whole] == [
        (task, i, outcome) for task in "ab" for i, outcome in enumerate(["success", "failure", "error", "success"])
    ]
    assert len(found["killed"]) == POINTS
    for run in found["killed"]:
        assert run["table"] == whole, run["kills"]
    kills = [at for run in found["killed"] for at in run["kills"]]
    assert len(kills) >= POINTS, "they were killed"
    assert len(set(kills)) >= 20
    assert len({run["before"] for run in found["killed"]}) >= 5, "early and late"


def first(suite_fields: dict[str, object], folder: Path, server: ToyServer, stop_after: int) -> None:
    """A run that ends after some episodes, as by Ctrl-C."""
    n = 0

    def stop(result: EpisodeResult) -> None:
        nonlocal n
        n += 1
        if n == stop_after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_suite(toy_suite(**suite_fields), server.connect, stop, store=Store(folder))


def test_what_is_there_is_not_run_again_and_can_still_be_looked_at(tmp_path: Path) -> None:
    server = ToyServer(lost=frozenset({S + 1}))
    first({}, tmp_path, server, 2)
    assert len(read_journal(tmp_path)) == 2
    server.opened.clear()
    heard: list[int] = []
    resumed: list[int] = []
    run = run_suite(
        toy_suite(videos="all"),
        server.connect,
        lambda r: heard.append(r.episode),
        store=Store(tmp_path),
        on_resumed=lambda there: resumed.extend(r.episode for r in there),
    )
    assert (resumed, heard, run.resumed) == ([0, 1], [2, 3], 2)
    assert server.opened == [S, S + 2, S + 3], "the first asks for the policy's revision"
    seen = media.collect(run, tmp_path / "videos")
    assert len([v for v in seen.videos if v.path.name.endswith(".mp4")]) == 5
    assert seen.compared == sum(len(r.predictions) for r in run.results) > 0
    again = load_run(tmp_path)
    for a, b in zip(run.results, again.results, strict=True):
        assert replace(a, actions=b.actions, predictions=()) == replace(b, predictions=())
        np.testing.assert_array_equal(a.actions, b.actions)
        for p, q in zip(a.predictions, b.predictions, strict=True):
            np.testing.assert_array_equal(p.frames, q.frames)
    assert again.spec == run.spec
    assert run.wall_s >= again.results[-1].ended_s > 0


def test_more_episodes_and_tasks_go_on_with_what_is_there(tmp_path: Path) -> None:
    server = ToyServer()
    run_suite(toy_suite(episodes=2), server.connect, store=Store(tmp_path))
    run = run_suite(toy_suite(episodes=3, workers=2, interval="jeffreys"), server.connect, store=Store(tmp_path))
    assert (run.resumed, len(run.results)) == (2, 3)
    fewer = run_suite(toy_suite(episodes=1), server.connect, store=Store(tmp_path))
    assert [r.episode for r in fewer.results] == [0]
    two = tmp_path / "two"
    run_suite(toy_suite(episodes=1, tasks=[{"name": "a"}]), server.connect, store=Store(two))
    both = run_suite(toy_suite(episodes=1, tasks=[{"name": "b"}, {"name": "a"}]), server.connect, store=Store(two))
    assert ([r.task for r in both.results], both.resumed) == (["b", "a"], 1)


def test_an_episode_that_broke_is_run_again(tmp_path: Path) -> None:
    def broken(seed: int, tick: int) -> None:
        if seed == S + 1:
            raise Exhausted("no blocks left")

    ill, well = ToyServer(broken=broken), ToyServer()
    assert run_suite(toy_suite(), ill.connect, store=Store(tmp_path)).results[1].outcome == "error"
    run = run_suite(toy_suite(), well.connect, store=Store(tmp_path))
    assert ([r.outcome for r in run.results], run.resumed) == (["success"] * 4, 3)
    assert [r.outcome for r in load_run(tmp_path).results] == ["success"] * 4


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"max_steps": 61}, r"suite.max_steps was 60, is 61; suite.tasks\. was"),
        ({"keys": ["position"]}, r"suite.keys was \['image', 'position'\], is \['position'\]"),
        ({"options": {"samples": 4}}, r"suite.options was \{\}, is \{'samples': 4\}"),
        ({"mode": "live", "live": {"latency_ms": 100}}, r"suite.live was .*suite.mode was 'sync', is 'live'"),
        ({"prompt": "push"}, "suite.prompt was '', is 'push'"),
    ],
)
def test_another_suite_is_not_mixed_in(tmp_path: Path, fields: dict[str, object], says: str) -> None:
    run_suite(toy_suite(episodes=1), ToyServer().connect, store=Store(tmp_path))
    before = (tmp_path / JOURNAL).read_bytes(), (tmp_path / RUN).read_bytes()
    with pytest.raises(OtherRun, match=f"holds 1 episodes of another run; what differs: .*{says}.*--fresh"):
        run_suite(toy_suite(**fields), ToyServer().connect, store=Store(tmp_path))
    assert before == ((tmp_path / JOURNAL).read_bytes(), (tmp_path / RUN).read_bytes())
    fresh = run_suite(toy_suite(**fields), ToyServer().connect, store=Store(tmp_path, fresh=True))
    assert (fresh.resumed, len(read_journal(tmp_path))) == (0, 4)


def test_another_policy_or_env_is_not_mixed_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_suite(toy_suite(episodes=1), ToyServer().connect, store=Store(tmp_path))
    with pytest.raises(OtherRun, match="policy was 'toy@1', is 'toy@2'"):
        run_suite(toy_suite(), ToyServer(revision="toy@2").connect, store=Store(tmp_path))
    monkeypatch.setattr("omni_loop_sim_eval.versions.metadata.version", lambda name: "9.9")
    with pytest.raises(OtherRun, match=r"env was 'toy of .*', is 'toy of .*9.9'"):
        run_suite(toy_suite(env=f"{VersionedEnv.__module__}:VersionedEnv"), ToyServer().connect, store=Store(tmp_path))


def test_a_policy_that_is_replaced_while_it_runs_ends_the_run(tmp_path: Path) -> None:
    server = ToyServer()

    def replaced(result: EpisodeResult) -> None:
        server.revision = "toy@2"

    with pytest.raises(OtherRun, match="policy was 'toy@1', is 'toy@2'"):
        run_suite(toy_suite(), server.connect, replaced, store=Store(tmp_path))
    assert len(read_journal(tmp_path)) == 1


def test_two_runs_do_not_write_into_one_folder(tmp_path: Path) -> None:
    def at_the_same_time(result: EpisodeResult) -> None:
        with pytest.raises(ConfigError, match="another run is writing into"):
            run_suite(toy_suite(), ToyServer().connect, store=Store(tmp_path))

    run = run_suite(toy_suite(), ToyServer().connect, at_the_same_time, store=Store(tmp_path))
    assert len(read_journal(tmp_path)) == len(run.results) == 4
    assert run_suite(toy_suite(), ToyServer().connect, store=Store(tmp_path)).resumed == 4


@pytest.mark.parametrize("fresh", [False, True])
def test_a_run_that_is_under_way_keeps_its_folder(tmp_path: Path, fresh: bool) -> None:
    """Whoever comes second changes nothing there, however the command was given."""

    def second(result: EpisodeResult) -> None:
        before = (tmp_path / JOURNAL).read_bytes(), (tmp_path / RUN).read_bytes()
        with pytest.raises(ConfigError, match="another run is writing into"):
            run_suite(toy_suite(episodes=9), ToyServer().connect, store=Store(tmp_path, fresh))
        assert before == ((tmp_path / JOURNAL).read_bytes(), (tmp_path / RUN).read_bytes())

    run = run_suite(toy_suite(), ToyServer().connect, second, store=Store(tmp_path))
    assert len(read_journal(tmp_path)) == len(run.results) == 4
    assert load_run(tmp_path).suite.episodes == 4


def test_one_that_is_refused_leaves_no_lock(tmp_path: Path) -> None:
    run_suite(toy_suite(episodes=1), ToyServer().connect, store=Store(tmp_path))
    refused, other = Store(tmp_path), Store(tmp_path)
    with pytest.raises(OtherRun):
        refused.begin(toy_suite(max_steps=61), {}, {})
    other.begin(toy_suite(), {}, {})
    other.close()


def test_begun_anew_and_killed_before_it_says_of_what_it_goes_on_as_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_suite(toy_suite(episodes=1), ToyServer().connect, store=Store(tmp_path))

    def killed(path: Path, content: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("omni_loop_sim_eval.store._replace", killed)
    with pytest.raises(KeyboardInterrupt):
        run_suite(toy_suite(max_steps=61), ToyServer().connect, store=Store(tmp_path, fresh=True))
    monkeypatch.undo()
    assert load_run(tmp_path).results == [], "nothing that the old suite would be said of"
    for suite in (toy_suite(max_steps=61), toy_suite(max_steps=61)):
        run = run_suite(suite, ToyServer().connect, store=Store(tmp_path))
    assert (run.resumed, load_run(tmp_path).suite.max_steps) == (4, 61)


def test_a_torn_last_line_is_dropped_and_a_torn_one_before_it_refused(tmp_path: Path) -> None:
    run_suite(toy_suite(episodes=3), ToyServer().connect, store=Store(tmp_path))
    path = tmp_path / JOURNAL
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[1] + lines[2][:40])
    assert [r.episode for r in read_journal(tmp_path)] == [0, 1]
    assert run_suite(toy_suite(episodes=3), ToyServer().connect, store=Store(tmp_path)).resumed == 2
    assert [r.episode for r in read_journal(tmp_path)] == [0, 1, 2], "appended after the last whole line"
    endless = lines[1].replace(b'"episode":1', b'"episode":Infinity')
    for torn in (lines[1][:40] + b"\n", endless):
        path.write_bytes(lines[0] + torn + lines[2])
        with pytest.raises(ConfigError, match=f"{JOURNAL}, line 2: no line of a finished episode"):
            run_suite(toy_suite(episodes=3), ToyServer().connect, store=Store(tmp_path))


@pytest.mark.parametrize(
    ("text", "says"),
    [("", "describes no run"), ('{"format": 2, "fingerprint": {}}', "is of format 2, wanted 1"), ("[1]", "no run")],
)
def test_a_folder_that_holds_no_run_is_said(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=r"holds no run\.json"):
        load_run(tmp_path)
    (tmp_path / RUN).write_text(text)
    with pytest.raises(ConfigError, match=says):
        load_run(tmp_path)


_PROCESS = """
import sys
from pathlib import Path
from omni_loop_sim_eval.api import Server
from omni_loop_sim_eval.runner import run_suite
from omni_loop_sim_eval.store import Store
from sim_eval.small import small_suite

run_suite(small_suite(episodes=200, workers=2), Server(sys.argv[1]), store=Store(Path(sys.argv[2])))
"""


def test_its_processes_end_with_a_run_that_is_killed_and_it_goes_on(tmp_path: Path) -> None:
    with SmallServer(Deployment(pipelines=("toy",))) as server:
        arguments = [sys.executable, "-c", _PROCESS, server.address, str(tmp_path)]
        run = subprocess.Popen(arguments, cwd=tmp_path, env=HERE)
        until = time.monotonic() + 60
        while not (tmp_path / JOURNAL).exists() or len(read_journal(tmp_path)) < 4:
            assert run.poll() is None
            assert time.monotonic() < until
            time.sleep(0.01)
        shards = _children(run.pid)
        run.send_signal(signal.SIGKILL)
        run.wait()
        there, until = len(read_journal(tmp_path)), time.monotonic() + 60
        assert len(shards) == 2
        while any(Path(f"/proc/{pid}").exists() and not _zombie(pid) for pid in shards):
            assert time.monotonic() < until, "processes outlived their run"
            time.sleep(0.01)
        episodes = there + 3
        resumed = run_suite(small_suite(episodes=episodes), lambda: Server(server.address)(), store=Store(tmp_path))
        assert (resumed.resumed, len(resumed.results)) == (there, episodes)
        other = run_suite(small_suite(episodes=episodes), lambda: Server(server.address)())
    assert [r.actions.tobytes() for r in resumed.results] == [r.actions.tobytes() for r in other.results]


def _children(parent: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]


def _zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True
