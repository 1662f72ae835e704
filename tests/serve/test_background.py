"""A server in a process of its own: it is ready when it says so, and never outlives its owner."""

import os
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from omni_loop.client import connect
from omni_loop.config import Deployment
from omni_loop.errors import ServerUnavailable
from omni_loop.serve.background import BackgroundServer
from omni_loop.testing.bad_inputs import good_arrays

ARRAYS = {name: good_arrays()[name] for name in ("image", "agent_pos")}


class ToyServer(BackgroundServer):
    module = "omni_loop.testing.toy_server"


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_serves_and_stops() -> None:
    with ToyServer(Deployment(pipelines=("toy",))) as server:
        pid = server.pid
        with connect(server.address) as client, client.open("toy", seed=1) as session:
            result = session.infer(ARRAYS, 0)
            assert result.chunk is not None
            np.testing.assert_array_equal(result.chunk.actions[:, 0], np.full(4, 2))
        with pytest.raises(ServerUnavailable, match="runs already"):
            server.start()
        assert f"serving on {server.address}" in server.log_tail()
    assert not alive(pid)
    with pytest.raises(ServerUnavailable, match="not running"):
        _ = server.pid
    with connect(server.address, timeout_s=5) as client, pytest.raises(ServerUnavailable, match=server.address):
        client.info()


def test_the_drain_ends_with_success() -> None:
    server = ToyServer(Deployment(pipelines=("toy",)))
    server.start()
    assert server.stop() == 0
    assert server.stop() is None


def test_a_start_that_fails_says_why() -> None:
    with pytest.raises(ServerUnavailable, match=r"CheckpointError: act: model\.safetensors is corrupt"):
        ToyServer(Deployment(pipelines=("broken",))).start()


def test_a_start_without_end_is_bounded() -> None:
    server = ToyServer(Deployment(pipelines=("endless",)), ready_s=2.0)
    with pytest.raises(ServerUnavailable, match="not ready within 2 s"):
        server.start()
    with pytest.raises(ServerUnavailable):
        _ = server.pid


def test_a_server_killed_from_outside() -> None:
    with ToyServer(Deployment(pipelines=("toy",))) as server, connect(server.address, timeout_s=5) as client:
        session = client.open("toy")
        os.kill(server.pid, signal.SIGKILL)
        with pytest.raises(ServerUnavailable):
            session.infer(ARRAYS, 0)


def test_the_server_ends_with_its_parent() -> None:
    script = textwrap.dedent("""
        import os
        from omni_loop.config import Deployment
        from omni_loop.serve.background import BackgroundServer
        class ToyServer(BackgroundServer):
            module = "omni_loop.testing.toy_server"
        server = ToyServer(Deployment(pipelines=("toy",)))
        server.start()
        print(server.pid, flush=True)
        os._exit(1)  # no clean-up of any kind
    """)
    parent = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, check=False)
    pid = int(parent.stdout)
    pidfd = None
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    import select

    try:
        ended, _, _ = select.select([pidfd], [], [], 20)
        assert ended, f"server {pid} outlived its parent"
    finally:
        os.close(pidfd)
