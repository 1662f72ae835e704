"""Every pool a test made must balance when the test is over, and no segment may stay in shared memory."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from omni_loop.connect import shm
from omni_loop.runner import process
from omni_loop.runner.kv_pool import KVPool


@pytest.fixture(autouse=True)
def balanced_pools(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    pools: list[KVPool] = []
    make = KVPool.__init__

    def record(self: KVPool, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        pools.append(self)

    monkeypatch.setattr(KVPool, "__init__", record)
    yield
    for pool in pools:
        pool.check()


@pytest.fixture(autouse=True)
def prefixes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The prefixes of the segments this test may make; other processes have others."""
    made: list[str] = []

    def record() -> str:
        made.append(new_prefix())
        return made[-1]

    new_prefix = shm.new_prefix
    monkeypatch.setattr(shm, "new_prefix", record)
    monkeypatch.setattr(process, "new_prefix", record)
    yield made
    if segments(made):
        gc.collect()  # a connector nobody closed unlinks its segments when it is collected
    assert segments(made) == []


def segments(prefixes: Iterable[str]) -> list[str]:
    """Names in shared memory that start with one of ``prefixes``."""
    if not Path("/dev/shm").is_dir():
        return []
    return [p.name for p in Path("/dev/shm").iterdir() if f"/{p.name}".startswith(tuple(prefixes))]


@pytest.fixture
def toys(monkeypatch: pytest.MonkeyPatch) -> str:
    """Makes ``runner_toys`` importable here and in spawned processes; the module's name."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    return "runner_toys"
