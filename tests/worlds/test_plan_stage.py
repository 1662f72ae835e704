"""Plans and futures through the frames stage, the way a runner drives it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from omni_loop.errors import InvalidInput, OmniLoopError, StateError, TensorError, UnknownName
from omni_loop.messages import PayloadKind
from omni_loop.stage import Outputs, Payload
from omni_loop.testing.stage_driver import Ask, Driver
from omni_loop.types import Op
from omni_loop_worlds.futures import Futures
from omni_loop_worlds.judge import GoalCost, Judge
from omni_loop_worlds.stages import ChooseStage, FramesStage, choose, frames
from omni_loop_worlds.stages.plan import AHEAD, judge_of
from omni_loop_worlds.stages.shared import encode, to_unit

SEED, REAL, STEPS = 5, 6, 3  # of the window's 4 frames; steps of a plan
Images, Actions = NDArray[np.uint8], NDArray[np.float32]


@pytest.fixture
def stage(small_checkpoints: Path) -> FramesStage:
    """One denoise step, as in a search."""
    return frames(checkpoints=str(small_checkpoints), denoise_steps=1)


@pytest.fixture
def actions() -> Actions:
    return np.random.default_rng(1).uniform(0, 512, (REAL, 2)).astype(np.float32)


@pytest.fixture
def images() -> Images:
    return np.random.default_rng(0).integers(0, 256, (REAL + 1, 6, 6, 3), np.uint8).repeat(16, 1).repeat(16, 2)


@pytest.fixture
def driver(stage: FramesStage, images: Images, actions: Actions) -> Iterator[Driver]:
    driver = Driver(stage)
    for session in ("s", "twin"):
        driver.open(session, seed=SEED)
        arrays = {"image": images[:REAL], "executed": actions[: REAL - 1]}
        seen = Payload(PayloadKind.OBSERVATION, arrays)
        driver.tick(session, 0, Ask({"observation": seen}, Op.RECONDITION, 0, {"first_step": 0}))
    yield driver
    driver.close()


def ask(goal: Images | None, init: Actions | None = None, **params: Any) -> Ask:
    arrays = {name: array for name, array in (("goal", goal), ("init", init)) if array is not None}
    chosen = {"horizon": STEPS, "candidates": 8, "iterations": 3, "method": "cem", "budget_ms": 0.0, **params}
    return Ask({"goal": Payload(PayloadKind.GOAL, arrays)}, Op.PLAN, REAL - 1, chosen)


def predict(driver: Driver, session: str, tick: int, actions: Tensor) -> Tensor:
    given = Payload(PayloadKind.ACTIONS, {"actions": actions.numpy()})
    outputs = driver.run(session, tick, Ask({"actions": given}, Op.PREDICT, REAL - 1))
    driver.discard(session, tick)
    return torch.as_tensor(outputs["latents"].arrays["latents"])


def check_plan(outputs: Outputs) -> Tensor:
    found = outputs["plan"]
    actions = torch.as_tensor(found.arrays["actions"])
    assert found.kind is PayloadKind.ACTIONS
    assert actions.shape == (STEPS, 2)
    assert actions.dtype == torch.float32
    assert 0 <= actions.min() <= actions.max() <= 512
    assert {name: found.meta[name] for name in ("candidates", "iterations", "horizon", "out_of_time")} == {
        "candidates": 8, "iterations": 3, "horizon": STEPS, "out_of_time": False,
    }  # fmt: skip
    assert found.meta["cost"] <= found.meta["first_cost"]
    assert outputs["latents"].arrays["latents"].shape == (STEPS, 16, 72)
    assert outputs["latents"].meta["first_step"] == REAL
    return actions


@pytest.mark.parametrize("method", ["cem", "mppi"])
def test_a_plan_comes_true(driver: Driver, stage: FramesStage, images: Images, method: str) -> None:
    """What it promises is what the stage itself predicts under its actions, with the cost it says."""
    outputs = driver.run("s", 1, ask(images[-1], method=method))
    driver.discard("s", 1)
    actions = check_plan(outputs)
    promised = torch.as_tensor(outputs["latents"].arrays["latents"])
    torch.testing.assert_close(predict(driver, "s", 1, actions), promised, rtol=0, atol=1e-4)
    goal = encode(stage.codec, images[-1:])[0]
    cost = float(GoalCost(stage.codec, goal)(promised[None], to_unit(actions)[None]))
    assert cost == pytest.approx(outputs["plan"].meta["cost"], abs=1e-5)


def test_a_plan_changes_nothing(driver: Driver, images: Images, actions: Actions) -> None:
    before = driver.blocks
    for tick in (1, 2):
        check_plan(driver.run("s", tick, ask(images[-1])))
        driver.discard("s", tick)
    assert driver.blocks == before
    ahead = torch.from_numpy(actions[:2])
    assert (predict(driver, "s", 3, ahead) == predict(driver, "twin", 3, ahead)).all()


def test_equal_plans_are_equal_and_ticks_differ(driver: Driver, images: Images) -> None:
    runs = []
    for session, tick in (("s", 1), ("twin", 1), ("s", 2)):
        runs.append(check_plan(driver.run(session, tick, ask(images[-1]))))
        driver.discard(session, tick)
    assert (runs[0] == runs[1]).all()
    assert (runs[0] != runs[2]).any()


def test_it_begins_at_init(driver: Driver, stage: FramesStage, images: Images, actions: Actions) -> None:
    """What one round finds is no worse than ``init``, and another thing than from the agent's place."""
    init = actions[:STEPS]
    found, still = (
        driver.tick("s", tick, ask(images[-1], begin, iterations=1, candidates=4))
        for tick, begin in ((1, init), (1, None))
    )
    cost = GoalCost(stage.codec, encode(stage.codec, images[-1:])[0])
    imagined = predict(driver, "s", 1, torch.from_numpy(init))
    assert found["plan"].meta["cost"] <= float(cost(imagined[None], to_unit(init)[None])) + 1e-5
    assert found["plan"].meta["cost"] != still["plan"].meta["cost"]


