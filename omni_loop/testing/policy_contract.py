"""The contract of policies: derive from :class:`PolicyContract` and say how to make the stage and its inputs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ..connect.base import as_numpy
from ..errors import OmniLoopError
from ..stage import Payload, Stage
from .stage_driver import Ask, Driver


class PolicyContract:
    """The chunk is array ``actions`` of output ``chunk``: ``float32[horizon, action_dim]`` within ``low..high``.
    ``atol``: by how much a chunk may depend on the shape of its batch."""

    output = "chunk"
    horizon, action_dim = 16, 2
    low, high = 0.0, 512.0
    atol = 1e-3

    def make_stage(self) -> Stage:
        raise NotImplementedError

    def inputs(self, case: int) -> Mapping[str, Payload]:
        """Inputs of one tick; another ``case`` is another scene."""
        raise NotImplementedError

    @pytest.fixture
    def driver(self) -> Iterator[Driver]:
        driver = Driver(self.make_stage())
        driver.open("s", seed=5)
        yield driver
        driver.close()

    def chunk(self, outputs: Any) -> NDArray[np.float32]:
        return np.array(as_numpy(outputs[self.output].arrays["actions"]))

    def act(self, driver: Driver, case: int = 0, tick: int = 0, session: str = "s") -> NDArray[np.float32]:
        return self.chunk(driver.tick(session, tick, Ask(self.inputs(case))))

    def test_a_chunk_is_of_the_stated_shape_dtype_and_range(self, driver: Driver) -> None:
        for case in range(8):
            chunk = self.act(driver, case, tick=case)
            assert chunk.dtype == np.float32
            assert chunk.shape == (self.horizon, self.action_dim)
            assert np.isfinite(chunk).all()
            assert chunk.min() >= self.low
            assert chunk.max() <= self.high

    def test_a_chunk_says_which_weights_made_it(self, driver: Driver) -> None:
        outputs = driver.tick("s", 0, Ask(self.inputs(0)))
        assert outputs[self.output].meta["revision"] == driver.stage.revision != ""

    def test_a_chunk_depends_on_what_is_seen(self, driver: Driver) -> None:
        chunks = [self.act(driver, case) for case in range(4)]
        assert all((a != b).any() for a, b in itertools.pairwise(chunks))

    def test_a_chunk_is_a_function_of_inputs_seed_epoch_and_tick(self, driver: Driver) -> None:
        driver.open("same", seed=5)
        driver.open("other", seed=6)
        want = self.act(driver)
        for case in range(1, 4):
            self.act(driver, case, tick=case)  # whatever came between
        assert (self.act(driver) == want).all()
        assert (self.act(driver, session="same") == want).all()
        assert (self.act(driver, session="other") != want).any()
        assert (self.act(driver, tick=1) != want).any()
        driver.reset("s")
        assert (self.act(driver) != want).any()

    def test_another_stage_of_the_same_weights_gives_the_same_chunk(self, driver: Driver) -> None:
        fresh = Driver(self.make_stage())
        fresh.open("s", seed=5)
        try:
            assert (self.act(fresh) == self.act(driver)).all()
        finally:
            fresh.close()

    def test_neighbours_in_a_batch_change_nothing(self, driver: Driver) -> None:
        for n in range(3):
            driver.open(f"n{n}", seed=n)
        asks = {
            "n0": Ask(self.inputs(1)),
            "s": Ask(self.inputs(0)),
            "n1": Ask(self.inputs(2)),
            "n2": Ask(self.inputs(3)),
        }
        (alone,) = driver.batch(1, {"s": asks["s"]})
        beside = dict(zip(asks, driver.batch(1, asks), strict=True))["s"]
        assert np.abs(self.chunk(beside) - self.chunk(alone)).max() <= self.atol
        results = dict(zip(asks, driver.batch(1, {**asks, "n0": Ask({})}), strict=True))
        assert isinstance(results["n0"], Exception)
        assert np.abs(self.chunk(results["s"]) - self.chunk(alone)).max() <= self.atol

    def test_a_broken_tick_is_a_typed_error_and_changes_nothing(self, driver: Driver) -> None:
        want = self.act(driver)
        with pytest.raises(OmniLoopError):
            driver.run("s", 1, Ask({}))
        assert (self.act(driver) == want).all()

    def test_no_session_leaves_anything_in_the_stage(self, driver: Driver) -> None:
        before = _facts(driver.stage)
        for n in range(3):
            driver.open(f"n{n}", seed=n)
            self.act(driver, n, session=f"n{n}")
        assert _facts(driver.stage) == before

    def test_inputs_are_only_read(self, driver: Driver) -> None:
        inputs = self.inputs(0)
        copies = {(i, a): np.array(as_numpy(v)) for i, p in inputs.items() for a, v in p.arrays.items()}
        driver.tick("s", 0, Ask(inputs))
        for (name, array), copy in copies.items():
            assert (as_numpy(inputs[name].arrays[array]) == copy).all()


def _facts(stage: Stage) -> dict[str, Any]:
    """The stage's attributes; tensors by content, everything else by identity."""
    facts: dict[str, Any] = {}
    for name, value in vars(stage).items():
        facts[name] = value if isinstance(value, (str, int, float, bool, type(None))) else id(value)
        if hasattr(value, "state_dict"):
            facts[name] = {k: as_numpy(v).tobytes() for k, v in value.state_dict().items()}
        elif isinstance(value, (list, dict, set)):
            facts[name] = repr(value)
    return facts
