"""Reusing keys and values changes time, not results: the block pool against recomputing everything from scratch
under the banded causal mask."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from omni_loop.messages import PayloadKind
from omni_loop.stage import Payload, StageItem
from omni_loop.testing.stage_driver import Ask, Driver
from omni_loop.types import Op
from omni_loop_worlds.dit import DiT, band_mask, noise_levels
from omni_loop_worlds.rollout import DenseRollout
from omni_loop_worlds.stages import FramesStage, frames
from omni_loop_worlds.stages.shared import encode, to_unit

SEED, REAL, IMAGINED = 5, 10, 5  # frames; the window is 4


@pytest.fixture
def stage(small_checkpoints: Path) -> FramesStage:
    return frames(checkpoints=str(small_checkpoints))


@pytest.fixture
def driver(stage: FramesStage) -> Iterator[Driver]:
    driver = Driver(stage)
    driver.open("s", seed=SEED)
    yield driver
    driver.close()


@pytest.fixture
def actions() -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng(1).uniform(0, 512, (REAL + IMAGINED, 2)).astype(np.float32)


@pytest.fixture
def images() -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(0).integers(0, 256, (REAL, 6, 6, 3), np.uint8).repeat(16, 1).repeat(16, 2)


def observe(driver: Driver, images: Any, actions: Any, runs: tuple[int, ...]) -> None:
    first = 0
    for tick, n in enumerate(runs):
        executed = actions[max(0, first - 1) : first + n - 1]
        arrays = {"image": images[first : first + n], "executed": executed}
        ask = Ask(
            {"observation": Payload(PayloadKind.OBSERVATION, arrays)}, Op.RECONDITION, first, {"first_step": first}
        )
        driver.tick("s", tick, ask)
        first += n


def imagine(driver: Driver, actions: Any, tick: int) -> Tensor:
    ask = Ask({"actions": Payload(PayloadKind.ACTIONS, {"actions": actions})}, Op.PREDICT, REAL - 1)
    return torch.as_tensor(driver.tick("s", tick, ask)["latents"].arrays["latents"])


@torch.no_grad()
def recompute(model: DiT, latents: Tensor, led: Tensor, level: float = 0.0, offset: int = 0) -> Tensor:
    """Residuals ``[n, 16, c]`` of ``latents [n, 16, c]``, the last of them at ``level``; ``led [n - 1, 2]``."""
    c, n = model.config, len(latents)
    prev = torch.cat([latents[:1], latents[:-1]])
    levels, known = torch.zeros(1, n), torch.ones(1, n, dtype=torch.bool)
    levels[0, -1], known[0, 0] = level, False
    action = torch.cat([torch.zeros(1, 2), led])[None]
    mask = band_mask(n, c.tokens, c.window)
    return model.streams(latents[None], prev[None], levels, action, known, torch.arange(n) + offset, mask)[0]


def record_clean_passes(stage: FramesStage, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Residuals of the passes at level 0, which write the blocks."""
    made: list[Tensor] = []
    frame = stage.model.frame

    def recorded(x: Tensor, prev: Tensor, level: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        *others, quiet = rest  # those nobody wants too, here
        residual, kv = frame(x, prev, level, *others)
        made.extend(residual[level[:, 0] == 0, 0])
        return residual[len(x) - len(others[-1]) :] if quiet else residual, kv

    monkeypatch.setattr(stage.model, "frame", recorded)
    return made


@pytest.mark.parametrize("runs", [(REAL,), (1,) * REAL, (3, 1, 6)])
def test_clean_passes_equal_the_banded_recompute(
    stage: FramesStage,
    driver: Driver,
    images: Any,
    actions: Any,
    runs: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = record_clean_passes(stage, monkeypatch)
    observe(driver, images, actions, runs)
    want = recompute(stage.model, encode(stage.codec, images), to_unit(actions[: REAL - 1]))
    got = torch.stack(made)
    assert got.abs().mean() > 0.1  # the weights do something
    assert (got - want).abs().max() <= 1e-5


def test_a_truncated_window_is_another_function(stage: FramesStage, images: Any, actions: Any) -> None:
    """So the tests here would notice a window that forgets what its frames have seen themselves."""
    z, led, w = encode(stage.codec, images), to_unit(actions[: REAL - 1]), stage.model.config.window
    banded = recompute(stage.model, z, led)[-1]
    # Of the window's frames only the first is new here: give it its true predecessor, so that only the past differs.
    truncated = recompute(stage.model, z[-w - 1 :], led[-w:])[-1]
    assert (banded - truncated).abs().max() > 1e-4


def test_positions_have_no_end(
    stage: FramesStage, driver: Driver, images: Any, actions: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = record_clean_passes(stage, monkeypatch)
    observe(driver, images, actions, (REAL,))
    far = recompute(stage.model, encode(stage.codec, images), to_unit(actions[: REAL - 1]), offset=100_000)
    assert (torch.stack(made) - far).abs().max() <= 5e-4 * far.abs().max()  # float32 cannot say angles of 1e5 better


def test_denoised_frames_equal_the_banded_recompute(
    stage: FramesStage, driver: Driver, images: Any, actions: Any
) -> None:
    observe(driver, images, actions, (REAL,))
    got = imagine(driver, actions[REAL - 1 : -1], tick=1)
    assert len(got) == IMAGINED
    item = StageItem("s", SEED, 0, 1, Op.PREDICT, 0, "", {}, {}, None)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(item.noise_seed("frames"))
    z, led = encode(stage.codec, images), to_unit(actions)
    for i in range(IMAGINED):
        x = torch.randn(1, 1, *z.shape[1:], generator=generator)[0]
        for now, then in pairwise(noise_levels(stage.steps)):
            residual = recompute(stage.model, torch.cat([z, x]), led[: len(z)], level=now)[-1:]
            clean = z[-1:] + residual
            x = clean + (then / now) * (x - clean)
        assert (got[i] - x[0]).abs().max() <= 1e-5
        z = torch.cat([z, x])


def test_the_dense_rollout_equals_the_pool(stage: FramesStage, driver: Driver, images: Any, actions: Any) -> None:
    observe(driver, images, actions, (REAL,))
    got = imagine(driver, actions[REAL - 1 : -1], tick=1)
    item = StageItem("s", SEED, 0, 1, Op.PREDICT, 0, "", {}, {}, None)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(item.noise_seed("frames"))
    z, led, rollout = encode(stage.codec, images), to_unit(actions), DenseRollout(stage.model, 1)
    for t in range(REAL):
        rollout.observe(z[t : t + 1], led[t - 1 : t] if t else None)
    for i in range(IMAGINED):
        action = led[REAL - 1 + i : REAL + i]
        x = rollout.predict(action, torch.randn(1, 1, *z.shape[1:], generator=generator)[0], stage.steps)
        assert (got[i] - x[0]).abs().max() <= 1e-5
        rollout.observe(x, action)
