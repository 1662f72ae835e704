"""One engine for all tests that need vLLM: it takes long to start."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from omni_loop_worlds.vllm.stage import VllmContextStage, context_vllm


@pytest.fixture(scope="session")
def engine_stage() -> Iterator[VllmContextStage]:
    stage = context_vllm()
    stage.warm_up()
    yield stage
    stage.close()


@pytest.fixture
def stage(engine_stage: VllmContextStage) -> VllmContextStage:
    """The shipped stage with an empty prefix cache."""
    engine_stage.engine.forget()
    return engine_stage
