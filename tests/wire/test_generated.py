"""The generated code is that of the protocol, made by the pinned tools."""

import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMPAT = "omni_loop/serve/compat/lerobot_pb2"
NAMES = (
    *(f"omni_loop/wire/loop_{name}" for name in ("pb2.py", "pb2.pyi", "pb2_grpc.py")),
    f"{COMPAT}.py",
    f"{COMPAT}.pyi",
)


def test_regenerating_changes_nothing(tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools")
    pinned = re.search(r"grpcio-tools==([\d.]+)", (ROOT / "pyproject.toml").read_text())
    assert pinned is not None
    installed = metadata.version("grpcio-tools")
    if installed != pinned[1]:
        pytest.skip(f"grpcio-tools {installed} is installed, {pinned[1]} makes the code")
    subprocess.run([sys.executable, str(ROOT / "scripts/proto"), str(tmp_path)], check=True)
    for name in NAMES:
        ours, fresh = ROOT / name, tmp_path / name
        assert ours.read_text() == fresh.read_text(), f"run scripts/proto: {name} is not what its proto says"
