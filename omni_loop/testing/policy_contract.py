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
    ``atol``: by how much a chunk may depend on the shape of its batch. ``stochastic``: whether it depends on session
    seed, epoch and tick; ``history``: whether on what the session saw before. Every session has ``prompt``."""

    output = "chunk"
    horizon, action_dim = 16, 2
    low, high = 0.0, 512.0
    atol = 1e-3
    stochastic, history = True, False
    prompt = ""

    def make_stage(self) -> Stage:
        raise NotImplementedError

    def inputs(self, case: int) -> Mapping[str, Payload]:
        """Inputs of one tick; another ``case`` is another scene."""
        raise NotImplementedError

    @pytest.fixture
    def driver(self) -> Iterator[Driver]:
        driver = Driver(self.make_stage(), max_sessions=12)
        self.open(driver, "s")
        yield driver
        driver.close()

    def open(self, driver: Driver, session: str, seed: int = 5) -> None:
        driver.open(session, seed, self.prompt)

    def chunk(self, outputs: Any) -> NDArray[np.float32]:
        return np.array(as_numpy(outputs[self.output].arrays["actions"]))

    def act(self, driver: Driver, case: int = 0, tick: int = 0, session: str = "s") -> NDArray[np.float32]:
        return self.chunk(driver.tick(session, tick, Ask(self.inputs(case), step=tick)))

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
        for name, seed in {"same": 5, "other": 6, "later": 5, "anew": 5}.items():
            self.open(driver, name, seed)
        want = self.act(driver)
        assert (self.act(driver, session="same") == want).all()
        driver.reset("anew")
        for name, tick in {"other": 0, "later": 1, "anew": 0}.items():
            assert (self.act(driver, tick=tick, session=name) != want).any() == self.stochastic, name

    def test_what_came_before_counts_only_for_a_policy_with_history(self, driver: Driver) -> None:
        self.open(driver, "fresh")
        for case in range(3):
            self.act(driver, case, case)
        assert (self.act(driver, 3, 3) != self.act(driver, 3, 3, "fresh")).any() == self.history

    def test_after_a_reset_nothing_of_before_is_left(self, driver: Driver) -> None:
        self.open(driver, "fresh")
        for case in range(3):
            self.act(driver, case, tick=case)
        for name in ("s", "fresh"):
            driver.reset(name)
        for case in (3, 4):
            assert (self.act(driver, case, case) == self.act(driver, case, case, "fresh")).all()

    def test_sessions_that_take_turns_are_as_if_alone(self, driver: Driver) -> None:
        alone = {}
        for n in range(3):
            self.open(driver, f"alone{n}", n)
            alone[n] = [self.act(driver, 4 * n + i, i, f"alone{n}") for i in range(4)]
        for n in range(3):
            self.open(driver, f"turn{n}", n)
        for i in range(4):
            for n in (2, 0, 1):
                assert (self.act(driver, 4 * n + i, i, f"turn{n}") == alone[n][i]).all()

    def test_a_fork_goes_on_as_its_parent_would(self, driver: Driver) -> None:
        self.open(driver, "twin")
        for tick in range(2):
            for name in ("s", "twin"):
                self.act(driver, tick, tick, name)
        driver.fork("s", "child")
        self.act(driver, 9, 2)  # what becomes of the parent does not matter
        for tick in (2, 3):
            assert (self.act(driver, tick, tick, "child") == self.act(driver, tick, tick, "twin")).all()

    def test_a_batch_of_any_size_gives_what_each_gets_alone(self, driver: Driver) -> None:
        names = [f"b{n}" for n in range(5)]
        for n, name in enumerate(names):
            self.open(driver, name, n)
            self.act(driver, n, session=name)
        asks = {name: Ask(self.inputs(n + 1), step=1) for n, name in enumerate(names)}
        alone = {name: self.chunk(driver.batch(1, {name: ask})[0]) for name, ask in asks.items()}
        for size in (2, 3, 5):
            for at in range(0, 5, size):
                part = {name: asks[name] for name in names[at : at + size]}
                for name, got in zip(part, driver.batch(1, part), strict=True):
                    assert not isinstance(got, Exception), got
                    assert np.abs(self.chunk(got) - alone[name]).max() <= self.atol

    def test_another_stage_of_the_same_weights_gives_the_same_chunk(self, driver: Driver) -> None:
        fresh = Driver(self.make_stage())
        self.open(fresh, "s")
        try:
            assert (self.act(fresh) == self.act(driver)).all()
        finally:
            fresh.close()

    def test_neighbours_in_a_batch_change_nothing(self, driver: Driver) -> None:
        for n in range(3):
            self.open(driver, f"n{n}", n)
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
        self.open(driver, "twin")
        self.act(driver, session="twin")
        self.act(driver)
        with pytest.raises(OmniLoopError):
            driver.run("s", 1, Ask({}))
        assert (self.act(driver, 1, 1) == self.act(driver, 1, 1, "twin")).all()

    def test_a_discarded_tick_changes_nothing(self, driver: Driver) -> None:
        self.open(driver, "twin")
        for name in ("s", "twin"):
            self.act(driver, session=name)
        driver.run("s", 1, Ask(self.inputs(7), step=3))
        driver.discard("s", 1)
        assert (self.act(driver, 1, 1) == self.act(driver, 1, 1, "twin")).all()

    def test_no_session_leaves_anything_in_the_stage(self, driver: Driver) -> None:
        before = _facts(driver.stage)
        for n in range(3):
            self.open(driver, f"n{n}", n)
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
