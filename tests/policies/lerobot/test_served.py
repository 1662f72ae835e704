"""A LeRobot checkpoint behind a real server: sessions with history, forks, rewinds, refusals, what the server says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from omni_loop.client import Client, connect
from omni_loop.config import Deployment, PipelineConfig, SnapshotConfig
from omni_loop.errors import InvalidInput, OmniLoopError, TensorError
from omni_loop.serve.background import BackgroundServer
from omni_loop.types import TickResult

pytest.importorskip("lerobot")
pytestmark = pytest.mark.timeout(600)
READY_S = 280.0  # importing LeRobot takes a minute on a busy machine
Checkpoints = Callable[..., Path]


@pytest.fixture(scope="module")
def address(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    made = tuple(
        PipelineConfig(name=kind, template="lerobot", options={"checkpoint": str(checkpoints(kind)), **options})
        for kind, options in {"ddim": {}, "smolvla": {"rtc": True}, "act": {"ensemble": True}}.items()
    )
    kept = SnapshotConfig(folder=str(tmp_path_factory.mktemp("snapshots")))
    with BackgroundServer(Deployment(pipelines=made, snapshots=kept), READY_S) as server:
        yield server.address


@pytest.fixture
def client(address: str) -> Iterator[Client]:
    with connect(address, timeout_s=60) as client:
        yield client


def seen(step: int) -> dict[str, NDArray[Any]]:
    rng = np.random.default_rng(step)
    return {name: rng.normal(size=n).astype(np.float32) for name, n in (("state", 4), ("environment_state", 6))}


def chunk(result: TickResult) -> NDArray[np.float32]:
    assert result.chunk is not None
    return result.chunk.actions


@pytest.mark.parametrize("pipeline", ["ddim", "act"])
def test_a_forked_session_goes_on_with_its_history(client: Client, pipeline: str) -> None:
    with client.open(pipeline, seed=3) as session, client.open(pipeline, seed=3) as twin:
        for step in range(3):
            assert (chunk(session.infer(seen(step), step)) == chunk(twin.infer(seen(step), step))).all()
        with session.fork() as child, session.fork() as other:
            chunk(session.infer(seen(30), 3))  # what becomes of the parent does not matter
            child_saw, twin_saw = ([chunk(s.infer(seen(n), n)) for n in (3, 4)] for s in (child, twin))
            assert (np.array(child_saw) == np.array(twin_saw)).all()
            chunk(other.infer(seen(31), 3))
            assert (chunk(other.infer(seen(4), 4)) != child_saw[1]).any()


@pytest.mark.parametrize("pipeline", ["ddim", "act"])
def test_a_rewound_session_has_the_history_it_had(client: Client, pipeline: str) -> None:
    """Noise follows the epoch and the count of ticks: all that are compared were rewound alike."""
    after = {}
    for name, steps in {"one": (0, 1, 20, 30), "two": (0, 1, 21, 31), "other": (0, 11, 20, 30)}.items():
        with client.open(pipeline, seed=3) as session:
            for step, what in enumerate(steps):
                session.infer(seen(what), step)
            session.rewind(1)
            after[name] = np.array([chunk(session.infer(seen(n), n)) for n in (2, 3)])
    assert (after["one"] == after["two"]).all()
    assert (after["one"][0] != after["other"][0]).any()


def test_a_rewound_ensemble_is_as_if_it_had_not_gone_on(client: Client) -> None:
    with client.open("act") as session, client.open("act") as straight:
        for step in range(2):
            session.infer(seen(step), step)
            straight.infer(seen(step), step)
        for step in (2, 3):
            session.infer(seen(step + 50), step)
        session.rewind(1)
        assert (chunk(session.infer(seen(2), 2)) == chunk(straight.infer(seen(2), 2))).all()


@pytest.mark.parametrize("pipeline", ["ddim", "act"])
def test_a_snapshot_holds_the_history(client: Client, pipeline: str) -> None:
    with client.open(pipeline, seed=3) as session:
        for step in range(3):
            session.infer(seen(step), step)
        session.snapshot(pipeline)
        with client.restore(pipeline) as restored:
            for step in (3, 4):
                assert (chunk(session.infer(seen(step), step)) == chunk(restored.infer(seen(step), step))).all()


def test_real_time_chunking_over_the_wire(client: Client) -> None:
    rng = np.random.default_rng(0)
    state, top = rng.normal(size=4).astype(np.float32), rng.integers(0, 256, (32, 32, 3), np.uint8)
    with (
        client.open("smolvla", prompt="push the T", seed=1, options={"inference_delay": "3"}) as delayed,
        client.open("smolvla", prompt="push the T", seed=1) as plain,
    ):
        for session in (delayed, plain):
            assert session.spec.prompt
            session.infer({"state": state, "images.top": top}, 0)
        chunks = [chunk(s.infer({"state": state, "images.top": top}, 4)) for s in (delayed, plain)]
        assert (chunks[0] != chunks[1]).any()


@pytest.mark.parametrize(
    ("error", "says", "arrays"),
    [
        (InvalidInput, "environment_state", {"state": np.zeros(4, np.float32)}),
        (TensorError, "state", {**seen(0), "state": np.zeros(5, np.float32)}),
        (TensorError, "state", {**seen(0), "state": np.full(4, np.nan, np.float32)}),
    ],
)
def test_what_does_not_fit_is_named(
    client: Client, error: type[OmniLoopError], says: str, arrays: dict[str, NDArray[Any]]
) -> None:
    with client.open("act") as session:
        session.infer(seen(0), 0)
        with pytest.raises(error, match=says):
            session.infer(arrays, 1)
        assert chunk(session.infer(seen(1), 1)).shape == (6, 3)


def test_the_server_says_how_each_type_is_served(client: Client) -> None:
    specs = client.info().pipelines
    assert "stacked" in specs["ddim"].description
    assert "continues the chunk before it" in specs["smolvla"].description
    assert "averages every step" in specs["act"].description
    assert specs["act"].horizon == 6
