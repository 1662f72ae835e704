"""openpi's and LeRobot's own clients, unmodified, drive PushT through the shipped deployments."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from omni_loop.config import load_deployment
from omni_loop.serve.background import BackgroundServer

from .pusht_robot import PROMPT, Table

pytestmark = pytest.mark.timeout(300)


@contextmanager
def serving(name: str, endpoint: str) -> Iterator[str]:
    """The address of a shipped deployment's ``endpoint``, in a process of its own as users run it."""
    with BackgroundServer(load_deployment(name)) as server:
        yield server.endpoints[endpoint]


def test_openpi_client_completes_a_pusht_episode(openpi_python: Path) -> None:
    table = Table()
    with serving("pusht-openpi", "openpi") as address:
        host, port = address.split(":")
        script = Path(__file__).with_name("openpi_episode.py")
        with subprocess.Popen(
            [openpi_python, script, host, port, PROMPT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as client:
            assert client.stdin is not None
            assert client.stdout is not None
            metadata = json.loads(client.stdout.readline())
            assert metadata["pipeline"] == "pusht"
            while not table.over:
                seen = table.seen
                said = {
                    "image": seen["image"].tobytes().hex(),
                    "state": seen["agent_pos"].tolist(),
                    "pose": seen["block_pose"].tolist(),
                }
                client.stdin.write(json.dumps(said) + "\n")
                client.stdin.flush()
                answer = json.loads(client.stdout.readline())
                assert "error" not in answer, answer
                actions = np.array(answer["actions"], np.float32)
                assert actions.shape == (metadata["action_horizon"], 2)
                for action in actions[: metadata["execution_horizon"]]:
                    table.act(action)
            client.stdin.close()
            assert client.wait(20) == 0
    table.check()


def test_lerobot_client_completes_a_pusht_episode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lerobot.async_inference.robot_client", reason="needs the extra lerobot")
    monkeypatch.chdir(tmp_path)  # where LeRobot's client writes its logs
    from lerobot.async_inference import robot_client
    from lerobot.async_inference.configs import RobotClientConfig

    from .pusht_robot import lerobot_robot

    config, make, table = lerobot_robot()
    monkeypatch.setattr(robot_client, "make_robot_from_config", make)  # where LeRobot's own robots are listed
    with serving("pusht-lerobot", "lerobot") as address:
        client = robot_client.RobotClient(
            RobotClientConfig(
                robot=config,
                policy_type="act",
                pretrained_name_or_path="pusht",
                actions_per_chunk=16,
                chunk_size_threshold=0.5,
                server_address=address,
                task=PROMPT,
                fps=30,
            )
        )
        assert client.start()
        receiver = threading.Thread(target=client.receive_actions)
        control = threading.Thread(target=lambda: client.control_loop(task=PROMPT))
        receiver.start()
        control.start()
        assert table.ended.wait(120), f"only {table.steps} steps"
        client.shutdown_event.set()
        control.join(20)
        receiver.join(20)
        client.stop()
    table.check()
