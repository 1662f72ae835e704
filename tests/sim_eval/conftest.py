from __future__ import annotations

from collections.abc import Iterator

import pytest

from omni_loop import registry

from .toy import ToyEnv


@pytest.fixture(autouse=True)
def toy_env() -> Iterator[None]:
    with registry.registered(registry.ENVS, "toy", ToyEnv):
        yield
