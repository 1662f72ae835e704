"""The client on a robot: Python 3.10 with numpy 1.26 and the oldest gRPC that is supported, and the newest of each."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from omni_loop.serve.app import Server

from .conftest import HORIZON

ROOT = Path(__file__).parents[2]
ROBOT = Path(__file__).with_name("robot.py")


@dataclass(frozen=True)
class Machine:
    python: str
    packages: tuple[str, ...]


MACHINES = {
    "oldest": Machine("3.10", ("numpy==1.26.4", "grpcio==1.73.1", "protobuf==6.31.1")),
    "newest": Machine("3.12", ("numpy>=2", "grpcio", "protobuf")),
}


def uv(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [found] if (found := shutil.which("uv")) else ["python3", "-m", "uv"]
    return subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=300)


def interpreter(version: str) -> str:
    """One that is here; nothing is downloaded."""
    found = uv("python", "find", "--no-python-downloads", version)
    if found.returncode == 0:
        return found.stdout.strip()
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for python in sorted(pyenv.glob(f"{version}.*/bin/python")):
        return str(python)
    pytest.skip(f"no Python {version} here")


@pytest.fixture(params=MACHINES)
def robot(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Machine, Path]:
    """A machine, and its Python; made once and kept in pytest's cache, where there is one."""
    if uv("--version").returncode != 0:
        pytest.skip("uv is not installed")
    machine = MACHINES[request.param]
    base = interpreter(machine.python)
    cache: pytest.Cache | None = getattr(request.config, "cache", None)
    kept = tmp_path_factory.mktemp("robot") if cache is None else Path(cache.mkdir(f"robot-{request.param}"))
    folder = kept / "env"
    python = folder / "bin" / "python"
    if not (folder / "ready").exists():
        made = uv("venv", "--quiet", "--clear", "--python", base, str(folder))
        assert made.returncode == 0, made.stderr
        added = uv("pip", "install", "--quiet", "--python", str(python), *machine.packages)
        assert added.returncode == 0, added.stderr
        (folder / "ready").touch()
    return machine, python


async def test_a_robot_plays(robot: tuple[Machine, Path], server: Server) -> None:
    machine, python = robot
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error"}
    process = await asyncio.create_subprocess_exec(
        python, str(ROBOT), server.address, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), 120)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, err.decode()
    said = json.loads(out.splitlines()[-1])
    assert ".".join(str(n) for n in said["python"]) == machine.python
    assert said["numpy"].startswith("1.26." if "numpy==1.26.4" in machine.packages else "2.")
    assert said["absent"] == ["torch", "PIL", "pydantic", "zarr"]
    assert said["chunks"] >= 5
    assert said["actions"] == list(range(len(said["actions"])))
    assert said["shape"] == [HORIZON, 2]
    assert said["first"] == 1
    assert "'image'" in said["refused"]
    assert "pillow" in said["jpeg"].lower()
