"""The generated code is that of the protocol, made by the pinned tools."""

import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("loop_pb2.py", "loop_pb2.pyi", "loop_pb2_grpc.py")


def test_regenerating_changes_nothing(tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools")
    pinned = re.search(r"grpcio-tools==([\d.]+)", (ROOT / "pyproject.toml").read_text())
    assert pinned is not None
    installed = metadata.version("grpcio-tools")
    if installed != pinned[1]:
        pytest.skip(f"grpcio-tools {installed} is installed, {pinned[1]} makes the code")
    subprocess.run([sys.executable, str(ROOT / "scripts/proto"), str(tmp_path)], check=True)
    for name in NAMES:
        ours, fresh = ROOT / "omni_loop/wire" / name, tmp_path / "omni_loop/wire" / name
        assert ours.read_text() == fresh.read_text(), f"run scripts/proto: {name} is not what loop.proto says"
