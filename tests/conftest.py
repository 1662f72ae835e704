"""For the whole suite: books that balance after every test, and small models saved as checkpoints.

The models have random weights: what they compute is meaningless, how they compute is not.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

_KEEPERS = {"omni_loop.runner.kv_pool": "KVPool", "omni_loop.runner.state": "StateManager"}
_alive: weakref.WeakSet[Any] = weakref.WeakSet()
_watched: set[str] = set()
_planting = False


def pytest_runtest_setup(item: pytest.Item) -> None:
    """What is made under a planted bug need not balance, and may live longer than its test."""
    global _planting
    _planting = "mutation" in item.nodeid


@pytest.fixture(autouse=True)
def books_balance() -> Iterator[None]:
    """Every pool and state manager of this process that is still alive passes its own check after every test:
    free + cached + owned = total, and reference counts equal the references held."""
    for module, name in _KEEPERS.items():
        if module in sys.modules and module not in _watched:  # not imported here: light tests load no torch
            _watch(getattr(sys.modules[module], name))
            _watched.add(module)
    yield
    for keeper in tuple(_alive):
        _check(keeper)


def _watch(kind: type[Any]) -> None:
    make = kind.__init__

    def recording(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        if not _planting:
            _alive.add(self)

    kind.__init__ = recording  # type: ignore[misc]


def _check(keeper: Any) -> None:
    """The invariant holds between commands; a server's thread may still be at the last one."""
    for attempt in range(20):
        try:
            keeper.check()
            return
        except Exception:
            if attempt == 19:
                raise
            time.sleep(0.05)


@pytest.fixture(scope="session")
def small_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the parts ``codec``, ``world``, ``context`` and ``act``, which fit each other."""
    # Only here: tests of the light parts must not load torch.
    import torch
    from pydantic import BaseModel
    from torch import nn

    from omni_loop.training.checkpoint import save
    from omni_loop_policies.flow import ActConfig, ActHead
    from omni_loop_worlds.codec import CodecConfig, FrameCodec
    from omni_loop_worlds.context.llama import ContextConfig, ContextModel
    from omni_loop_worlds.dit import DiT, DiTConfig

    context = ContextConfig(
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        head_dim=16,
        intermediate_size=64,
        window_ticks=3,
        done_bias=0.7,
    )
    act = ActConfig(width=32, condition=32, blocks=2, query_heads=4, context_layers=2, context_head_dim=16, steps=3)
    parts: dict[str, tuple[Callable[..., nn.Module], BaseModel]] = {
        "codec": (FrameCodec, CodecConfig(width=16, inner=8)),
        "world": (DiT, DiTConfig(width=32, layers=2, heads=2, window=4)),
        "context": (ContextModel, context),
        "act": (ActHead, act),
    }
    folder = tmp_path_factory.mktemp("checkpoints")
    generator = torch.Generator().manual_seed(0)
    for name, (kind, config) in parts.items():
        module = kind(config)
        _randomise(module, generator)
        save(folder / name, config.model_dump(mode="json"), module.state_dict(), {}, "small and random\n")
    return folder


def _randomise(module, generator) -> None:  # type: ignore[no-untyped-def]
    """Also what is zero or one before training: with it a block, a gate or an action would do nothing."""
    import torch

    with torch.no_grad():
        for p in module.parameters():
            if p.ndim == 1 and bool((p == p[0]).all()):
                p.add_(torch.randn(p.shape, generator=generator) * 0.2)
            else:
                scale = 0.3 if bool((p == 0).all()) else float(p.std())
                p.copy_(torch.randn(p.shape, generator=generator) * scale)
        for name, buffer in module.named_buffers():
            if name == "latent_std":
                buffer.fill_(0.5)
