"""openpi's own client against our endpoint: what a call adds to the policy's forward pass, with 450 KB of images.

The client is PyPI's ``openpi-client`` as it is, in an environment that uv makes for it. The policy is light
(:mod:`.light`), so that what is measured is the way there and back and not the noise of a long forward pass.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from omni_loop.config import Deployment, PipelineConfig
from omni_loop.endpoints import Endpoints, OpenpiEndpoint
from omni_loop.errors import MissingExtra
from omni_loop.serve.background import BackgroundServer

from .light import CAMERAS, JOINTS, SIZE
from .rows import Bar, Bench, Measured, Settings

OPENPI = ("openpi-client==0.1.2", "typing_extensions", "websockets", "msgpack", "numpy", "pillow")
_WARM_UP = 20


class Openpi:
    """Milliseconds ``[n]`` above the forward pass."""

    def __init__(self, over: NDArray[np.float64]) -> None:
        self.over = over


@contextmanager
def _subject(settings: Settings) -> Iterator[Openpi]:
    light = PipelineConfig(name="light", template="omni_loop_bench.light:light")
    endpoint = OpenpiEndpoint(port=0, pipeline="light")
    deployment = Deployment(pipelines=(light,), endpoints=Endpoints(openpi=endpoint))
    count = _WARM_UP + (20 if settings.quick else 1000)
    with tempfile.TemporaryDirectory() as folder, BackgroundServer(deployment) as server:
        host, port = server.endpoints["openpi"].rsplit(":", 1)
        robot = Path(__file__).with_name("openpi_robot.py")
        arguments = [str(x) for x in (_python(Path(folder)), robot, host, port, count, CAMERAS, SIZE, JOINTS)]
        said = json.loads(
            subprocess.run(arguments, check=True, capture_output=True, timeout=600).stdout.splitlines()[-1]
        )
        yield Openpi((np.array(said["spent"]) - np.array(said["model"]))[_WARM_UP:])


def _python(folder: Path) -> Path:
    """The interpreter of an environment with the client, whose dependencies are named here since it does not."""
    found = os.environ.get("UV") or shutil.which("uv")  # `uv run` says where it is
    uv = [found] if found else [sys.executable, "-m", "uv"]
    try:
        subprocess.run([*uv, "venv", "--quiet", "--python", sys.executable, str(folder / "env")], check=True)
    except (OSError, subprocess.CalledProcessError):
        raise MissingExtra("uv, which makes an environment for openpi's client, is not installed") from None
    python = folder / "env/bin/python"
    subprocess.run([*uv, "pip", "install", "--quiet", "--no-deps", "--python", str(python), *OPENPI], check=True)
    return python


BENCH: Bench[Openpi] = Bench("openpi", _subject)


@BENCH.row("ms", Bar("ours", "<=", 1.5))
def openpi_p50(openpi: Openpi) -> Measured:
    """What a call of openpi's client adds to the forward pass, with three images of 224 x 224."""
    return Measured(float(np.percentile(openpi.over, 50)))


@BENCH.row("ms")
def openpi_p99(openpi: Openpi) -> Measured:
    """The same at the 99th percentile."""
    return Measured(float(np.percentile(openpi.over, 99)))
