"""The shipped pipelines recorded, replayed to the bit on another server, and shown."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from omni_loop.client import connect
from omni_loop.config import Deployment, RecordConfig
from omni_loop.record.outcomes import Outcomes
from omni_loop.record.reader import Recording
from omni_loop.record.replay import replay
from omni_loop.serve.background import BackgroundServer
from omni_loop.types import Op
from omni_loop_sim_eval.recorded import render

from .conftest import READY_S


@pytest.fixture(scope="module")
def recording(
    deployment: Deployment, episode: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> Recording:
    """A policy's session, and one of the world model alone that is rewound and forked."""
    folder = tmp_path_factory.mktemp("recorded")
    recorded = deployment.model_copy(update={"record": RecordConfig(folder=str(folder))})
    with BackgroundServer(recorded, READY_S) as server, connect(server.address, timeout_s=120) as client:
        with client.open("pusht", seed=3, keys=("image", "agent_pos")) as session:
            for tick in range(4):
                session.infer(_arrays(session.keys, episode[8 * tick]), 8 * tick, frames=8 if tick == 1 else 0)
        with client.open("pusht-world", seed=4) as session:
            real = {key: np.stack([row[key] for row in episode[:3]]) for key in session.keys}
            executed = np.stack([row["action"] for row in episode[:2]])
            session.recondition(real, executed=executed)
            session.predict(np.stack([row["action"] for row in episode[2:6]]))
            with session.fork(seed=5) as child:
                child.predict(np.stack([row["action"] for row in episode[6:8]]))
            session.rewind(2)
            session.predict(np.stack([row["action"] for row in episode[2:4]]))
    return Recording(folder)


def _arrays(keys: tuple[str, ...], row: dict[str, Any]) -> dict[str, Any]:
    return {key: row[key] for key in keys}


def test_recorded_sessions_come_out_to_the_bit(recording: Recording, address: str) -> None:
    assert [episode.length for episode in recording] == [4, 3, 1]
    with connect(address, timeout_s=120) as client:
        report = replay(client, recording)
    assert report.exact, report.as_json()
    assert (report.ticks, {t.op for e in report.episodes for t in e.ticks}) == (
        8,
        {Op.INFER, Op.PREDICT, Op.RECONDITION},
    )
    assert [episode.worst("frames") for episode in report.episodes] == [0.0, 0.0, 0.0]


def test_another_seed_comes_out_otherwise(recording: Recording, address: str) -> None:
    other = Recording(recording.path)
    other.episodes[0].begin["seed"] += 1  # type: ignore[index]
    with connect(address, timeout_s=120) as client:
        report = replay(client, other, other.episodes[:1])
    assert report.differing == 4


def test_an_episode_is_one_page(recording: Recording) -> None:
    pages = [render(episode, Outcomes.read(recording)) for episode in recording]
    assert "data:video/mp4;base64," in pages[0]
    assert "Executed actions" in pages[0]
    assert "rewind" in pages[1]
    for page in pages:
        assert "data:image/png;base64," in page  # predicted frames
        assert not re.search(r"(src|href)=[\"']?(https?:)?//", page), "it needs nothing from elsewhere"