def test_without_a_goal_it_is_for_progress(driver: Driver, small_checkpoints: Path) -> None:
    outputs = driver.run("s", 1, ask(None))
    driver.discard("s", 1)
    actions = check_plan(outputs)
    judge = judge_of(str(small_checkpoints), "cpu")
    last = torch.as_tensor(outputs["latents"].arrays["latents"])[-1:]
    progress = judge.read(judge.past("push the T onto the goal"), last, to_unit(actions)[None]).progress
    assert 1 - float(progress) == pytest.approx(outputs["plan"].meta["cost"], abs=1e-5)


def test_plans_run_beside_other_sessions(driver: Driver, images: Images, actions: Actions) -> None:
    """A plan and a prediction of another session in one lane give what each gives alone."""
    given = Payload(PayloadKind.ACTIONS, {"actions": actions[:2]})
    both = driver.together(1, {"s": ask(images[-1]), "twin": Ask({"actions": given}, Op.PREDICT, REAL - 1)})
    for session in ("s", "twin"):
        driver.discard(session, 1)
    assert not isinstance(both["s"], Exception)
    assert not isinstance(both["twin"], Exception)
    alone = driver.run("s", 1, ask(images[-1]))
    driver.discard("s", 1)
    assert (check_plan(both["s"]) == check_plan(alone)).all()
    predicted = torch.as_tensor(both["twin"]["latents"].arrays["latents"])
    assert (predicted == predict(driver, "twin", 1, torch.from_numpy(actions[:2]))).all()


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"method": "cen"}, UnknownName, "Did you mean 'cem'"),
        ({"horizon": 17}, InvalidInput, "horizon is 17"),
        ({"candidates": 2}, InvalidInput, "candidates is 2"),
        ({"goal": np.zeros((64, 64, 3), np.uint8)}, TensorError, "goal"),
        ({"goal": np.zeros((96, 96, 3), np.float32)}, TensorError, "goal"),
        ({"init": np.zeros((STEPS + 1, 2), np.float32)}, TensorError, "init"),
    ],
)
def test_what_cannot_be_planned_is_said(
    driver: Driver, images: Images, change: dict[str, Any], error: type[OmniLoopError], text: str
) -> None:
    wanted: dict[str, Any] = {"goal": images[-1], **change}
    with pytest.raises(error, match=text):
        driver.run("s", 1, ask(**wanted))
    check_plan(driver.run("s", 1, ask(images[-1])))
    driver.discard("s", 1)


