"""Demonstrations of one episode per kind, made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from omni_loop_bench.rows import Settings


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from omni_loop_envs.pusht.demos import generate

    folder = tmp_path_factory.mktemp("demos")
    counts = {"expert": 1, "perturbed": 1, "random": 1, "poses": 1}
    generate(folder / "test", counts, counts, first_seed=900_000, workers=1)
    return folder


@pytest.fixture
def settings(small_checkpoints: Path, data: Path) -> Settings:
    return Settings(str(small_checkpoints), data, quick=True)
