"""Episodes in processes of their own, against a real server process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from omni_loop.client import Tls
from omni_loop.config import Deployment
from omni_loop.errors import ServerUnavailable
from omni_loop_sim_eval import bounds, shard, shards
from omni_loop_sim_eval.api import Server
from omni_loop_sim_eval.results import EpisodeResult
from omni_loop_sim_eval.runner import run_suite
from omni_loop_sim_eval.store import Store

from .small import HERE, TESTS, SmallServer, small_suite


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with SmallServer(Deployment(pipelines=("toy",))) as running:
        yield Server(running.address, timeout_s=10)


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Processes find this folder's envs."""
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    monkeypatch.chdir(tmp_path)


def outcome(result: EpisodeResult) -> tuple[Any, ...]:
    return result.task, result.episode, result.seed, result.outcome, result.score, result.actions.tobytes()


TASKS = [{"name": "long"}, {"name": "short", "max_steps": 5}, {"name": "middle", "prompt": "push", "max_steps": 7}]


def test_results_are_the_same_on_1_2_and_5_processes(server: Server) -> None:
    suite = small_suite(tasks=TASKS, episodes=3)
    runs = [run_suite(suite.changed(workers=n), server) for n in (1, 2, 5)]
    assert [(r.task, r.episode, r.steps) for r in runs[0].results] == [
        (task, i, steps) for task, steps in (("long", 10), ("short", 5), ("middle", 7)) for i in range(3)
    ]
    assert len({r.actions.tobytes() for r in runs[0].results if r.task == "long"}) == 3
    for run in runs[1:]:
        assert [outcome(r) for r in run.results] == [outcome(r) for r in runs[0].results]
    assert all(r.reason == "" for run in runs for r in run.results)


def frail(tmp_path: Path, how: str, times: int, **fields: Any) -> Any:
    (tmp_path / "died").mkdir()
    options = {"how": how, "seed": 11, "folder": str(tmp_path / "died"), "times": times}
    return small_suite(env=f"{HERE}:FrailEnv", env_options=options, episodes=3, **fields)


@pytest.mark.parametrize(
    ("how", "says"),
    [("killed", "ended by SIGKILL"), ("raises", "the env broke: RuntimeError: the physics exploded")],
)
def test_an_episode_whose_process_or_env_dies_is_run_again_in_a_fresh_process(
    server: Server, tmp_path: Path, how: str, says: str
) -> None:
    suite = frail(tmp_path, how, times=2, workers=2)
    run = run_suite(suite, server)
    whole = run_suite(small_suite(episodes=3), server)
    assert [outcome(r) for r in run.results] == [outcome(r) for r in whole.results]
    reason = run.results[1].reason
    assert reason.count("run again, because") == 2
    assert says in reason
    pids = {path.name.partition("-")[0] for path in (tmp_path / "died").iterdir()}
    assert len(pids) == 2, "each attempt had a process of its own"
    assert (run.results[0].reason, run.results[2].reason) == ("", "")


def test_an_episode_that_always_kills_its_process_is_an_error_after_its_retries(server: Server, tmp_path: Path) -> None:
    run = run_suite(frail(tmp_path, "killed", times=99, retries=1), server)
    assert [r.outcome for r in run.results] == ["failure", "error", "failure"]
    assert run.results[1].reason.count("SIGKILL") == 2


def test_a_process_that_hangs_is_killed_and_the_run_goes_on(server: Server, tmp_path: Path) -> None:
    run = run_suite(frail(tmp_path, "hangs", times=99, time_limit_s=2.0), server, grace_s=0.3)
    assert [r.outcome for r in run.results] == ["failure", "timeout", "failure"]
    assert "given up" in run.results[1].reason
    (died,) = (tmp_path / "died").iterdir()
    assert not Path(f"/proc/{died.name.partition('-')[0]}/stat").exists(), "it is gone"


def test_processes_that_cannot_start_are_said_once(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards.sys, "executable", "/bin/false")
    with pytest.raises(ServerUnavailable, match="does not start: its process ended with exit code 1"):
        run_suite(small_suite(), server)


def test_a_run_that_nobody_reads_on_leaves_no_process(server: Server, tmp_path: Path) -> None:
    seen: list[int] = []

    def stop(result: EpisodeResult) -> None:
        seen.extend(_children())
        raise KeyboardInterrupt

    before = _children()
    with pytest.raises(KeyboardInterrupt):
        run_suite(small_suite(workers=2), server, stop, store=Store(tmp_path))
    assert set(seen) - set(before)
    assert set(_children()) == set(before)


def _children() -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # ended meanwhile
            continue
        if int(fields[1]) == os.getpid() and fields[0] != "Z":
            found.append(int(path.parent.name))
    return found


def test_how_to_connect_is_told_to_another_process() -> None:
    suite = small_suite()
    tls = Tls("/etc/ca.pem", b"certificate", Path("/etc/key.pem"))
    server = Server("127.0.0.1:9", 3.0, "secret", tls)
    assert "secret" not in repr(server)
    told = shard.describe(server)
    assert told is not None
    back = shard.connect_of(told, suite)
    assert isinstance(back, Server)
    assert (back.address, back.timeout_s, back.token) == ("127.0.0.1:9", 3.0, "secret")
    assert back.tls is not None
    assert (back.tls.ca, back.tls.certificate, back.tls.key) == ("/etc/ca.pem", b"certificate", "/etc/key.pem")
    bound = bounds.connect("random", suite)
    assert shard.connect_of(shard.describe(bound) or {}, suite) == bound
    assert shard.describe(lambda: server()) is None
