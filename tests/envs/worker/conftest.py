"""Workers that behave badly: scripts in place of a worker, and envs that a real worker finds registered."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

_ENV = '''
import os, signal, subprocess, sys, threading, time
import numpy as np
from omni_loop.env import BaseEnv, EnvStep
from omni_loop.types import ArraySpec
from omni_loop_envs.worker.side import server


class Bad(BaseEnv):
    """Does what its options say at the step of that number."""

    name = "bad"
    instruction = "stand still"
    control_hz = 10.0
    action = ArraySpec("action", "float32", (1,), low=-1, high=1)
    observations = (ArraySpec("place", "float32", (1,)),)

    def __init__(self, at: int, what: str, ends: str = "", anew: bool = False):
        super().__init__(50)
        self.instruction_of_episode = anew
        if ends:  # the name of the only thread that may end the worker when its owner is gone
            end = server._end
            server._end = lambda: end() if threading.current_thread().name == ends else time.sleep(600)
        self.at, self.what, self.place = at, what, 0.0

    def _reset(self, seed):
        self.place = float(seed % 100)

    def _step(self, action):
        if self._steps == self.at:
            getattr(self, self.what)()
        self.place += float(action[0])
        return EnvStep({}, 0.0, False, False, False)

    def _array(self, key):
        return np.array([self.place], np.float32)

    def _render(self):
        return np.zeros((2, 2, 3), np.uint8)

    def exit(self):
        print("out of memory, say")
        os._exit(3)

    def signal(self):
        os.kill(os.getpid(), signal.SIGKILL)

    def hang(self):
        time.sleep(600)

    def child(self):
        """Its place is that of a process it started, which would outlive it."""
        self.place = float(subprocess.Popen(["sleep", "600"]).pid)

    def raise_(self):
        raise ValueError("the simulation is unstable")

    def print(self):
        for _ in range(40):
            sys.stdout.write("noise " * 5000)
            sys.stdout.flush()
            sys.stderr.write("more noise " * 500)
'''


@pytest.fixture
def bad_env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Registers the env ``bad`` for workers that are started while the test runs, as a plug-in would."""
    (tmp_path / "bad_env_module.py").write_text(_ENV, encoding="utf-8")
    about = tmp_path / "bad_env-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: bad-env\nVersion: 1.0\n", encoding="utf-8")
    (about / "entry_points.txt").write_text("[omni_loop.envs]\nbad = bad_env_module:Bad\n", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]).rstrip(":"))


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], tuple[str, ...]]:
    """A command that starts ``code`` instead of a worker; there ``link`` is the socket, and ``wire`` its module."""

    def make(code: str) -> tuple[str, ...]:
        path = tmp_path / "worker.py"
        head = "import socket, sys, time\nfrom omni_loop_envs.worker.side import wire\n"
        head += "link = socket.socket(fileno=int(sys.argv[1]))\n"
        path.write_text(head + code, encoding="utf-8")
        return (sys.executable, str(path))

    return make
