"""The pipelines ``metaworld`` and ``metaworld-pixels`` behind a real server: what is told stays with the session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from omni_loop.client import Client, connect
from omni_loop.config import Deployment, SnapshotConfig
from omni_loop.errors import InvalidInput, TensorError
from omni_loop.serve.background import BackgroundServer
from omni_loop.types import TickResult

pytestmark = pytest.mark.timeout(300)
READY_S = 280.0  # also on a machine that is busy with something else
DOOR, DRAWER = "open the door", "open the drawer"


@pytest.fixture(scope="module")
def client(instructed_checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    folder = SnapshotConfig(folder=str(tmp_path_factory.mktemp("snapshots")))
    options = {stage: {"checkpoints": str(instructed_checkpoints)} for stage in ("instruct", "instructed_act")}
    deployment = Deployment(pipelines=("metaworld", "metaworld-pixels"), snapshots=folder, stage_options=options)
    with BackgroundServer(deployment, READY_S) as server, connect(server.address, timeout_s=60) as client:
        yield client


def seen(step: int) -> dict[str, NDArray[Any]]:
    return {"state": np.random.default_rng(step).normal(size=39).astype(np.float32)}


def chunk(result: TickResult) -> NDArray[np.float32]:
    assert result.chunk is not None
    return result.chunk.actions


def test_a_loop_of_observations_and_chunks(client: Client) -> None:
    with client.open("metaworld", prompt=DOOR, seed=3) as session:
        assert (session.spec.horizon, session.spec.execution_horizon, session.spec.control_hz) == (16, 8, 80.0)
        for step in (0, 8, 16):
            actions = chunk(session.infer(seen(step), step))
            assert actions.shape == (16, 4)
            assert np.abs(actions).max() <= 1


def test_one_camera_and_the_gripper(client: Client) -> None:
    rng = np.random.default_rng(0)
    image = rng.integers(0, 256, (64, 64, 3)).astype(np.uint8)
    gripper = rng.normal(size=4).astype(np.float32)
    with client.open("metaworld-pixels", prompt=DOOR, seed=3) as session:
        first = chunk(session.infer({"image": image, "gripper": gripper}, 0))
    with client.open("metaworld-pixels", prompt=DOOR, seed=3) as session:
        assert first.shape == (16, 4)
        assert (chunk(session.infer({"image": 255 - image, "gripper": gripper}, 0)) != first).any()


def test_the_instruction_is_all_that_differs(client: Client) -> None:
    chunks = []
    for prompt in (DOOR, DRAWER, "Open the door!"):
        with client.open("metaworld", prompt=prompt, seed=3) as session:
            chunks.append([chunk(session.infer(seen(step), step)) for step in (0, 8)])
    door, drawer, again = np.array(chunks)
    assert (door == again).all()
    assert (door[1] != drawer[1]).any()


def test_forks_and_snapshots_know_what_they_were_told(client: Client) -> None:
    with client.open("metaworld", prompt=DOOR, seed=3) as session:
        session.infer(seen(0), 0)
        session.snapshot("door")
        with session.fork() as child, client.restore("door") as restored:
            said = [chunk(s.infer(seen(8), 8, executed_through=9)) for s in (session, child, restored)]
    assert (said[0] == said[1]).all()
    assert (said[0] == said[2]).all()


def test_a_rewound_session_knows_what_it_was_told(client: Client) -> None:
    after = {}
    for name, prompt, steps in (("one", DOOR, (0, 8, 16)), ("two", DOOR, (0, 8, 99)), ("other", DRAWER, (0, 8, 16))):
        with client.open("metaworld", prompt=prompt, seed=3) as session:
            for what, step in zip(steps, (0, 8, 16), strict=True):
                session.infer(seen(what), step)
            session.rewind(8)
            after[name] = chunk(session.infer(seen(16), 16))
    assert (after["one"] == after["two"]).all()
    assert (after["one"] != after["other"]).any()


def test_told_nothing_it_does_nothing_until_it_is(client: Client) -> None:
    with client.open("metaworld", seed=3) as session:
        with pytest.raises(InvalidInput, match="instruction is empty"):
            session.infer(seen(0), 0)
        session.reset(prompt=DOOR)
        assert chunk(session.infer(seen(0), 0)).shape == (16, 4)


def test_what_does_not_fit_is_named(client: Client) -> None:
    with client.open("metaworld", prompt=DOOR) as session:
        with pytest.raises(TensorError, match="state"):
            session.infer({"state": np.zeros(38, np.float32)}, 0)
        assert chunk(session.infer(seen(0), 0)).shape == (16, 4)
