"""The shipped deployment ``pusht-vllm`` behind a real server, beside ``pusht``: episodes of PushT over gRPC."""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from omni_loop import registry
from omni_loop.client import Client, connect
from omni_loop.config import load_deployment
from omni_loop.serve.background import BackgroundServer
from omni_loop.types import TickResult

psutil = pytest.importorskip("psutil")  # vLLM brings it
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

KEYS = ("image", "agent_pos")
STEPS = range(0, 40, 8)  # until the window is full both engines see the same
PX = 0.5  # of 512, between the two engines' chunks


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, BackgroundServer]]:
    with ExitStack() as stack:
        made = {name: BackgroundServer(load_deployment(name), ready_s=1500) for name in ("pusht", "pusht-vllm")}
        yield {name: stack.enter_context(server) for name, server in made.items()}


@pytest.fixture(scope="module")
def clients(servers: dict[str, BackgroundServer]) -> Iterator[dict[str, Client]]:
    with ExitStack() as stack:
        yield {name: stack.enter_context(connect(s.address, timeout_s=120)) for name, s in servers.items()}


@pytest.fixture(scope="module")
def episode() -> list[dict[str, Any]]:
    """Observations of 41 steps of one PushT episode under a slow circle."""
    env = registry.build(registry.ENVS, "pusht", {})
    seen = [dict(env.reset(7))]
    for step in range(40):
        turn = np.array([np.cos(step / 8), np.sin(step / 8)])
        seen.append(dict(env.step((256 + 120 * turn).astype(np.float32)).arrays))
    env.close()
    return [{key: one[key] for key in KEYS} for one in seen]


def chunk(result: TickResult) -> np.ndarray[Any, np.dtype[np.float32]]:
    assert result.chunk is not None
    return result.chunk.actions


def progress(result: TickResult) -> tuple[float, float]:
    assert result.progress is not None
    return result.progress.progress, result.progress.done


def test_both_deployments_act_alike(clients: dict[str, Client], episode: list[dict[str, Any]]) -> None:
    answers = {}
    for name, client in clients.items():
        with client.open(name, prompt="push the T onto the goal", seed=3, keys=KEYS) as session:
            answers[name] = [session.infer(episode[step], step) for step in STEPS]
    for ours, theirs in zip(answers["pusht-vllm"], answers["pusht"], strict=True):
        assert progress(ours) == pytest.approx(progress(theirs), abs=1e-3)
        assert np.abs(chunk(ours) - chunk(theirs)).max() <= PX
        assert set(ours.timings.stages_ms) >= {"context", "act"}


def test_frames_come_besides(clients: dict[str, Client], episode: list[dict[str, Any]]) -> None:
    with clients["pusht-vllm"].open("pusht-vllm", seed=3, keys=KEYS) as session:
        result = session.infer(episode[0], 0, frames=4)
        assert result.frames_error is None
        assert result.frames is not None
        assert result.frames.frames.shape == (4, 96, 96, 3)


def test_forked_and_rewound_sessions_are_as_solo_ones(
    clients: dict[str, Client], episode: list[dict[str, Any]]
) -> None:
    client, late = clients["pusht-vllm"], range(24, 40, 4)
    with client.open("pusht-vllm", seed=5, keys=KEYS) as solo:
        want = [solo.infer(episode[step], step) for step in range(0, 40, 4)][6:]
    with client.open("pusht-vllm", seed=5, keys=KEYS) as session:
        for step in range(0, 24, 4):
            session.infer(episode[step], step)
        with session.fork() as child:
            forked = [child.infer(episode[step], step) for step in late]
        for step in (24, 28):
            session.infer(episode[0], step)  # what it did not see in the end
        session.rewind(20)
        rewound = [session.infer(episode[step], step) for step in late]
    for one, other in zip(forked, want, strict=True):
        assert np.abs(chunk(one) - chunk(other)).max() <= PX
    for one, other in zip(forked + rewound, want + want, strict=True):  # a new epoch draws new noise for its chunks
        assert progress(one) == pytest.approx(progress(other), abs=1e-3)


def test_many_sessions_at_once_are_as_alone(clients: dict[str, Client], episode: list[dict[str, Any]]) -> None:
    client = clients["pusht-vllm"]

    def walk(seed: int) -> list[Any]:
        with client.open("pusht-vllm", seed=seed, keys=KEYS) as session:
            return [chunk(session.infer(episode[(step + seed) % 40], step)) for step in range(0, 32, 8)]

    alone = [walk(seed) for seed in range(4)]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        at_once = list(pool.map(walk, range(4)))
    assert np.abs(np.array(alone) - np.array(at_once)).max() <= PX


def test_no_process_is_left(servers: dict[str, BackgroundServer]) -> None:
    server = servers["pusht-vllm"]
    family = psutil.Process(server.pid).children(recursive=True)
    assert any("EngineCore" in " ".join(process.cmdline()) for process in family)
    server.stop()
    until = time.monotonic() + 60
    while any(process.is_running() for process in family):
        assert time.monotonic() < until
        time.sleep(0.1)