def test_there_must_be_a_frame(stage: FramesStage, images: Images) -> None:
    driver = Driver(stage)
    driver.open("new")
    with pytest.raises(StateError, match="no frame to go on from"):
        driver.run("new", 0, ask(images[-1]))
    driver.close()


def test_the_distance_to_a_goal_is_an_option(small_checkpoints: Path, images: Images) -> None:
    with pytest.raises(UnknownName, match="Did you mean 'latents'"):
        frames(checkpoints=str(small_checkpoints), plan_cost="latent")
    other = Driver(frames(checkpoints=str(small_checkpoints), denoise_steps=1, plan_cost="latents"))
    other.open("s", seed=SEED)
    seen = Payload(PayloadKind.OBSERVATION, {"image": images[:1], "executed": np.zeros((0, 2), np.float32)})
    other.tick("s", 0, Ask({"observation": seen}, Op.RECONDITION, REAL - 1, {"first_step": REAL - 1}))
    by_latents = other.run("s", 1, ask(images[-1]))
    latents = torch.as_tensor(by_latents["latents"].arrays["latents"])[-1]
    goal = encode(other.stage.codec, images[-1:])[0]  # type: ignore[attr-defined]
    assert by_latents["plan"].meta["cost"] == pytest.approx(float((latents - goal).square().mean().sqrt()), rel=1e-4)
    other.close()


def chunks_ask(stage: FramesStage, image: Images, chunks: Any, tick_step: int = 8) -> Ask:
    seen = encode(stage.codec, image[None])
    inputs = {
        "latents": Payload(PayloadKind.LATENTS, {"latents": seen}),
        "chunks": Payload(PayloadKind.ACTIONS, {"actions": chunks}),
    }
    return Ask(inputs, Op.INFER, tick_step, {"samples": len(chunks)})


def test_futures_are_what_each_chunk_leads_to(driver: Driver, stage: FramesStage, images: Images) -> None:
    """As the stage predicts them one by one from a lone frame, whatever the number of chunks."""
    chunks = np.random.default_rng(3).uniform(0, 512, (5, 16, 2)).astype(np.float32)
    outputs = driver.run("s", 1, chunks_ask(stage, images[0], chunks))
    driver.discard("s", 1)
    futures = torch.as_tensor(outputs["futures"].arrays["latents"])
    assert futures.shape == (5, AHEAD, 16, 72)
    assert outputs["futures"].meta["first_step"] == 9
    for i, chunk in enumerate(chunks):
        given = Payload(PayloadKind.ACTIONS, {"actions": chunk})
        seen = Payload(PayloadKind.LATENTS, {"latents": encode(stage.codec, images[:1])})
        alone = driver.run("s", 1, Ask({"latents": seen, "actions": given}, Op.INFER, 8, {"frames": AHEAD}))
        driver.discard("s", 1)
        torch.testing.assert_close(torch.as_tensor(alone["latents"].arrays["latents"]), futures[i], rtol=0, atol=1e-4)
    fewer = driver.run("s", 1, chunks_ask(stage, images[0], chunks[:2]))
    driver.discard("s", 1)
    torch.testing.assert_close(torch.as_tensor(fewer["futures"].arrays["latents"]), futures[:2], rtol=0, atol=1e-4)


@pytest.mark.parametrize("shape", [(16, 2), (0, 16, 2), (3, 0, 2), (3, 16, 3)])
def test_chunks_of_another_shape_are_refused(
    driver: Driver, stage: FramesStage, images: Images, shape: tuple[int, ...]
) -> None:
    with pytest.raises(TensorError, match="chunks"):
        driver.run("s", 1, chunks_ask(stage, images[0], np.zeros(shape, np.float32)))


def test_parts_of_a_batch_do_not_matter(stage: FramesStage) -> None:
    c = stage.model.config
    g = torch.Generator().manual_seed(0)
    kv = torch.randn(c.layers, 2, 10 * c.tokens, c.heads, c.head_dim, generator=g)
    last, noise = torch.randn(16, 72, generator=g), torch.randn(STEPS, 16, 72, generator=g)
    actions = torch.rand(7, STEPS, 2, generator=g) * 2 - 1

    def imagine(batch: int) -> tuple[Tensor, int]:
        work, passes = Futures(stage.model, kv, last, noise, batch=batch).imagine(actions), 0
        while True:
            try:
                next(work)
                passes += 1
            except StopIteration as end:
                return end.value, passes

    (whole, one), (parted, three) = imagine(64), imagine(3)
    assert (one, three) == (STEPS, 3 * STEPS)
    torch.testing.assert_close(whole, parted, rtol=0, atol=1e-5)


