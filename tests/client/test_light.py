"""A robot's machine has numpy, grpcio and protobuf; the client must not want more."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["omni_loop.client", "omni_loop.wire.codec", "omni_loop.types"])
def test_imports_nothing_heavy(module: str) -> None:
    script = f"""
import sys
import numpy, google.protobuf, google.protobuf.message, grpc.aio  # and what these bring themselves
before = {{name.partition(".")[0] for name in sys.modules}}
import {module}
new = {{name.partition(".")[0] for name in sys.modules}} - before
print(*sorted(name for name in new if name not in sys.stdlib_module_names and name != "omni_loop"))
"""
    done = subprocess.run([sys.executable, "-I", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
