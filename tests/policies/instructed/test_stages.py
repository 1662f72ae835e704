"""The stages of an instructed policy: the act stage under the contract of policies, the instruction in paged KV."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from numpy.typing import NDArray

from omni_loop.action_queue import FROZEN, INPAINTED, JOINED, JOINS
from omni_loop.connect.base import as_numpy
from omni_loop.errors import CheckpointError, InvalidInput, OmniLoopError
from omni_loop.messages import PayloadKind
from omni_loop.stage import Outputs, Payload, Stage
from omni_loop.testing.policy_contract import PolicyContract
from omni_loop.testing.stage_driver import Ask, Driver
from omni_loop_policies.instructed.stages import instruct, instructed_act

from .conftest import TEXT

Inputs = Mapping[str, Payload]


def inputs(case: int, pixels: bool = False, told: int = 0) -> dict[str, Payload]:
    rng = np.random.default_rng(case)
    state = rng.normal(size=39).astype(np.float32)
    image = rng.integers(0, 256, (64, 64, 3)).astype(np.uint8)
    seen = {"image": image, "gripper": state[:4]} if pixels else {"state": state}
    kv = np.random.default_rng([told, 1]).normal(size=TEXT.cache).astype(np.float32)
    return {
        "observation": Payload(PayloadKind.OBSERVATION, seen),
        "kv": Payload(PayloadKind.KV, {"kv": kv}),
    }


def chunk(outputs: Outputs | Exception) -> NDArray[np.float32]:
    assert not isinstance(outputs, Exception), outputs
    return np.array(as_numpy(outputs["chunk"].arrays["actions"]))


class TestFromState(PolicyContract):
    horizon, action_dim, low, high = 16, 4, -1.0, 1.0
    atol = 1e-5
    checkpoint: ClassVar[str] = "metaworld"

    @pytest.fixture(autouse=True)
    def _folder(self, instructed_checkpoints: Path) -> None:
        self.folder = instructed_checkpoints

    def make_stage(self) -> Stage:
        return instructed_act(str(self.folder), checkpoint=self.checkpoint)

    def inputs(self, case: int) -> Inputs:
        return inputs(case, self.checkpoint == "metaworld-pixels")

    def test_what_is_told_counts(self, driver: Driver) -> None:
        told = inputs(0, self.checkpoint == "metaworld-pixels", told=1)
        assert (chunk(driver.tick("s", 0, Ask(told))) != self.act(driver)).any()

    def test_frozen_rows_are_the_chunk_before_and_the_rest_joins_it(self, driver: Driver) -> None:
        """Over many scenes, the step from the last frozen row to the first free one, against chunks made afresh."""
        jumps = {"guided": 0.0, "afresh": 0.0}
        before = self.act(driver)
        for case in range(8):
            driver.fork("s", f"child{case}")
            afresh = chunk(driver.run(f"child{case}", 1, Ask(self.inputs(case), step=6)))
            driver.discard(f"child{case}", 1)
            made = driver.tick(f"child{case}", 1, Ask(self.inputs(case), step=6, params={FROZEN: 3, JOINS: 0}))
            assert made["chunk"].meta[JOINED] == INPAINTED
            assert (chunk(made)[:3] == before[6:9]).all()
            jumps["guided"] += float(np.abs(chunk(made)[3] - before[9]).mean())
            jumps["afresh"] += float(np.abs(afresh[3] - before[9]).mean())
        assert jumps["guided"] < 0.8 * jumps["afresh"]

    def test_some_of_a_batch_join_and_others_do_not_notice(self, driver: Driver) -> None:
        for n in range(3):
            self.open(driver, f"n{n}", n)
            self.act(driver, n, session=f"n{n}")
        asks = {f"n{n}": Ask(self.inputs(n + 4), step=6) for n in range(3)}
        plain = driver.batch(1, asks)
        one = driver.batch(1, {**asks, "n1": Ask(self.inputs(5), step=6, params={FROZEN: 2, JOINS: 0})})
        for n in (0, 2):
            assert (chunk(one[n]) == chunk(plain[n])).all()
        assert (chunk(one[1]) != chunk(plain[1])).any()


class TestFromPixels(TestFromState):
    checkpoint: ClassVar[str] = "metaworld-pixels"

    def test_image_and_gripper_count(self, driver: Driver) -> None:
        seen = {case: self.inputs(case)["observation"].arrays for case in (0, 1)}
        want = self.act(driver)
        for key in ("image", "gripper"):
            mixed = Payload(PayloadKind.OBSERVATION, {**seen[0], key: seen[1][key]})
            assert (chunk(driver.tick("s", 0, Ask({**self.inputs(0), "observation": mixed}))) != want).any()


@pytest.mark.parametrize("array", [np.zeros(38, np.float32), np.zeros((2, 39), np.float32)])
def test_a_state_of_another_shape_is_refused_by_its_name(instructed_checkpoints: Path, array: object) -> None:
    driver = Driver(instructed_act(str(instructed_checkpoints)))
    driver.open("s")
    wrong = Payload(PayloadKind.OBSERVATION, {"state": array})
    with pytest.raises(OmniLoopError, match="'state' has shape"):
        driver.run("s", 0, Ask({**inputs(0), "observation": wrong}))
    driver.discard("s", 0)
    driver.close()


@pytest.fixture
def reader(instructed_checkpoints: Path) -> Iterator[Driver]:
    driver = Driver(instruct(str(instructed_checkpoints)))
    yield driver
    driver.close()


def read(driver: Driver, session: str, tick: int = 0) -> NDArray[np.float32]:
    return np.array(as_numpy(driver.tick(session, tick, Ask({}))["kv"].arrays["kv"]))


def test_an_instruction_is_read_once_and_stays(reader: Driver) -> None:
    reader.open("s", prompt="open the door")
    first = read(reader, "s")
    assert first.shape == TEXT.cache
    assert (read(reader, "s", 1) == first).all()
    assert (read(reader, "s", 2) == first).all()
    assert reader.blocks == 2


def test_sessions_of_one_instruction_share_its_blocks(reader: Driver) -> None:
    for name, text in {"a": "open the door", "b": "Open the door!", "c": "open the drawer"}.items():
        reader.open(name, prompt=text)
    a, b, c = (read(reader, name) for name in "abc")
    assert (a == b).all()
    assert (a != c).any()
    assert reader.blocks == 4


def test_a_fork_takes_the_instruction_along_and_a_reset_reads_it_anew(reader: Driver) -> None:
    reader.open("s", prompt="press the button")
    first = read(reader, "s")
    reader.fork("s", "child")
    reader.reset("s")
    assert (read(reader, "child", 1) == first).all()
    assert (read(reader, "s") == first).all()


def test_a_first_tick_that_is_discarded_leaves_nothing(reader: Driver) -> None:
    reader.open("s", prompt="press the button")
    reader.run("s", 0, Ask({}))
    reader.discard("s", 0)
    assert read(reader, "s").shape == TEXT.cache
    assert reader.blocks == 2


def test_words_nobody_knows_are_words(reader: Driver) -> None:
    for name, text in {"a": "open the door", "b": "open the frobnicated door", "c": "open the strange door"}.items():
        reader.open(name, prompt=text)
    a, b, c = (read(reader, name) for name in "abc")
    assert (a != b).any()
    assert (b == c).all()


def test_who_is_told_nothing_hears_so_and_others_go_on(reader: Driver) -> None:
    for name, text in {"silent": "", "s": "open the door"}.items():
        reader.open(name, prompt=text)
    results = reader.together(0, {"silent": Ask({}), "s": Ask({})})
    assert isinstance(results["silent"], InvalidInput)
    assert "instruction is empty" in str(results["silent"])
    assert not isinstance(results["s"], Exception)
    reader.commit("s", 0)
    reader.discard("silent", 0)


def test_a_checkpoint_that_is_not_there_is_named() -> None:
    with pytest.raises(CheckpointError, match="metaword"):
        instruct(checkpoint="metaword")
