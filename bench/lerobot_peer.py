"""LeRobot's own road from an observation to a chunk, to be measured beside ours: its PolicyServer in a process, and its
RobotClient as it is, with a robot that shows the observations it is given.

``python -m omni_loop_bench.lerobot_peer PORT WORKERS`` is the server: what ``lerobot.async_inference.policy_server``
starts, with a latency of its own of 0 and a thread pool whose size can be chosen.
"""

from __future__ import annotations

import logging
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from omni_loop.errors import ServerUnavailable
from omni_loop.types import Array

from .shown import ShownConfig

ANSWER_S = 30.0


class Peer:
    """A RobotClient of the server at ``address``, one observation at a time."""

    def __init__(self, address: str, folder: str, config: ShownConfig, chunk: int) -> None:
        from lerobot.async_inference.configs import RobotClientConfig
        from lerobot.async_inference.robot_client import RobotClient

        self._client: Any = RobotClient(
            RobotClientConfig(
                policy_type="act",
                pretrained_name_or_path=folder,
                robot=config,
                actions_per_chunk=chunk,
                server_address=address,
            )
        )
        self._chunks: queue.SimpleQueue[Array] = queue.SimpleQueue()
        take_in = self._client._aggregate_action_queues

        def heard(actions: list[Any], combine: Any) -> None:
            take_in(actions, combine)
            self._chunks.put(np.stack([a.get_action().numpy() for a in actions]))

        self._client._aggregate_action_queues = heard
        self._receiver = threading.Thread(target=self._client.receive_actions, daemon=True)

    def start(self) -> None:
        """Raises :class:`ServerUnavailable` when the server does not load the policy."""
        if not self._client.start():
            raise ServerUnavailable("LeRobot's server did not load the policy")
        self._receiver.start()
        self._client.start_barrier.wait()

    def chunk(self, vector: Array, cameras: Mapping[str, Array], wait_s: float = ANSWER_S) -> Array | None:
        """What it commands for an observation; None: nothing within ``wait_s``, since the server left it out."""
        client = self._client
        client.robot.scene = {f"j{i}.pos": float(x) for i, x in enumerate(vector)} | dict(cameras)
        with client.action_queue_lock:
            client.action_queue.queue.clear()
        while not self._chunks.empty():
            self._chunks.get_nowait()
        client.latest_action += 1
        client.must_go.set()  # else the server leaves out what it finds similar to the observation before
        client.control_loop_observation("")
        try:
            return self._chunks.get(timeout=wait_s)
        except queue.Empty:
            return None

    def stop(self) -> None:
        self._client.stop()
        self._receiver.join(ANSWER_S)


@contextmanager
def server(workers: int) -> Iterator[str]:
    """Its address. One thread for torch, as ours has."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-m", __name__, str(port), str(workers)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        until = time.monotonic() + 180
        while process.poll() is None and time.monotonic() < until:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.2)
        else:
            raise ServerUnavailable("LeRobot's server did not start")
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def main(port: int, workers: int) -> None:
    from concurrent import futures

    import grpc
    from lerobot.async_inference.configs import PolicyServerConfig
    from lerobot.async_inference.policy_server import PolicyServer
    from lerobot.transport import services_pb2_grpc

    config = PolicyServerConfig(host="127.0.0.1", port=port, inference_latency=0.0)
    served = grpc.server(futures.ThreadPoolExecutor(workers))
    services_pb2_grpc.add_AsyncInferenceServicer_to_server(PolicyServer(config), served)
    served.add_insecure_port(f"127.0.0.1:{port}")
    logging.disable(logging.INFO)  # it logs several lines for every chunk
    served.start()
    served.wait_for_termination()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
