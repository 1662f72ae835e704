"""The act stage under the contract of policies, and its ablations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from numpy.typing import NDArray

from omni_loop import registry
from omni_loop.connect.base import as_numpy
from omni_loop.errors import CheckpointError, ConfigError, InvalidInput, Reason, StageFailed
from omni_loop.messages import PayloadKind
from omni_loop.stage import Outputs, Payload
from omni_loop.testing.policy_contract import PolicyContract
from omni_loop.testing.stage_driver import Ask, Driver
from omni_loop_policies.stages import ActStage, act

Inputs = Mapping[str, Payload]


def inputs(case: int, history: float = 1.0) -> dict[str, Payload]:
    rng = np.random.default_rng(case)
    points, before = rng.uniform(-1, 1, (9, 2)), rng.uniform(-1, 1, 2)
    scene = {"points": points.astype(np.float32), "agent_before": before.astype(np.float32)}
    kv = rng.normal(size=(2, 2, 32, 2, 16)).astype(np.float32)
    return {
        "scene": Payload(PayloadKind.SCENE, scene, {"history": history}),
        "kv": Payload(PayloadKind.KV, {"kv": kv}),
    }


def with_array(given: Inputs, payload: str, array: str, value: Any) -> dict[str, Payload]:
    old = given[payload]
    return {**given, payload: Payload(old.kind, {**old.arrays, array: value}, old.meta)}


class TestActStage(PolicyContract):
    options: ClassVar[Mapping[str, bool]] = {}

    @pytest.fixture(autouse=True)
    def _folder(self, small_checkpoints: Path) -> None:
        self.folder = str(small_checkpoints)

    def make_stage(self) -> ActStage:
        return act(checkpoints=self.folder, **self.options)

    def inputs(self, case: int) -> Inputs:
        return inputs(case)

    def given(self, driver: Driver, asked: Inputs) -> Any:
        return self.chunk(driver.tick("s", 0, Ask(asked)))

    def test_it_reads_context_and_history(self, driver: Driver) -> None:
        want, asked = self.act(driver), inputs(0)
        assert (self.given(driver, with_array(asked, "kv", "kv", inputs(1)["kv"].arrays["kv"])) != want).any()
        moved = with_array(asked, "scene", "agent_before", np.zeros(2, np.float32))
        assert (self.given(driver, moved) != want).any()
        assert (self.given(driver, inputs(0, history=0.0)) != want).any()

    def test_without_history_the_position_before_does_not_count(self, driver: Driver) -> None:
        asked = inputs(0, history=0.0)
        moved = with_array(asked, "scene", "agent_before", np.zeros(2, np.float32))
        assert (self.given(driver, asked) == self.given(driver, moved)).all()

    def test_actions_beyond_the_table_are_clipped(self, driver: Driver) -> None:
        points = np.full((9, 2), 40, np.float32)
        chunk = self.given(driver, with_array(inputs(0), "scene", "points", points))
        assert ((chunk == 0) | (chunk == 512)).mean() > 0.5


class TestWithoutContext(TestActStage):
    options: ClassVar[Mapping[str, bool]] = {"use_context": False}

    def test_it_reads_context_and_history(self, driver: Driver) -> None:
        want, asked = self.act(driver), inputs(0)
        assert (self.given(driver, with_array(asked, "kv", "kv", inputs(1)["kv"].arrays["kv"])) == want).all()
        assert (self.given(driver, inputs(0, history=0.0)) != want).any()


class TestWithoutHistory(TestActStage):
    options: ClassVar[Mapping[str, bool]] = {"use_history": False}

    def test_it_reads_context_and_history(self, driver: Driver) -> None:
        want, asked = self.act(driver), inputs(0)
        assert (self.given(driver, with_array(asked, "kv", "kv", inputs(1)["kv"].arrays["kv"])) != want).any()
        assert (self.given(driver, inputs(0, history=0.0)) == want).all()
        moved = with_array(asked, "scene", "agent_before", np.zeros(2, np.float32))
        assert (self.given(driver, moved) == want).all()


@pytest.fixture
def sixteen(small_checkpoints: Path) -> Iterator[Driver]:
    driver = Driver(act(checkpoints=str(small_checkpoints)), max_sessions=24)
    for n in range(24):
        driver.open(f"s{n}", seed=n)
    yield driver
    driver.close()


def chunks(results: Sequence[Outputs | Exception]) -> list[NDArray[np.float32]]:
    made = []
    for result in results:
        assert not isinstance(result, Exception), result
        made.append(as_numpy(result["chunk"].arrays["actions"]))
    return made


def test_a_batch_gives_each_session_what_it_gets_alone(sixteen: Driver) -> None:
    asks = {f"s{n}": Ask(inputs(n, history=n % 2)) for n in range(16)}
    alone = [chunks(sixteen.batch(3, {name: ask}))[0] for name, ask in asks.items()]
    for size in (2, 3, 5, 16):
        for at in range(0, 16, size):
            part = dict(list(asks.items())[at : at + size])
            for got, want in zip(chunks(sixteen.batch(3, part)), alone[at : at + size], strict=True):
                assert np.abs(got - want).max() <= 1e-5 * 256  # in px; 1e-5 where the model works


@pytest.mark.parametrize("size", [2, 5, 16])
def test_other_neighbours_in_a_batch_of_the_same_size_change_no_bit(sixteen: Driver, size: int) -> None:
    asks = {"s0": Ask(inputs(0)), **{f"s{n}": Ask(inputs(n)) for n in range(1, size)}}
    others = {"s0": Ask(inputs(0)), **{f"s{n + 8}": Ask(inputs(n + 50, history=0.0)) for n in range(1, size)}}
    one, two = (chunks(sixteen.batch(3, batch)) for batch in (asks, others))
    assert (one[0] == two[0]).all()
    assert (one[1] != two[1]).any()


BROKEN: dict[str, dict[str, Payload]] = {
    "no input": {},
    "no context": {"scene": inputs(0)["scene"]},
    "a keypoint too many": with_array(inputs(0), "scene", "points", np.zeros((10, 2), np.float32)),
    "a position of three": with_array(inputs(0), "scene", "agent_before", np.zeros(3, np.float32)),
    "a context of fewer tokens": with_array(inputs(0), "kv", "kv", np.zeros((2, 2, 31, 2, 16), np.float32)),
    "a context of more layers": with_array(inputs(0), "kv", "kv", np.zeros((3, 2, 32, 2, 16), np.float32)),
    "a context of text": with_array(inputs(0), "kv", "kv", np.full((2, 2, 32, 2, 16), "x")),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_item_fails_alone(sixteen: Driver, case: str) -> None:
    asks = {f"s{n}": Ask(inputs(n)) for n in range(3)}
    want = chunks(sixteen.batch(1, asks))
    results = sixteen.batch(1, {"s3": Ask(BROKEN[case]), **asks})
    assert isinstance(results[0], Exception)
    for got, chunk in zip(chunks(results[1:]), want, strict=True):
        assert (got == chunk).all()
    assert all(isinstance(result, Exception) for result in sixteen.batch(1, {"s3": Ask(BROKEN[case])}))


def test_what_is_not_finite_stays_in_its_own_chunk(sixteen: Driver) -> None:
    asks = {f"s{n}": Ask(inputs(n)) for n in range(3)}
    want = chunks(sixteen.batch(1, asks))
    spoiled = np.full((2, 2, 32, 2, 16), np.nan, np.float32)
    got = sixteen.batch(1, {**asks, "s1": Ask(with_array(inputs(1), "kv", "kv", spoiled))})
    assert (chunks([got[0], got[2]]) == np.stack([want[0], want[2]])).all()
    assert isinstance(got[1], StageFailed)
    assert got[1].reason is Reason.BAD_OUTPUT


def test_an_unknown_option_is_named() -> None:
    with pytest.raises(ConfigError, match="use_context"):
        registry.build(registry.STAGES, "act", {"use_contxt": True})


def test_another_checkpoint_of_the_folder_is_served(small_checkpoints: Path, tmp_path: Path) -> None:
    (tmp_path / "act-small").symlink_to(small_checkpoints / "act")
    assert act(checkpoints=str(tmp_path), checkpoint="act-small").revision == act(str(small_checkpoints)).revision
    with pytest.raises(CheckpointError, match="act-smal"):
        act(checkpoints=str(tmp_path), checkpoint="act-smal")


class TestSamples:
    """Several chunks of one tick."""

    @pytest.fixture
    def driver(self, small_checkpoints: Path) -> Iterator[Driver]:
        driver = Driver(act(checkpoints=str(small_checkpoints)))
        for session in ("s", "t", "u"):
            driver.open(session, seed=ord(session))
        yield driver
        driver.close()

    def test_a_sample_does_not_depend_on_their_number(self, driver: Driver) -> None:
        plain = driver.run("s", 0, Ask(inputs(0)))
        driver.discard("s", 0)
        several = {}
        for n in (1, 2, 6):
            several[n] = driver.run("s", 0, Ask(inputs(0), params={"samples": n}))
            driver.discard("s", 0)
        assert set(plain) == {"chunk"}
        first = as_numpy(plain["chunk"].arrays["actions"])
        for n, outputs in several.items():
            chunks = as_numpy(outputs["chunks"].arrays["actions"])
            assert chunks.shape == (n, *first.shape)
            assert outputs["chunks"].meta == outputs["chunk"].meta == plain["chunk"].meta
            assert (as_numpy(outputs["chunk"].arrays["actions"]) == chunks[0]).all()
            np.testing.assert_allclose(chunks[0], first, rtol=0, atol=1e-2)
        six = as_numpy(several[6]["chunks"].arrays["actions"])
        np.testing.assert_allclose(as_numpy(several[2]["chunks"].arrays["actions"]), six[:2], rtol=0, atol=1e-2)
        assert len({chunk.tobytes() for chunk in six}) == 6

    def test_sessions_with_and_without_samples_meet_in_a_batch(self, driver: Driver) -> None:
        asks = {
            "s": Ask(inputs(0), params={"samples": 3}),
            "t": Ask(inputs(1)),
            "u": Ask(inputs(2), params={"samples": 5}),
        }
        together = driver.together(0, asks)
        for session, asked in asks.items():
            driver.discard(session, 0)
            alone, met = driver.run(session, 0, asked), together[session]
            driver.discard(session, 0)
            assert not isinstance(met, Exception)
            assert met.keys() == alone.keys()
            for name, payload in alone.items():
                given, want = as_numpy(met[name].arrays["actions"]), as_numpy(payload.arrays["actions"])
                np.testing.assert_allclose(given, want, rtol=0, atol=1e-2)

    @pytest.mark.parametrize("samples", [0, 65])
    def test_their_number_is_bounded(self, driver: Driver, samples: int) -> None:
        with pytest.raises(InvalidInput, match=f"samples is {samples}"):
            driver.run("s", 0, Ask(inputs(0), params={"samples": samples}))