def test_costs_know_the_goal(stage: FramesStage, images: Images) -> None:
    """Of several frames the goal itself costs least, by points and by latents."""
    latents = encode(stage.codec, images)
    futures = latents[:, None].expand(-1, 2, -1, -1)
    for measure in ("points", "latents"):
        costs = GoalCost(stage.codec, latents[2], measure)(futures, torch.zeros(len(images), 2, 2))
        assert costs.shape == (len(images),)
        assert costs.argmin() == 2
        assert float(costs[2]) == pytest.approx(0, abs=1e-4)


class TestChoose:
    @pytest.fixture
    def stage(self, small_checkpoints: Path) -> ChooseStage:
        return choose(checkpoints=str(small_checkpoints), margin=0.0)

    @pytest.fixture
    def given(self, stage: ChooseStage) -> dict[str, Payload]:
        g = torch.Generator().manual_seed(0)
        return {
            "chunks": Payload(
                PayloadKind.ACTIONS, {"actions": torch.rand(6, 16, 2, generator=g) * 512}, {"revision": "r"}
            ),
            "futures": Payload(
                PayloadKind.LATENTS, {"latents": torch.randn(6, 8, 16, 72, generator=g)}, {"first_step": 9}
            ),
            "window": Payload(PayloadKind.KV, {"kv": stage.judge.past("push")}),
        }

    def promises(self, judge: Judge, given: dict[str, Payload]) -> Tensor:
        """What each chunk promises, judged alone."""
        chunks, futures = given["chunks"].arrays["actions"], given["futures"].arrays["latents"]
        past = given["window"].arrays["kv"]
        each = [
            judge.read(past, f[None, -1], to_unit(c[None, :8])).progress for c, f in zip(chunks, futures, strict=True)
        ]
        return torch.cat(each)

    def run(self, stage: ChooseStage, given: dict[str, Payload], **params: Any) -> Outputs:
        driver = Driver(stage)
        driver.open("s")
        try:
            return driver.run("s", 0, Ask(given, Op.INFER, 8, params))
        finally:
            driver.close()

    def test_the_most_promising_is_chosen(self, stage: ChooseStage, given: dict[str, Payload]) -> None:
        promises = self.promises(stage.judge, given)
        best = int(promises.argmax())
        assert promises[best] > promises.sum() / len(promises)
        outputs = self.run(stage, given, frames=3)
        assert (torch.as_tensor(outputs["chunk"].arrays["actions"]) == given["chunks"].arrays["actions"][best]).all()
        assert outputs["chunk"].meta == {"revision": "r", "chosen": best}
        latents = outputs["latents"]
        assert (torch.as_tensor(latents.arrays["latents"]) == given["futures"].arrays["latents"][best, :3]).all()
        assert latents.meta["first_step"] == 9
        assert latents.meta["promise"] == pytest.approx(float(promises[best]), abs=1e-5)

    def test_the_first_stays_unless_another_promises_more(
        self, small_checkpoints: Path, stage: ChooseStage, given: dict[str, Payload]
    ) -> None:
        chosen = self.run(choose(checkpoints=str(small_checkpoints), margin=1.0), given)
        assert chosen["chunk"].meta["chosen"] == 0
        assert chosen["latents"].arrays["latents"].shape == (8, 16, 72)

    def test_what_does_not_fit_is_refused(self, stage: ChooseStage, given: dict[str, Payload]) -> None:
        with pytest.raises(TensorError, match="9 frames asked for, 8 were imagined"):
            self.run(stage, given, frames=9)
        fewer = given["futures"].arrays["latents"][:5]
        with pytest.raises(TensorError, match="5 futures of 6 chunks"):
            self.run(stage, {**given, "futures": Payload(PayloadKind.LATENTS, {"latents": fewer})})
