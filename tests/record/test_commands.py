"""``replay``, ``export`` and ``view`` as they are called, and what the health service says of the recorder."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from rich.console import Console
from typer.testing import CliRunner, Result

from omni_loop.cli.app import app
from omni_loop.cli.recordings import say_report
from omni_loop.client import connect
from omni_loop.config import RecordConfig
from omni_loop.errors import ConfigError, InvalidInput, UnknownName
from omni_loop.record.differences import Difference, EpisodeReport, Report
from omni_loop.record.outcomes import Outcomes
from omni_loop.record.reader import Recording, RecordingError
from omni_loop.serve.health import RECORDER
from omni_loop.testing.rows.bed import row
from omni_loop.testing.rows.toys import DIM, NAME
from omni_loop.types import ArraySpec, Op
from omni_loop_sim_eval.recorded import render, view_command

from .served import deployment, registered, served

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def _call(*arguments: object) -> Result:
    return CliRunner().invoke(app, [*map(str, arguments)], env={"COLUMNS": "200"})


def _health(address: str) -> int:
    with grpc.insecure_channel(address) as channel:
        reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=RECORDER))
    return int(reply.status)


@pytest.fixture(scope="module")
def toy() -> Iterator[None]:
    with registered():
        yield


@pytest.fixture(scope="module")
def recorded(toy: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three ticks, one of them with frames, and a rewind."""
    folder, draw = tmp_path_factory.mktemp("recorded"), np.random.default_rng(0)
    with served(deployment(folder)) as address, connect(address) as client, client.open(NAME, seed=5) as session:
        assert _health(address) == SERVING
        session.infer({"x": row(draw)}, 0)
        session.infer({"x": row(draw)}, 1, executed=np.ones((1, DIM), np.float32), frames=2)
        session.rewind(0)
        session.infer({"x": row(draw)}, 1, executed=np.ones((1, DIM), np.float32))
    return folder


def test_replay_says_that_it_is_exact(recorded: Path, tmp_path: Path) -> None:
    with served(deployment()) as address:
        done = _call("replay", recorded, "--server", address, "--json", tmp_path / "report.json")
    assert done.exit_code == 0, done.output
    assert "3 ticks replayed, 0 differ: exact" in done.output
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["exact"], report["ticks"], report["episodes"][0]["worst"]["frames"]) == (True, 3, 0.0)


def test_help_of_replay_is_prose() -> None:
    help_ = " ".join(_call("replay", "--help").output.split())
    assert "else it is 1. Noise is a function of the recorded seeds" in help_


def test_the_table_of_a_replay_says_numbers_units_and_what_allows_a_grey_level() -> None:
    ticks = [Difference(1, Op.INFER, 0, chunk=0.25, frames=1.0)]
    report = Report([EpisodeReport("name", "s1", 1, ticks, index=7, unit="m")], 0.5, 0.0)
    console = Console(record=True, width=200)
    say_report(report, console)
    head, first, *rest = console.export_text().splitlines()
    assert re.split(r"\s{2,}", head.strip())[:7] == [
        *("no.", "episode", "ticks", "differ", "chunk (m)", "frames (grey levels)", "progress")
    ]
    assert first.split()[:7] == ["7", "name", "1/1", "1", "0.25", "1", "–"]
    assert "1 ticks replayed, 1 differ: not exact" in rest[0]
    assert "--pixels 1 allows it" in rest[1]
    say_report(Report(report.episodes, 0.0, 0.0), console)  # the chunk differs too
    assert "--pixels" not in console.export_text()


def test_replay_on_a_server_that_is_gone_is_not_exact(recorded: Path) -> None:
    with served(deployment()) as address:
        pass
    done = _call("replay", recorded, "--server", address, "--episodes", "0")
    assert done.exit_code == 1
    assert "not exact" in done.output


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        (("--server", "127.0.0.1:1", "--deployment", "pusht"), InvalidInput, "exclude each other"),
        (("--episodes", "7"), UnknownName, "no episode 7"),
    ],
)
def test_what_replay_refuses(recorded: Path, arguments: tuple[str, ...], error: type[Exception], says: str) -> None:
    done = _call("replay", recorded, *arguments)
    assert isinstance(done.exception, error)
    assert says in str(done.exception)


def test_what_is_no_recording_is_refused(tmp_path: Path) -> None:
    for command in (("replay",), ("export", "--out", tmp_path / "set")):
        done = _call(command[0], tmp_path, *command[1:])
        assert isinstance(done.exception, RecordingError)


def test_export_refuses_what_it_cannot_write(recorded: Path, tmp_path: Path) -> None:
    done = _call("export", recorded, "--out", tmp_path)
    assert isinstance(done.exception, ConfigError)
    done = _call("export", recorded, "--out", tmp_path / "set", "--map", "x")
    assert isinstance(done.exception, InvalidInput)
    assert "KEY=NAME" in str(done.exception)


def test_view_writes_a_page_that_needs_nothing_else(recorded: Path, tmp_path: Path) -> None:
    view_command(recorded, "0", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "episode 0</h1>" in page
    for text in ("Outcome", "nobody said how it ended", ">closed</td>"):
        assert text in page
    for text in ("Executed actions", "Progress", "rewind", "data:image/png;base64,", "seq 2: steps 2 to 3"):
        assert text in page
    assert not re.search(r"(src|href)=[\"']?(https?:)?//", page)
    two = tmp_path / "two"
    for run in ("a", "b"):
        shutil.copytree(next(recorded.iterdir()), two / run)
    view_command(two, "1", tmp_path / "page.html")  # the number that was asked for, not that in its session
    assert "episode 1</h1>" in (tmp_path / "page.html").read_text()
    with pytest.raises(InvalidInput, match="one page shows one"):
        view_command(two, "0-1", tmp_path / "page.html")


def test_a_recorder_without_room_is_not_serving_and_the_server_is(toy: None, tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    record = RecordConfig(folder=str(tmp_path), part_ticks=2, max_bytes=1)
    chosen = deployment().model_copy(update={"record": record})
    with served(chosen) as address, connect(address) as client, client.open(NAME, seed=5) as session:
        for step in range(1000):  # it is told as soon as a part could not be written
            executed = np.ones((1, DIM), np.float32) if step else None
            session.infer({"x": row(draw)}, step, executed=executed)
            if _health(address) == NOT_SERVING:
                break
        else:
            raise AssertionError("the recorder is said to be well")
        with grpc.insecure_channel(address) as channel:
            reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert reply.status == SERVING


def test_an_episode_without_images_is_shown(recorded: Path) -> None:
    (episode,) = Recording(recorded)
    page = render(episode, Outcomes({episode.session: {"success": True}}))
    assert "<b>succeeded</b>" in page
    assert "<video" not in page
    assert "Not drawn" not in page
    wide = replace(episode.spec, observations=(ArraySpec("depth", "float32", (4, 9)),))
    page = render(replace(episode, spec=wide, keys=("depth",), kept=("depth",)), Outcomes({}))
    assert "Not drawn: depth (float32 4×9)" in page
