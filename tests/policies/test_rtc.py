"""Real-time chunking of the embedded act head: frozen rows are the same, the rest joins them, others do not notice."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from omni_loop.action_queue import FROZEN, INPAINTED, JOINED, JOINS
from omni_loop.connect.base import as_numpy
from omni_loop.stage import Outputs
from omni_loop.testing.stage_driver import Ask, Driver
from omni_loop.types import Op
from omni_loop_policies.join import MOST, guide_of, prefix_weights, strength
from omni_loop_policies.stages import act

from .test_act_stage import inputs

Chunk = NDArray[np.float32]


@pytest.fixture
def driver(small_checkpoints: Path) -> Iterator[Driver]:
    driver = Driver(act(checkpoints=str(small_checkpoints)))
    driver.open("s", 5)
    yield driver
    driver.close()


def actions(outputs: Outputs | Exception) -> Chunk:
    assert not isinstance(outputs, Exception), outputs
    return np.array(as_numpy(outputs["chunk"].arrays["actions"]))


def joining(case: int, step: int, frozen: int, joins: int = 0, op: Op = Op.INFER) -> Ask:
    return Ask(inputs(case), op, step, {FROZEN: frozen, JOINS: joins})


def test_frozen_rows_are_the_chunk_before_bit_for_bit(driver: Driver) -> None:
    before = actions(driver.tick("s", 0, Ask(inputs(0))))
    made = driver.tick("s", 1, joining(1, 6, 3))
    assert (actions(made)[:3] == before[6:9]).all()
    assert made["chunk"].meta[JOINED] == INPAINTED


def test_the_rest_joins_them_with_less_of_a_jump(small_checkpoints: Path) -> None:
    """Over many scenes, the step from the last frozen row to the first free one, against chunks made afresh."""
    jumps = {"guided": 0.0, "afresh": 0.0}
    for case in range(8):
        driver = Driver(act(checkpoints=str(small_checkpoints)))
        driver.open("s", case)
        before = actions(driver.tick("s", 0, Ask(inputs(0))))
        afresh = actions(driver.run("s", 1, Ask(inputs(case), step=6)))
        driver.discard("s", 1)
        guided = actions(driver.tick("s", 1, joining(case, 6, 3)))
        jumps["guided"] += float(np.abs(guided[3] - before[9]).mean())
        jumps["afresh"] += float(np.abs(afresh[3] - before[9]).mean())
        driver.close()
    assert jumps["guided"] < 0.6 * jumps["afresh"]


def test_nobody_asks_and_nothing_changes(driver: Driver, small_checkpoints: Path) -> None:
    """A chunk depends on the one before only where the tick says so, to the bit."""
    fresh = Driver(act(checkpoints=str(small_checkpoints)))
    fresh.open("s", 5)
    driver.tick("s", 0, Ask(inputs(0)))
    fresh.tick("s", 0, Ask(inputs(3)))
    assert (
        actions(driver.tick("s", 1, Ask(inputs(1), step=6))) == actions(fresh.tick("s", 1, Ask(inputs(1), step=6)))
    ).all()
    fresh.close()


def test_it_is_deterministic(driver: Driver) -> None:
    driver.open("twin", 5)
    chunks = []
    for name in ("s", "twin"):
        driver.tick(name, 0, Ask(inputs(0)))
        chunks.append(actions(driver.tick(name, 1, joining(1, 6, 3))))
    assert (chunks[0] == chunks[1]).all()


def test_guided_and_others_share_a_batch(driver: Driver) -> None:
    """Each as alone but for rounding; those without guidance bit for bit as if nobody was guided."""
    for n in range(4):
        driver.open(f"s{n}", n)
        driver.tick(f"s{n}", 0, Ask(inputs(n)))
    asks = {"s0": Ask(inputs(4), step=6), "s1": joining(5, 6, 3), "s2": Ask(inputs(6), step=6), "s3": joining(7, 2, 0)}
    together = dict(zip(asks, driver.batch(1, asks), strict=True))
    plain = {name: Ask(ask.inputs, step=ask.step) for name, ask in asks.items()}
    beside = dict(zip(plain, driver.batch(1, plain), strict=True))
    for name in ("s0", "s2"):
        assert (actions(together[name]) == actions(beside[name])).all()
    for name, ask in asks.items():
        (alone,) = driver.batch(1, {name: ask})
        assert np.abs(actions(together[name]) - actions(alone)).max() <= 1e-2  # px
        assert (JOINED in together[name]["chunk"].meta) == (FROZEN in ask.params)  # type: ignore[index,union-attr]


def test_what_was_never_committed_is_not_joined(driver: Driver) -> None:
    before = actions(driver.tick("s", 0, Ask(inputs(0))))
    driver.run("s", 1, Ask(inputs(9), step=4))
    driver.discard("s", 1)
    assert (actions(driver.tick("s", 1, joining(1, 6, 2)))[:2] == before[6:8]).all()


def test_a_fork_joins_its_parents_chunk_and_a_reset_none(driver: Driver) -> None:
    before = actions(driver.tick("s", 0, Ask(inputs(0))))
    driver.fork("s", "child")
    driver.tick("s", 1, Ask(inputs(1), step=6))
    assert (actions(driver.tick("child", 1, joining(1, 6, 2)))[:2] == before[6:8]).all()
    driver.reset("s")
    assert JOINED not in driver.tick("s", 0, joining(1, 6, 2))["chunk"].meta


def test_the_second_seam_joins_what_was_sent_and_not_what_the_model_thought(driver: Driver) -> None:
    driver.tick("s", 0, Ask(inputs(0)))
    second = actions(driver.tick("s", 1, joining(1, 6, 5)))
    third = actions(driver.tick("s", 2, joining(2, 7, 8, joins=6)))
    assert (third[:8] == second[1:9]).all()


def test_an_imagined_chunk_is_not_joined(driver: Driver) -> None:
    before = actions(driver.tick("s", 0, Ask(inputs(0))))
    driver.tick("s", 1, Ask(inputs(1), Op.PREDICT, 3))
    assert (actions(driver.tick("s", 2, joining(2, 6, 2)))[:2] == before[6:8]).all()


def test_somebody_elses_chunk_is_not_joined(driver: Driver) -> None:
    """The session was sent a chunk of another step than this stage's last: what it holds is not what is executed."""
    driver.tick("s", 0, Ask(inputs(0)))
    assert JOINED not in driver.tick("s", 1, joining(1, 6, 2, joins=4))["chunk"].meta


def test_several_samples_join_nothing(driver: Driver) -> None:
    driver.tick("s", 0, Ask(inputs(0)))
    made = driver.tick("s", 1, Ask(inputs(1), step=6, params={FROZEN: 3, JOINS: 0, "samples": 4}))
    assert JOINED not in made["chunk"].meta
    assert made["chunks"].arrays["actions"].shape == (4, 16, 2)


def test_weights_are_the_papers() -> None:
    weights = prefix_weights(3, 10, 16)
    c = (10 - np.arange(3, 10)) / (10 - 3 + 1)
    assert torch.equal(weights[:3], torch.ones(3))
    assert np.allclose(weights[3:10].numpy(), c * np.expm1(c) / np.expm1(1.0))
    assert not weights[10:].any()
    assert (weights.diff() <= 0).all()
    assert torch.equal(prefix_weights(16, 16, 16), torch.ones(16))


def test_strength_is_bounded_where_the_papers_is_infinite() -> None:
    assert strength(0.0) == strength(1e-3) == MOST
    assert strength(0.5) == pytest.approx(2.0)
    assert strength(1 - 1e-9) == MOST


def test_a_batch_that_joins_nothing_has_no_guide() -> None:
    assert guide_of([None, None], [0, 0], 16) is None
