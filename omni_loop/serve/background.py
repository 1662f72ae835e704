"""A server in a process of its own, for evaluations, demos and tests."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
import time
from types import TracebackType
from typing import IO, TYPE_CHECKING

from ..errors import ServerUnavailable

if TYPE_CHECKING:
    from ..config import Deployment

TAIL_BYTES = 4000


class BackgroundServer:
    """``with BackgroundServer(deployment) as server: connect(server.address)``.

    The deployment's ports are not used: any free ones are taken; those of its endpoints are in :attr:`endpoints`,
    by name. ``ready_s`` bounds loading and warming up,
    ``grace_s`` the drain at the end, after which the process is killed. The server ends with its parent,
    however that ends. Its output goes to a temporary file; :meth:`log_tail` reads the end of it.
    """

    module = "omni_loop.serve"

    def __init__(self, deployment: Deployment, ready_s: float = 180.0, grace_s: float = 15.0) -> None:
        self._deployment = _on_free_ports(deployment)
        self._ready_s = ready_s
        self._grace_s = grace_s
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._log: IO[bytes] | None = None
        self.address = ""
        self.endpoints: dict[str, str] = {}

    @property
    def pid(self) -> int:
        """Of the server; raises :class:`ServerUnavailable` when none runs."""
        if self._process is None:
            raise ServerUnavailable("the server is not running")
        return self._process.pid

    def __enter__(self) -> BackgroundServer:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    def start(self) -> None:
        """Returns when every stage has run. Raises :class:`ServerUnavailable` with the end of the server's
        output when it ends or takes longer than ``ready_s``."""
        if self._process is not None:
            raise ServerUnavailable(f"the server runs already, at {self.address}")
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  closed by stop()
        self._control, theirs = socket.socketpair()
        with theirs:
            # A session of its own: Ctrl-C in the terminal reaches the parent, which then drains the server.
            self._process = subprocess.Popen(
                [sys.executable, "-m", self.module, "--control-fd", str(theirs.fileno())],
                stdin=subprocess.PIPE,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(self._deployment.model_dump_json().encode())
            self._process.stdin.close()
            self.endpoints = self._wait_for_addresses(self._control)
            self.address = self.endpoints.pop("")
        except BaseException:
            self.stop()
            raise

    def stop(self) -> int | None:
        """Drain and end the server; its exit code, or None when none ran. Safe to call twice."""
        process, self._process = self._process, None
        if process is None:
            return None
        process.terminate()
        try:
            process.wait(self._grace_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdin is not None:
            process.stdin.close()
        if self._control is not None:
            self._control.close()
        if self._log is not None:
            self._log.close()
        return process.returncode

    def log_tail(self) -> str:
        """The end of the server's output while it runs."""
        if self._log is None or self._log.closed:
            return ""
        size = self._log.seek(0, 2)
        self._log.seek(max(0, size - TAIL_BYTES))
        return self._log.read().decode(errors="replace").strip()

    def _wait_for_addresses(self, control: socket.socket) -> dict[str, str]:
        until = time.monotonic() + self._ready_s
        received = b""
        while not received.endswith(b"\n"):
            control.settimeout(max(until - time.monotonic(), 0.001))
            try:
                piece = control.recv(256)
            except TimeoutError:
                raise ServerUnavailable(
                    f"the server was not ready within {self._ready_s:g} s\n{self.log_tail()}"
                ) from None
            if not piece:
                raise ServerUnavailable(f"the server ended while starting\n{self.log_tail()}", retryable=False)
            received += piece
        addresses: dict[str, str] = json.loads(received)
        return addresses


def _on_free_ports(deployment: Deployment) -> Deployment:
    others = deployment.endpoints
    named = {name: config for name in type(others).model_fields if (config := getattr(others, name)) is not None}
    free = {name: config.model_copy(update={"port": 0}) for name, config in named.items()}
    return deployment.model_copy(
        update={
            "listen": deployment.listen.model_copy(update={"port": 0}),
            "endpoints": others.model_copy(update=free),
        }
    )
