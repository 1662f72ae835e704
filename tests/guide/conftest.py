"""The guide's world behind a server, once for all that ask it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest

from omni_loop.config import load_deployment
from omni_loop.serve.background import BackgroundServer

from .blocks import FOLDER

READY_S = 280.0


@contextmanager
def _served(deployment: str) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])]))
        with BackgroundServer(load_deployment(FOLDER / deployment), READY_S) as server:
            yield server.address


@pytest.fixture
def served() -> Callable[[str], AbstractContextManager[str]]:
    """The address of a server whose PYTHONPATH holds the examples, as the guide says."""
    return _served


@pytest.fixture(scope="session")
def world_address() -> Iterator[str]:
    with _served("world.yaml") as address:
        yield address
